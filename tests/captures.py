"""The captures of tests/data, unpacked once per test run."""

import gzip
import json
import lzma
import tarfile
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

DATA = Path(__file__).parent / "data" / "captures"

_unpacked = []  # the folder lives as long as the process


@cache
def folder(archive: str) -> Path:
    directory = TemporaryDirectory(prefix="kproxy-captures-")
    _unpacked.append(directory)
    with lzma.open(DATA / f"{archive}.tar.xz") as stream, tarfile.open(fileobj=stream) as bundle:
        bundle.extractall(directory.name)  # ours; a filter is not known before 3.11.4
    return Path(directory.name)


def capture(name: str) -> Path:
    """The file of a capture, by its name without or with its ending."""
    for archive in ("captures", "shapes"):
        for candidate in (name, f"{name}.pcap", f"{name}.pcapng", f"{name}.pcap.gz"):
            path = folder(archive) / candidate
            if path.is_file():
                return path
    raise FileNotFoundError(name)


@cache
def expected(name: str) -> list[dict]:
    """The exchanges that an independent walk of the capture found."""
    path = capture(f"{name}.exchanges.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def top_level(row: dict) -> tuple:
    """A row of `exchanges` as a line of NAME.exchanges.jsonl.gz says it, less throttle and error."""
    return (
        row["client_port"],
        row["broker_port"],
        row["correlation_id"],
        row["api_key"],
        row["api_version"],
        row["client_id"],
        row["outcome"] == "answered",
    )


def line(entry: dict) -> tuple:
    """The same of a line of NAME.exchanges.jsonl.gz."""
    return (
        entry["client_port"],
        entry["broker_port"],
        entry["id"],
        entry["key"],
        entry["version"],
        entry["client_id"],
        entry["answered"],
    )


def counted(tuples) -> Counter:
    return Counter(tuples)
