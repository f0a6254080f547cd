"""Runs in tests/data/knowledge: their captures, and what was said of them, packed. `python -m tests.knowledge --keep`
makes them; what no comparison reads is left out.
"""

import gzip
import re
import shutil
from pathlib import Path

import zstandard

DATA = Path(__file__).parents[1] / "data/knowledge"

# Of the brokers' logs: groups, leaders, controllers, and topics that go.
_KEPT = re.compile(r"GroupCoordinator id|starts at leader epoch|RemoveTopicRecord|In the new epoch")
_DROPPED = re.compile(r"Committing offsets|Replaying offset commit|OffsetCommit|offset commit")
_SAID = ("ports.jsonl", "events.jsonl", "members.jsonl", "asked.jsonl", "txnlog.txt", "consumers.log")


def keep(folder: Path, name: str) -> None:
    """Pack a run's folder into DATA."""
    target = DATA / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    packer = zstandard.ZstdCompressor(level=19)
    (target / "traffic.pcap.zst").write_bytes(packer.compress((folder / "traffic.pcap").read_bytes()))
    for said in _SAID:
        if (folder / said).exists():
            _pack(target / f"{said}.gz", (folder / said).read_text())
    for log in sorted(folder.glob("broker-*/knowledge.log")):
        (target / log.parent.name).mkdir()
        lines = (line for line in log.read_text().splitlines(True) if _KEPT.search(line) and not _DROPPED.search(line))
        _pack(target / log.parent.name / "knowledge.log.gz", "".join(lines))


def _pack(path: Path, text: str) -> None:
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.write(text.encode())
