"""The rows of captures as plain dicts, for programs: `kproxy.exchanges`; and what ZooKeeper's connections say.

Duty: the rows that `kproxy convert` would write, in the same order, without a dataset. They are sorted in runs on the
disk, in a temporary folder, so memory is bounded whatever the capture's size (see `tables.writer`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kproxy.capture.captures import Capture
from kproxy.capture.flow import Handlers
from kproxy.capture.flows import Flows
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
    """The requests of a capture, each with its answer, in the order of time.

    A dict has the columns of the table `exchanges` (see `kproxy.tables.schema`): times are nanoseconds since the epoch
    and durations nanoseconds, both int; `time` is a datetime in UTC; None is "not known". `ports` names the brokers'
    ports, else connections are recognised by their content; `key_log` is an SSLKEYLOGFILE for TLS connections and
    needs tshark.

    All errors are raised when the first row is asked for: CaptureError where the file is no capture or cannot be read,
    KproxyError for arguments that cannot be. What a capture does not show is no error.
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
    """What the ZooKeeper connections of captures say, a window of packets after the other, values included.

    In the order of time for each connection. Raises as `exchanges`.
    """
    for job in captures_of(captures, settings):
        ready: list[tuple[ConnectionInfo, ZooKeeperEvent]] = []

        def connected(info: ConnectionInfo, into: list[tuple[ConnectionInfo, ZooKeeperEvent]] = ready) -> _Listener:
            return lambda events: into.extend((info, event) for event in events)

        handlers = Handlers(lambda flow: lambda events: None, lambda *_: None, lambda flow: None, connected)
        flows = Flows(
            job.source, Quality(), handlers, cluster=job.cluster, ports=job.ports, zookeeper_ports=job.zookeeper_ports
        )
        for window in Capture(job.paths, Quality(), storage=job.storage).windows():
            flows.window(window)
            yield from ready
            ready.clear()
        flows.finish()
        yield from ready


_Listener = Callable[[list[ZooKeeperEvent]], None]
