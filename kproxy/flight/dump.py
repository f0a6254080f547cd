"""What a process has in memory -> a folder: tables, and a pcapng of frames. Runs as a process of its own.

Duty: read what `sending.py` writes to standard input, write `frames.pcapng` and the tables, and say in a line of JSON
on standard output what came of it. It takes nothing of the process that relays but the time to write to a pipe. Frames
are redacted here (`redaction.py`) before a byte of them reaches a file. Memory: what it is sent, and the rows of the
exchanges of connections that have frames.
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
from kproxy.tables.live_files import Files, Quality
from kproxy.tables.names import Names
from kproxy.tables.portions import Batches
from kproxy.tables.schema import CONNECTIONS, EXCHANGES
from kproxy.wire.events import CLIENT


class _Row(NamedTuple):
    """What is known of an exchange: columns of the table."""

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


class _Same:
    """The exchanges of a connection that have one correlation id, in their order: all, and those with an answer."""

    def __init__(self, rows: list[_Row]) -> None:
        rows.sort(key=attrgetter("number"))
        self.rows = rows
        self.answered = [row for row in rows if row.response_start_ns is not None] if len(rows) > 1 else rows


Known = dict[tuple[int, int], _Same]  # by connection and correlation id
_COLUMNS = list(_Row._fields)
_ROWS = 4096  # of the table that are in memory at once
_SAME_NS = 1_000_000_000  # a correlation id can come again; a frame that is older than that is another one's


@dataclass
class Sent:
    """What came on standard input."""

    folder: Path
    settings: dict[str, Any]
    records: bool  # whether what records hold is written
    why: str  # the dump was made for
    worker: int | None
    rows: list[Batches] = field(default_factory=list)
    connections: list[dict[str, Any]] = field(default_factory=list)  # rows of those that are open
    chunks: list[Chunk] = field(default_factory=list)


def main() -> None:
    """Dump what comes on standard input; the exit status is 1 where that failed."""
    try:
        told = dump(read(sys.stdin.buffer))
    except (KproxyError, OSError) as fault:
        print(json.dumps({"error": str(fault)}))
        raise SystemExit(1) from None
    print(json.dumps(told))


def read(file: BinaryIO) -> Sent:
    """What `sending.send` has written. EOFError: its process has ended in the middle."""
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
    """Write the folder; returns what is in it."""
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
    """When the first exchange of the tables began, in nanoseconds since the epoch, by the files' own statistics."""
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
    """Returns how many exchanges there are."""
    files = Files(sent.folder, sent.settings | {"flight": sent.why}, Quality(), sent.worker)
    files.claim()
    try:
        for rows in sent.rows:
            files.add(rows)
        if sent.connections:
            still = batch(CONNECTIONS.schema, sent.connections)
            files.add(Batches({}, [], Names().told(), [(CONNECTIONS.name, still)]))
        files.roll()
    finally:
        files.release()
    return files.exchanges


def _exchanges(folder: Path, connections: set[int]) -> Known:
    """What is known of the exchanges of these connections; those that share a correlation id in their order."""
    found: dict[tuple[int, int], list[_Row]] = {}
    for file in sorted((folder / EXCHANGES.name).glob("*.parquet")):
        for some in pq.ParquetFile(file).iter_batches(_ROWS, columns=_COLUMNS):
            for row in map(_Row._make, zip(*(some.column(name).to_pylist() for name in _COLUMNS), strict=True)):
                if row.connection in connections:
                    found.setdefault((row.connection, row.correlation_id), []).append(row)
    return {key: _Same(rows) for key, rows in found.items()}


def _frames(sent: Sent, file: PacketFile, known: Known) -> tuple[int, int]:
    """Returns how many frames were written, and of how many only the head."""
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


def _row_of(frame: Frame, same: _Same | None) -> _Row | None:
    """Which of the exchanges with its correlation id a frame is of: the last one that had it when the frame passed."""
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
    """When it came, as the tables have it: before it passed, if kproxy held it or waited for more of its header."""
    if row is not None:
        start_ns, end_ns = row.request_start_ns, row.request_end_ns
        if frame.side != CLIENT:
            start_ns, end_ns = row.response_start_ns, row.response_end_ns
        if start_ns is not None and end_ns is not None and 0 <= frame.end_ns - end_ns < _SAME_NS:
            return start_ns, end_ns
    return frame.start_ns, frame.end_ns


def _comment(frame: Frame, row: _Row | None, note: str) -> str:
    """What kproxy knows of a frame, for who reads it in Wireshark."""
    said = [f"kproxy: connection {frame.info.id}"]
    if row is not None:
        said[0] += f", exchange {row.number}"
        said.append(f"{row.api} v{row.api_version} of {row.client_id or 'a client without an id'}")
        if row.total_ns is not None:
            parts = ((row.queue_ns, "queue"), (row.muted_ns, "mute"))
            shares = [f"{name} {value / 1e6:.3f} ms" for value, name in parts if value]
            took = f"answered after {row.total_ns / 1e6:.3f} ms"
            said.append(f"{took} ({', '.join(shares)})" if shares else took)
        else:
            said.append(row.outcome)
        if row.error:
            said.append(f"error {row.error}")
        if row.throttle_ms:
            said.append(f"throttled for {row.throttle_ms} ms")
    if note:
        said.append(f"{note} (the frame has {frame.size} bytes)")
    return "; ".join(said)
