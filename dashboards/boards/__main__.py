"""Write every board as JSON: `python -m dashboards.boards [FOLDER]`."""

import json
import sys
from pathlib import Path
from typing import Any

from dashboards.boards import brokers, clients, groups, itself, overview, topics, zookeeper

BOARDS = {
    "overview.json": overview,
    "brokers.json": brokers,
    "topics.json": topics,
    "groups.json": groups,
    "clients.json": clients,
    "zookeeper.json": zookeeper,
    "itself.json": itself,
}


def text_of(board: dict[str, Any]) -> str:
    return json.dumps(board, indent=1, ensure_ascii=False) + "\n"


def main(folder: Path) -> None:
    for name, module in BOARDS.items():
        (folder / name).write_text(text_of(module.BOARD))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
