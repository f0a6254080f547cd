"""Captures -> tables, on one machine: `kproxy convert`.

Duty: join the flows of captures to the writers of tables, and share flows out among processes. The same captures give
the same files whatever the number of processes: flows fall into fixed shards, a process takes some of them, and the
rows of all are merged in one order.

Each process reads the whole capture and decodes its own flows. Memory: see capture.flows, and RUN_ROWS rows per table.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa

import kproxy
from kproxy.capture import content, files
from kproxy.capture.flows import SHARDS, Flow, Flows, Handlers
from kproxy.capture.pcap import Capture
from kproxy.capture.quality import Quality
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import schema, writer
from kproxy.tables.columns import ExchangeColumns
from kproxy.wire.events import CLIENT, NONE, REQUEST_NOT_SEEN, Desync, Event, Exchange, Gap, Unanswered

BATCH_ROWS = 16 * 1024
SMALL_BYTES = 32 << 20  # a capture below it is not worth a second process


@dataclass(frozen=True)
class Job:
    """One capture: a file, or rotated files in their order."""

    source: str
    paths: tuple[str, ...]
    cluster: str
    ports: tuple[int, ...]


@dataclass
class Summary:
    """What came of a conversion."""

    folder: Path
    rows: dict[str, int] = field(default_factory=dict)
    quality: dict[str, Quality] = field(default_factory=dict)  # by source
    failed: list[CaptureError] = field(default_factory=list)


Progress = Callable[[str, int, int], None]  # (source, bytes read, bytes in all or 0)


def convert(
    captures: Sequence[Path | str],
    out: Path | str,
    *,
    ports: Sequence[int] = (),
    cluster: str = "default",
    rotated: bool = False,
    follow: bool = False,
    processes: int = 0,
    progress: Progress | None = None,
) -> Summary:
    """Write the tables of captures into the folder `out`. A capture that cannot be read does not stop the others."""
    jobs = _jobs(captures, cluster, tuple(sorted(set(ports))), rotated)
    dataset = writer.Dataset(out)
    summary = Summary(Path(out))
    work = dataset.begin("convert")
    try:
        places: dict[str, Path] = {}
        for number, job in enumerate(jobs):
            try:
                runs, quality = _read(job, work, number, processes, follow, progress)
            except CaptureError as fault:
                summary.failed.append(fault)
                continue
            summary.quality[job.source] = quality
            for table in schema.TABLES.values():
                finished = work / f"{number}.{table.name}.parquet"
                rows = writer.write(table, runs[table.name], finished)
                summary.rows[table.name] = summary.rows.get(table.name, 0) + rows
                places[f"{table.name}/{job.source}.parquet"] = finished
        if places:
            dataset.publish(places, _manifest(jobs, summary))
    finally:
        dataset.abandon()
    return summary


def _jobs(captures: Sequence[Path | str], cluster: str, ports: tuple[int, ...], rotated: bool) -> list[Job]:
    paths = [str(path) for path in captures]
    if rotated:
        return [Job(_source(paths[0]), tuple(paths), cluster, ports)]
    jobs = [Job(_source(path), (path,), cluster, ports) for path in paths]
    seen: dict[str, str] = {}
    for job in jobs:
        if job.source in seen:
            raise KproxyError(
                f"{seen[job.source]} and {job.paths[0]} have the same name, and tables name their source by it: "
                "convert them into separate folders, or rename one"
            )
        seen[job.source] = job.paths[0]
    return jobs


def _source(path: str) -> str:
    return "stdin" if path == files.STDIN else Path(path).name


def _manifest(jobs: list[Job], summary: Summary) -> dict[str, Any]:
    return {
        "kproxy": kproxy.__version__,
        "pyarrow": pa.__version__,
        "settings": {"cluster": jobs[0].cluster, "ports": list(jobs[0].ports)},
        "sources": {
            job.source: [Path(path).name for path in job.paths] for job in jobs if job.source in summary.quality
        },
        "rows": summary.rows,
    }


# --- one capture, in one or more processes ---------------------------------------------------------------------------


def _read(
    job: Job, work: Path, number: int, processes: int, follow: bool, progress: Progress | None
) -> tuple[dict[str, list[Path]], Quality]:
    """Read a capture into sorted runs by table."""
    regular = [Path(path) for path in job.paths if Path(path).is_file()]
    if follow or len(regular) < len(job.paths):
        processes = 1  # a pipe has one reader, and a file that grows has no end to wait for together
    elif not processes:
        small = sum(path.stat().st_size for path in regular) < SMALL_BYTES
        processes = 1 if small else min(len(os.sched_getaffinity(0)), SHARDS)
    shares = [tuple(range(share, SHARDS, processes)) for share in range(processes)]
    if processes == 1:
        results = [_share(job, work, f".{number}.0", shares[0], True, follow, progress)]
    else:
        results = _in_processes(job, work, number, shares, progress)
    quality = Quality()
    runs: dict[str, list[Path]] = {name: [] for name in schema.TABLES}
    for of_tables, of_quality in results:
        quality.add(of_quality)
        for name, paths in of_tables.items():
            runs[name] += paths
    sorter = writer.Sorter(schema.QUALITY, work, f".{number}")
    sorter.add(_quality_batch(job.source, quality))
    sorter.spill()
    runs["quality"] = sorter.runs
    return runs, quality


def _in_processes(
    job: Job, work: Path, number: int, shares: list[tuple[int, ...]], progress: Progress | None
) -> list[tuple[dict[str, list[Path]], Quality]]:
    context = get_context("spawn")
    workers = []
    for index, share in enumerate(shares):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, job, work, f".{number}.{index}", share, index == 0)
        process = context.Process(target=_worker, args=arguments, daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    results = []
    try:
        for process, ours in workers:
            while True:
                try:
                    message = ours.recv()
                except EOFError:
                    process.join()
                    raise KproxyError(
                        f"{job.source}: a worker process ended with status {process.exitcode}; "
                        "was it short of memory? --processes 1 needs the least"
                    ) from None
                if isinstance(message, Exception):
                    raise message
                if isinstance(message[0], str):
                    if progress is not None:
                        progress(*message)
                    continue
                results.append(message)
                break
    finally:
        for process, ours in workers:
            ours.close()
            process.terminate()
            process.join()
    return results


def _worker(pipe: Connection, job: Job, work: Path, prefix: str, shards: tuple[int, ...], first: bool) -> None:
    """A process of its own: its share of a capture's flows. It ends with its parent, whose folder it writes in."""
    parent = parent_process()
    assert parent is not None
    Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    try:
        report = (lambda *message: pipe.send(message)) if first else None
        pipe.send(_share(job, work, prefix, shards, first, False, report))
    except KproxyError as fault:
        pipe.send(fault)


