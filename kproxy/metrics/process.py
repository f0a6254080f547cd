"""All cells of one process, and the clock of its events.

Duty: own the cells of each cluster and of the process; begin the counting of a connection. Bounds: those of the cells.
Refuses to know how events are counted.
"""

from collections.abc import Callable, Sequence, Sized
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING

from kproxy.metrics.consumers.lag import Lags
from kproxy.metrics.counters.cells import ClusterCells, DurationCells
from kproxy.metrics.counters.named import Topics
from kproxy.metrics.counters.passive import ENDS, PassiveCells
from kproxy.metrics.counters.reloads import ReloadCells
from kproxy.metrics.counters.slow import Slow
from kproxy.metrics.counters.upstream import ClusterState, UpstreamCells
from kproxy.metrics.counting import ConnectionMetrics
from kproxy.metrics.scrape.known import DISCONNECT_CAUSES
from kproxy.wire.connection import ConnectionInfo

if TYPE_CHECKING:
    from kproxy.metrics.counters.zookeeper import ZooKeeperCells


class Metrics:
    """All cells of one process, and the clock of its events."""

    def __init__(self) -> None:
        self.started_ns = time_ns()
        # Monotonic time plus this offset is the wall clock at the start. Every event has this clock, so compare an
        # event's time with `now_ns`: the wall clock steps, and continues while a virtual machine is suspended.
        self.clock_offset_ns = self.started_ns - monotonic_ns()
        self.clusters: dict[str, ClusterCells] = {}
        self.directions = {"request": DurationCells(), "response": DurationCells()}
        self._inside = self.directions["request"], self.directions["response"]
        self.loop_lag = DurationCells()  # time between the arrival of bytes and their read
        self.slow = Slow()
        self.connection_limit = 0
        self.workers = 1  # processes that relay
        self.core = "python"  # the implementation that relays requests without a decision; or "native"
        self.worker_restarts = 0
        self.insight_dropped = 0  # rows of insight that were not written
        self.insight_restarts = {"ended": 0, "hung": 0}  # of the insight process
        self.worker_usage: dict[str, tuple[int, int]] = {}  # by worker: ns of CPU, bytes of memory
        self.log_lines_dropped: Callable[[], int] = int  # since the start; 0 unless the server's logging sets it
        self.epoll_refusals: Callable[[], int] = int  # attempts to add a socket that epoll refused, because it was full
        self.audit_lines: Callable[[], tuple[int, int]] = lambda: (0, 0)  # written and dropped since the start
        self.reloads = ReloadCells(self.started_ns)
        self.upgrades = {"failed": 0}  # failed attempts to pass to a new process; a successful one ends this process
        self.predecessor_connections = 0  # connections that the previous process still has
        self.flight_dumps: dict[str, dict[str, int]] = {}  # by cause and outcome; empty: no flight recorder
        self.flight_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)  # memory in use: frames, headers
        self.otlp_pushes: dict[str, int] = {}  # by outcome; empty: no push is configured
        self.otlp_pushed_ns = 0  # last successful push, ns since the Unix epoch
        self.recorder_dropped: dict[str, int] = {}  # by source; the recorder's own dictionary, if there is a recorder
        self.passive: PassiveCells | None = None  # of `kproxy watch`
        self.zookeeper: dict[str, ZooKeeperCells] = {}  # by listener

    def upstream(self, cluster: str, causes: Sequence[str], state: Callable[[], ClusterState]) -> UpstreamCells:
        """Return the cells of a cluster's upstream. causes: of failed dials. state: returns the current state."""
        of_cluster = self.cluster(cluster)
        if of_cluster.upstream is None:
            of_cluster.upstream = UpstreamCells(causes, state)
        of_cluster.upstream.state = state
        return of_cluster.upstream

    def now_ns(self) -> int:
        """Return the events' clock, in ns since the Unix epoch: the wall clock at the start, monotonic since then."""
        return monotonic_ns() + self.clock_offset_ns

    def cluster(self, name: str) -> ClusterCells:
        """Return the cells of a cluster; its series begin with the first call."""
        cells = self.clusters.get(name)
        if cells is None:
            cells = self.clusters[name] = ClusterCells(name, DISCONNECT_CAUSES if self.passive is None else ENDS)
        return cells

    def restart_lags(self, name: str) -> None:
        """Forget the lags of a cluster, when connections turn out to belong to other clusters.

        The caller counts the remaining connections anew.
        """
        cluster = self.cluster(name)
        if cluster.topics is not None:
            cluster.lags = Lags(cluster.topics, cluster.lag_evicted)

    def connection(
        self,
        info: ConnectionInfo,
        listener: str,
        broker: str,
        pending: Sized = (),
        *,
        topics: bool = False,
        is_new: bool = True,
    ) -> ConnectionMetrics:
        """Count a new connection; return the counting of its events. topics: count topics and lag from bodies too.

        is_new: False if it was counted before, in another cluster (`ConnectionMetrics.leave`).
        """
        cluster = self.cluster(info.cluster)
        cells = cluster.broker(broker, listener)
        if topics and cluster.topics is None:
            cluster.topics = Topics()
            cluster.lags = Lags(cluster.topics, cluster.lag_evicted)
        of_bodies = (cluster.topics, cluster.lags) if topics else (None, None)
        connection = ConnectionMetrics(
            cluster, cells, listener, pending, *of_bodies, self._inside, self.loop_lag, self.slow, info
        )
        cells.live.add(connection)
        cells.open[listener] += 1
        cells.accepted[listener] += is_new
        return connection
