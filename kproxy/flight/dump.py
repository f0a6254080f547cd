"""Writes a process's memory into a folder: tables, and a pcapng of frames. Runs as a separate process.

Duty: read the output of `sending.py` from standard input, write `frames.pcapng` and the tables, and report the result
as a line of JSON on standard output. It costs the relaying process only the time to write to a pipe. Frames are
redacted (`redaction.py`) before any byte of them reaches a file. Memory: the input, and the rows of the exchanges of
connections with frames.
"""

import json
import pickle
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow.parquet as pq

from kproxy.errors import KproxyError
from kproxy.flight.cutting import Frame, cut
from kproxy.flight.frames import ENDED, Chunk
from kproxy.flight.packets import PacketFile, Stream
from kproxy.flight.redaction import LEFT_OUT, allowance, written
from kproxy.tables.arrays import batch
from kproxy.tables.live.live_files import Files, Quality
from kproxy.tables.live.portions import Batches
from kproxy.tables.names import Names
from kproxy.tables.schema import CONNECTIONS, EXCHANGES
from kproxy.wire.events import CLIENT


class _Row(NamedTuple):
    """Columns of an exchange's row."""

    connection: int
    correlation_id: int
    number: int
    api: str
    api_version: int
    client_id: str | None
    total_ns: int | None
    queue_ns: int | None
    muted_ns: int | None
    throttle_ms: int | None
    error: str | None
    outcome: str
    request_start_ns: int | None
    request_end_ns: int | None
    response_start_ns: int | None
    response_end_ns: int | None


class _SameId:
    """The exchanges of a connection with one correlation id, in order: all, and those with an answer."""

    def __init__(self, rows: list[_Row]) -> None:
        rows.sort(key=attrgetter("number"))
        self.rows = rows
        self.answered = [row for row in rows if row.response_start_ns is not None] if len(rows) > 1 else rows


Known = dict[tuple[int, int], _SameId]  # (connection, correlation id) -> exchanges
_COLUMNS = list(_Row._fields)
_ROWS = 4096  # rows of the table per batch
_MAX_LATER_NS = 1_000_000_000  # a later frame is of another exchange with the same correlation id


@dataclass
class Sent:
    """The input of a dump."""

    folder: Path
    settings: dict[str, Any]
    records: bool  # whether the content of records is written
    why: str  # reason of the dump
    worker: int | None
    rows: list[Batches] = field(default_factory=list)
    connections: list[dict[str, Any]] = field(default_factory=list)  # rows of open connections
    chunks: list[Chunk] = field(default_factory=list)


def main() -> None:
    """Dump the content of standard input; the exit status is 1 after a fault."""
    try:
        result = dump(read(sys.stdin.buffer))
    except (KproxyError, OSError) as fault:
        print(json.dumps({"error": str(fault)}))
        raise SystemExit(1) from None
    print(json.dumps(result))


def read(file: BinaryIO) -> Sent:
    """Return the output of `sending.send`. Raises EOFError if its process ended amid writing."""
    sent = Sent(*pickle.load(file))
    while (item := pickle.load(file)) is not None:
        if isinstance(item, Batches):
            sent.rows.append(item)
        elif item and isinstance(item[0], dict):
            sent.connections += item
        else:
            sent.chunks += item
    return sent


def dump(sent: Sent) -> dict[str, Any]:
    """Write the folder; returns a description of its content."""
    tables = _tables(sent)
    known = _exchanges(sent.folder, {chunk.info.id for chunk in sent.chunks}) if tables else {}
    name = "frames.pcapng" if sent.worker is None else f"frames-worker-{sent.worker}.pcapng"
    path = sent.folder / name
    with path.open("xb") as file:
        path.chmod(0o600)
        frames, left_out = _frames(sent, PacketFile(file), known)
    return {
        "folder": str(sent.folder),
        "file": name,
        "exchanges": tables,
        "frames": frames,
        "left_out": left_out,
        "tables_from_ns": _first_ns(sent.folder, sent.worker) if tables else None,
        "frames_from_ns": min((chunk.now_ns for chunk in sent.chunks), default=None),
    }


def _first_ns(folder: Path, worker: int | None) -> int | None:
    """Return the earliest start of an exchange in the tables, in ns since the epoch, from the files' statistics."""
    first: list[int] = []
    of_worker = "" if worker is None else f"-worker-{worker}"
    for file in (folder / EXCHANGES.name).glob("*.parquet"):
        if of_worker not in file.name:
            continue
        footer = pq.ParquetFile(file).metadata
        column = EXCHANGES.schema.get_field_index("request_start_ns")
        for group in range(footer.num_row_groups):
            statistics = footer.row_group(group).column(column).statistics
            if statistics is not None and statistics.has_min_max:
                first.append(statistics.min)
    return min(first, default=None)