def _share(
    job: Job, work: Path, prefix: str, shards: tuple[int, ...], first: bool, follow: bool, progress: Progress | None
) -> tuple[dict[str, list[Path]], Quality]:
    """Read a capture and decode the flows of some shards; `first`: count also what belongs to no flow."""
    quality = Quality()
    rows = _Rows(work, prefix)
    capture = Capture(job.paths, quality if first else Quality(), follow=files.sleep_and_go_on if follow else None)
    flows = Flows(
        job.source,
        quality,
        Handlers(rows.decided, rows.ended),
        cluster=job.cluster,
        ports=job.ports,
        shards=shards,
        first=first,
    )
    try:
        for window in capture.windows():
            flows.window(window)
            rows.flush(BATCH_ROWS)
            if progress is not None:
                progress(job.source, capture.consumed, capture.size)
    except KeyboardInterrupt:
        if not follow:  # the way to end a capture that still grows
            raise
    flows.finish()
    return rows.finish(), quality


class _Rows:
    """The rows of some flows on their way to sorted runs."""

    def __init__(self, work: Path, prefix: str) -> None:
        self.exchanges = ExchangeColumns()
        self._exchanges = writer.Sorter(schema.EXCHANGES, work, prefix)
        self._connections = writer.Sorter(schema.CONNECTIONS, work, prefix)
        self._connection_rows: list[dict[str, Any]] = []
        self._tallies: dict[Flow, _Tally] = {}

    def decided(self, flow: Flow) -> "_Tally":
        tally = self._tallies[flow] = _Tally(flow, self)
        return tally

    def ended(self, flow: Flow) -> None:
        self._connection_rows.append(self._tallies.pop(flow).row())

    def flush(self, least: int) -> None:
        if self.exchanges.rows >= least:
            self._exchanges.add(self.exchanges.batch())
        if len(self._connection_rows) >= least:
            self._connections.add(pa.RecordBatch.from_pylist(self._connection_rows, schema.CONNECTIONS.schema))
            self._connection_rows.clear()

    def finish(self) -> dict[str, list[Path]]:
        self.flush(1)
        self._exchanges.spill()
        self._connections.spill()
        return {"exchanges": self._exchanges.runs, "connections": self._connections.runs}


