"""Error codes by name, from the official library's list in `layouts/errors.json`.

A newer broker may send other codes, so `error_name` returns a name for every int16.
"""

import json
from importlib.resources import files
from typing import NamedTuple


class ErrorCode(NamedTuple):
    code: int
    name: str
    retriable: bool  # the client may repeat the request, as Kafka's own clients do
    message: str | None


def error_name(code: int) -> str:
    error = ERRORS.get(code)
    return error.name if error else f"unknown_{code}"


def _load() -> dict[int, ErrorCode]:
    rows = json.loads(files("kproxy.protocol").joinpath("layouts", "errors.json").read_bytes())["errors"]
    return {row[0]: ErrorCode(*row) for row in rows}


ERRORS: dict[int, ErrorCode] = _load()