def _tables(sent: Sent) -> int:
    """Write the tables; returns the number of exchanges."""
    files = Files(sent.folder, sent.settings | {"flight": sent.why}, Quality(), sent.worker)
    files.claim()
    try:
        for rows in sent.rows:
            files.add(rows)
        if sent.connections:
            still = batch(CONNECTIONS.schema, sent.connections)
            files.add(Batches({}, [], Names().as_json(), [(CONNECTIONS.name, still)]))
        files.roll()
    finally:
        files.release()
    return files.exchanges


def _exchanges(folder: Path, connections: set[int]) -> Known:
    """Return the rows of these connections' exchanges, by connection and correlation id."""
    found: dict[tuple[int, int], list[_Row]] = {}
    for file in sorted((folder / EXCHANGES.name).glob("*.parquet")):
        for some in pq.ParquetFile(file).iter_batches(_ROWS, columns=_COLUMNS):
            for row in map(_Row._make, zip(*(some.column(name).to_pylist() for name in _COLUMNS), strict=True)):
                if row.connection in connections:
                    found.setdefault((row.connection, row.correlation_id), []).append(row)
    return {key: _SameId(rows) for key, rows in found.items()}


def _frames(sent: Sent, file: PacketFile, known: Known) -> tuple[int, int]:
    """Write the frames; returns how many, and how many of them without their bodies."""
    streams: dict[int, Stream] = {}
    begun = {chunk.info.id for chunk in sent.chunks if not chunk.offset and chunk.side == CLIENT}
    left = allowance()
    count = left_out = 0
    for frame in cut(sent.chunks):
        connection = frame.info.id
        stream = streams.get(connection)
        if stream is None:
            stream = streams[connection] = file.stream(frame.info)
            if connection in begun:
                stream.begin(frame.info.opened_ns)
        data, note = written(frame, left, records=sent.records)
        size = frame.size if len(data) < frame.size and note.startswith(LEFT_OUT) else len(data)
        left_out += len(data) < size
        row = _row_of(frame, known.get((connection, frame.correlation_id)))
        start_ns, end_ns = _times(frame, row)
        stream.frame(frame.side, start_ns, end_ns, data, size, _comment(frame, row, note))
        count += 1
    for chunk in sent.chunks:
        if chunk.side == ENDED and chunk.info.id in streams:
            streams[chunk.info.id].end(chunk.now_ns)
    file.close()
    return count, left_out


def _row_of(frame: Frame, same: _SameId | None) -> _Row | None:
    """Return the row of a frame: the last one with its correlation id that had begun when the frame passed."""
    if same is None:
        return None
    if len(same.rows) == 1:
        return same.rows[0]
    if frame.side == CLIENT:
        rows, begun = same.rows, attrgetter("request_start_ns")
    else:
        rows, begun = same.answered, attrgetter("response_start_ns")
    after = bisect_right(rows, frame.end_ns, key=begun)
    return rows[after - 1] if after else None


def _times(frame: Frame, row: _Row | None) -> tuple[int, int]:
    """Return the start and end from the tables, which are earlier if kproxy held the frame or waited for its header."""
    if row is not None:
        start_ns, end_ns = row.request_start_ns, row.request_end_ns
        if frame.side != CLIENT:
            start_ns, end_ns = row.response_start_ns, row.response_end_ns
        if start_ns is not None and end_ns is not None and 0 <= frame.end_ns - end_ns < _MAX_LATER_NS:
            return start_ns, end_ns
    return frame.start_ns, frame.end_ns


def _comment(frame: Frame, row: _Row | None, note: str) -> str:
    """Return kproxy's comment on a frame, for readers in Wireshark."""
    notes = [f"kproxy: connection {frame.info.id}"]
    if row is not None:
        notes[0] += f", exchange {row.number}"
        notes.append(f"{row.api} v{row.api_version} of {row.client_id or 'a client without an id'}")
        if row.total_ns is not None:
            parts = ((row.queue_ns, "queue"), (row.muted_ns, "mute"))
            shares = [f"{name} {value / 1e6:.3f} ms" for value, name in parts if value]
            took = f"answered after {row.total_ns / 1e6:.3f} ms"
            notes.append(f"{took} ({', '.join(shares)})" if shares else took)
        else:
            notes.append(row.outcome)
        if row.error:
            notes.append(f"error {row.error}")
        if row.throttle_ms:
            notes.append(f"throttled for {row.throttle_ms} ms")
    if note:
        notes.append(f"{note} (the frame has {frame.size} bytes)")
    return "; ".join(notes)