class _Tally:
    """The listener of one connection: rows of its exchanges, and the counts of its own row."""

    def __init__(self, flow: Flow, rows: _Rows) -> None:
        assert flow.info is not None
        self._flow = flow
        self._info = flow.info
        self._rows = rows
        self._retransmitted = flow.talk.retransmitted_ns
        self._requests = 0
        self._answers = 0
        self._resyncs = 0
        self._faults = 0

    def __call__(self, events: list[Event]) -> None:
        append = self._rows.exchanges.append
        for event in events:
            kind = type(event)
            if kind is Exchange:
                self._answers += event.response_end != NONE
                self._requests += event.outcome is not REQUEST_NOT_SEEN
                append(self._info, event, self._sent_again(event) if self._retransmitted else 0)
            elif kind is Unanswered:
                self._requests += 1
                append(self._info, event.exchange, self._sent_again(event.exchange) if self._retransmitted else 0)
            elif kind is Gap:
                self._resyncs += event.resync
            elif kind is Desync:
                self._faults += 1
        if self._rows.exchanges.rows >= BATCH_ROWS:
            self._rows.flush(BATCH_ROWS)

    def _sent_again(self, exchange: Exchange) -> int:
        """Segments of the connection that were sent again between the exchange's first byte and its last."""
        times = self._retransmitted
        start = exchange.request_start if exchange.request_start != NONE else exchange.response_start
        end = exchange.response_end if exchange.response_end != NONE else self._flow.last_ns
        return bisect_right(times, end) - bisect_left(times, start)

    def row(self) -> dict[str, Any]:
        flow, info = self._flow, self._info
        client = flow.client
        session = flow.session
        return {
            "source": info.source,
            "cluster": info.cluster,
            "connection": info.id,
            "time": flow.first_ns // 1000,
            "start_ns": flow.first_ns,
            "end_ns": flow.last_ns,
            "client_address": info.client_address,
            "client_port": info.client_port,
            "broker_address": info.broker_address,
            "broker_port": info.broker_port,
            "broker_id": info.broker_id,
            "requests": self._requests,
            "answers": self._answers,
            "client_bytes": flow.payload_bytes[client ^ CLIENT],
            "broker_bytes": flow.payload_bytes[client ^ 1],
            "sasl_mechanism": session.sasl_mechanism if session else None,
            "sasl_tokens": session.sasl_tokens if session else 0,
            "tls": "tls" if flow.speaks == content.TLS else "plain",
            "start_seen": flow.start_seen,
            "end_seen": flow.close in ("fin", "reset"),
            "close": flow.close,
            "handshake_rtt_ns": None if flow.rtt_ns < 0 else flow.rtt_ns,
            "retransmissions": flow.total("retransmissions"),
            "out_of_order": flow.total("out_of_order"),
            "zero_windows": flow.total("zero_windows"),
            "gaps": flow.total("gaps"),
            "gap_bytes": flow.total("gap_bytes"),
            "resyncs": self._resyncs,
            "faults": self._faults,
        }


def _quality_batch(source: str, quality: Quality) -> pa.RecordBatch:
    rows = [
        {
            "source": source,
            "kind": row.kind,
            "count": row.count,
            "bytes": row.bytes,
            "first_ns": None if row.first_ns == NONE else row.first_ns,
            "last_ns": None if row.last_ns == NONE else row.last_ns,
            "sentence": row.sentence,
        }
        for row in quality
    ]
    return pa.RecordBatch.from_pylist(rows, schema.QUALITY.schema)
