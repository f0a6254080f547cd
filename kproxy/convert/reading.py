"""The rows of captures as plain dicts, for programs: `kproxy.exchanges`; and the events of ZooKeeper's connections.

Duty: yields the rows that `kproxy convert` would write, in the same order, without a dataset. They are sorted in runs
on the disk, in a temporary folder, so memory does not depend on the capture's size (see `tables.writer`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kproxy.capture.connections.flow import Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.dissection.uncut import uncut
from kproxy.capture.formats.captures import Capture
from kproxy.capture.quality import Quality
from kproxy.convert.job import Settings, captures_of
from kproxy.convert.rows import Rows
from kproxy.errors import KproxyError
from kproxy.tables import schema, writer
from kproxy.wire.connection import ConnectionInfo
from kproxy.zookeeper.session import Event as ZooKeeperEvent


def exchanges(
    capture: Path | str,
    *,
    ports: Sequence[int] = (),
    cluster: str = "default",
    key_log: Path | str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the requests of a capture, each with its response, in the order of time.

    A dict has the columns of the table `exchanges` (see `kproxy.tables.schema`): times are nanoseconds since the epoch
    and durations nanoseconds, both int; `time` is a datetime in UTC; None means unknown. ports: the brokers' ports;
    without them, connections are recognised by their content. key_log: an SSLKEYLOGFILE for TLS connections; it needs
    tshark.

    All errors are raised with the first row: CaptureError if the file is no capture or cannot be read, KproxyError for
    invalid arguments. Missing packets are no error.
    """
    if not isinstance(capture, (str, Path)) or not str(capture):
        raise KproxyError(f"{capture!r} is no path of a capture: a text or a Path is needed")
    if isinstance(ports, str) or not isinstance(ports, Iterable) or not all(isinstance(port, int) for port in ports):
        raise KproxyError(f"ports: {ports!r} is no list of whole numbers, like [9092]")
    jobs = captures_of([capture], Settings(ports=tuple(ports), cluster=cluster, key_log=key_log))
    if len(jobs) > 1:
        raise KproxyError(f"{capture}: a folder of {len(jobs)} captures; read them one by one")
    (job,) = jobs
    table = schema.EXCHANGES
    with TemporaryDirectory(prefix="kproxy-") as folder:
        sorter = writer.Sorter(table, Path(folder))
        rows = Rows(lambda of, batch: sorter.add(batch) if of is table else None, job.records)
        for _ in rows.read(job, Quality()):
            pass
        for part in sorter.in_order():
            for batch in rows.names.fill(part).to_batches(max_chunksize=writer.STEP_ROWS):
                yield from batch.to_pylist()


def zookeeper_events(
    captures: Sequence[Path | str], settings: Settings
) -> Iterator[tuple[ConnectionInfo, ZooKeeperEvent]]:
    """Yield the events of ZooKeeper connections in captures, one window of packets after the other, with values.

    Events of a connection are in the order of time. Raises the errors of `exchanges`.
    """
    for job in captures_of(captures, settings):
        ready: list[tuple[ConnectionInfo, ZooKeeperEvent]] = []

        def connected(info: ConnectionInfo, into: list[tuple[ConnectionInfo, ZooKeeperEvent]] = ready) -> _Listener:
            return lambda events: into.extend((info, event) for event in events)

        handlers = Handlers(lambda flow: lambda events: None, lambda *_: None, lambda flow: None, connected)
        flows = Flows(
            job.source, Quality(), handlers, cluster=job.cluster, ports=job.ports, zookeeper_ports=job.zookeeper_ports
        )
        for window in uncut(Capture(job.paths, Quality(), storage=job.storage).windows()):
            flows.window(window)
            yield from ready
            ready.clear()
        flows.finish()
        yield from ready


_Listener = Callable[[list[ZooKeeperEvent]], None]
