"""The memory that peers can make a process hold: each kind of content, its bound, and the effect of reaching it.

Duty: one place that lists every kind with the constants that bound it, and with a function that measures it in a
running worker. The table in docs/limits.md is `table()`, and a test fills each account through sockets. Refuses to hold
anything itself, and to enforce bounds: the holder of the content does.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kproxy.admin import connections
from kproxy.admin import server as admin
from kproxy.metrics.consumers import lag, marks, offsets
from kproxy.metrics.counters import named
from kproxy.proxy.admission import authentication, limits
from kproxy.proxy.config.settings import MAX_HELD_BYTES
from kproxy.proxy.connection import zookeeper
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.filters import telemetry, tracing
from kproxy.proxy.filters.feed import QUEUE_BYTES
from kproxy.proxy.filters.policy import audit, authorizer, policy
from kproxy.proxy.filters.policy.globs import MAX_BYTES as GLOB_BYTES
from kproxy.proxy.filters.policy.pending import MAX_KEPT_BYTES
from kproxy.proxy.filters.policy.resources import FEW_ELEMENTS, MAX_ELEMENTS
from kproxy.proxy.filters.policy.share_sessions import MOST as SHARE_SESSIONS
from kproxy.proxy.log_lines import MAX_WAITING as MAX_LOG_LINES
from kproxy.proxy.relay import pressure
from kproxy.proxy.relay import zookeeper as zookeeper_relay
from kproxy.proxy.relay.compiled import MAX_PART, MAX_PARTS
from kproxy.proxy.relay.readings import TURN_NS
from kproxy.proxy.sasl.clients import MAX_FRAME as MAX_LOGIN_FRAME
from kproxy.proxy.sockets import proxy_header
from kproxy.proxy.tls import handshakes
from kproxy.wire.client_side import MAX_PREFIX
from kproxy.wire.decisions.own_answers import MAX_OWN_BYTES
from kproxy.wire.interest import MAX_NOTED_TOGETHER
from kproxy.wire.observing.kept import MAX_TOGETHER
from kproxy.wire.state import MIN_NOTED_BYTES, NOTE_STEP
from kproxy.zookeeper.session import FREE_PENDING, MAX_PENDING, OPERATION_BYTES

Measure = Callable[[Worker], int]


class Account(NamedTuple):
    """One kind of content. The texts are cells of a table in Markdown."""

    key: str
    what: str
    of_one: str  # bound per connection, or per address
    of_all: str  # bound per process, or per cluster
    then: str  # effect of reaching the bound, and its counter
    limit: int  # `of_all` in the unit of `measure`, or the setting's default
    measure: Measure | None = None  # current amount in a worker; None: no worker has it alone


def size(count: int) -> str:
    """Return a number of bytes as text."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} bytes"


ACCOUNTS: tuple[Account, ...] = (
    Account(
        "pending_requests",
        "requests without an answer, about 400 bytes each",
        f"{pressure.FREE_REQUESTS}, and more from a shared pool",
        f"a pool of {pressure.MOST_REQUESTS:,}: 50 MiB",
        f"kproxy does not read a connection with {pressure.FREE_REQUESTS} until one is answered (`pending_requests`)",
        pressure.MOST_REQUESTS,
        lambda worker: worker.pressure.lent,
    ),
    Account(
        "said",
        "contents of these requests: ids, with `detail` above `headers` topics; of incomplete requests copies of the "
        f"first fields ({size(MAX_PREFIX)}) and of the body (as much); with a policy, denied names and audit lines",
        f"{MIN_NOTED_BYTES} bytes of each request, {size(NOTE_STEP)} of an incomplete one; for the policy "
        f"{size(MAX_KEPT_BYTES)} and the names of one request",
        size(MAX_NOTED_TOGETHER),
        "ids are cut to 256 characters, topics are not counted, the requests pass (`too_much_named` in "
        "`kproxy_protocol_faults_total`); with a policy, kproxy closes the connection (`held_too_many`, or "
        "`too_large` in `kproxy_policy_refusals_total`), and writes an audit line at once (`not_awaited`)",
        MAX_NOTED_TOGETHER,
        lambda worker: worker.held.noted_bytes,
    ),
    Account(
        "kept",
        "unsent bytes, including TLS records that are already encrypted or not yet decrypted",
        f"{size(pressure.FEW_BYTES)} of each side; a first read of 512 KiB, below the limit for all together",
        size(pressure.MANY_BYTES),
        f"each read takes at most {size(pressure.FEW_BYTES)} (`kept_bytes`)",
        pressure.MANY_BYTES + pressure.MOST_LARGE_BYTES,
        lambda worker: worker.pressure.kept_bytes,
    ),
    Account(
        "large",
        "buffered frames, and kproxy's own answers, that are larger than a read and unsent",
        "one of each side",
        size(pressure.MOST_LARGE_BYTES),
        "kproxy closes the connection that has waited for longest, at least for a second; if there is none, the "
        "connection that exceeds the limit (`unsent_frames`, `client_stalled`)",
        pressure.MOST_LARGE_BYTES,
        lambda worker: worker.pressure.large_bytes,
    ),
    Account(
        "held",
        "incomplete answers with brokers' addresses, requests that the policy reads, refusals that wait for older "
        "answers, bytes of a client after an unanswered raw SASL token",
        "16 MiB of a request, 4 MiB of an answer, 32 MiB of a list, 512 KiB after a token",
        f"`max_held_bytes`, {size(MAX_HELD_BYTES)}",
        "kproxy drops the request that has been incomplete for longest, at least for a second, and closes its "
        "connection; if there is none, it closes the connection that exceeds the limit (`held_too_many` in "
        "`kproxy_protocol_faults_total`)",
        MAX_HELD_BYTES,
        lambda worker: worker.held.held_bytes,
    ),
    Account(
        "parts",
        "with the compiled core: incomplete frames, and the batches of pending Produces",
        f"{size(MAX_PART)} of each side",
        f"{size(MAX_PARTS)}",
        "the Python session takes over: it forwards most bytes at once, and counts topics of requests",
        MAX_PARTS,
        lambda worker: 0 if worker.core is None else worker.core.part_bytes,
    ),
    Account(
        "slow_work",
        f"a request that the policy reads, of more than {FEW_ELEMENTS} elements or 32 KiB, and an answer of more than "
        "8 KiB that it edits: names and bodies during the decision",
        "two connections at a time; others wait with their frames in `max_held_bytes`",
        f"{TURN_NS // 10**6} ms of a turn, with reads of ZooKeeper's connections; {MAX_ELEMENTS:,} elements of "
        "a request",
        "the connection waits; with more elements kproxy refuses the whole request, or closes its connection "
        "(`too_large` in `kproxy_policy_refusals_total`)",
        2 * MAX_ELEMENTS,
    ),
    Account(
        "own_answers",
        "refusals that wait for older answers of their connection",
        f"{size(MAX_OWN_BYTES)} and one more answer",
        "within `max_held_bytes`",
        "kproxy does not read the client until it has sent some (`own_answers`)",
        MAX_HELD_BYTES,
        lambda worker: worker.held.held_bytes,
    ),
    Account(
        "ended",
        f"clients that closed their side with {pressure.FREE_REQUESTS} or more pending requests",
        "1",
        f"{pressure.MOST_ENDED}",
        "kproxy closes the client that has waited for longest (`ended_clients`)",
        pressure.MOST_ENDED,
        lambda worker: worker.pressure.ended,
    ),
    Account(
        "frames",
        "with `detail` above `headers`: frames for groups that are not yet answered or not yet decoded",
        "8 MiB of a frame",
        f"{size(MAX_TOGETHER)} of a cluster, {size(QUEUE_BYTES)} in the queue",
        "kproxy drops the frames (`kproxy_insight_left_out_total`)",
        QUEUE_BYTES,
        lambda worker: worker.feed.waiting_bytes,
    ),
    Account(
        "logins",
        "unfinished logins at kproxy",
        f"{size(authentication.SMALL_FRAME)} that do not count, {size(MAX_LOGIN_FRAME)} of a frame",
        f"{size(authentication.MAX_HELD_TOGETHER)} of a cluster",
        "kproxy refuses the client whose request has been incomplete for longest, at least for a second; if there is "
        "none, the client that exceeds the limit (`authentication`)",
        authentication.MAX_HELD_TOGETHER,
    ),
    Account(
        "headers",
        "incomplete PROXY headers; TLS handshakes",
        f"{size(proxy_header.MAX_BYTES)}; 90 KiB of buffers of a busy connection",
        f"{handshakes.AT_ONCE:,} handshakes at once",
        "`handshake_timeout_s` ends the connection; further handshakes wait",
        handshakes.AT_ONCE,
    ),
    Account(
        "policy",
        "a policy's caches of names, patterns and rules",
        f"{policy.MAX_CLIENT_IDS} client ids of {policy.MAX_NAME} characters, {authorizer.MAX_TREATMENTS} APIs, "
        f"{SHARE_SESSIONS} share sessions",
        f"of a cluster {size(policy.MAX_REMEMBERED_BYTES)} of names, 3 times {size(GLOB_BYTES)} of patterns, "
        f"{policy.MAX_API_RULES:,} rules by identity and API",
        "kproxy drops entries, and computes them again",
        policy.MAX_REMEMBERED_BYTES,
    ),
    Account(
        "audit",
        "audit lines and log lines in the queue",
        "none",
        f"{size(audit.MAX_WAITING_BYTES)} of the audit, {MAX_LOG_LINES:,} lines of the log",
        "kproxy drops them (`kproxy_audit_lines_dropped_total`, `kproxy_log_lines_dropped_total`)",
        audit.MAX_WAITING_BYTES,
        lambda worker: 0 if worker.audit is None else worker.audit.waiting_bytes,
    ),
    Account(
        "telemetry",
        "unprocessed metrics that clients push, and the remembered clients",
        "`max_push_bytes` of a push, before and after decompression",
        f"of a cluster {size(telemetry.MAX_WAITING_BYTES)} and {telemetry.MAX_INSTANCES:,} clients; series by "
        "`max_clients` and `max_series_per_client`",
        "kproxy refuses the push with THROTTLING_QUOTA_EXCEEDED (`kproxy_telemetry_answers_total`), or drops a series "
        "(`kproxy_telemetry_points_left_out_total`)",
        telemetry.MAX_WAITING_BYTES,
    ),
    Account(
        "metrics",
        "names in metrics, and positions of consumers",
        f"{lag.MAX_POSITIONS:,} partitions",
        f"of a cluster {named.MAX_TOPICS} topics and as many clients with series, {lag.MAX_ALL_POSITIONS:,} partitions "
        f"of all connections, {offsets.MAX_LOGS:,} ends of logs of {16 * 2 * marks.MAX_POINTS:,} bytes, "
        f"{offsets.MAX_COMMITTED:,} commits, {offsets.MAX_REMOVED:,} removals, {offsets.MAX_SEEN:,} groups "
        f"and {offsets.MAX_PENDING:,} offsets of transactions; names of {named.MAX_LABEL} characters",
        "others count as `other`; kproxy drops the oldest (`kproxy_lag_evicted_total`)",
        2 * named.MAX_TOPICS,
    ),
    Account(
        "traces",
        "unread frames of traces",
        f"{size(tracing.MAX_FRAME)} of a frame",
        f"{tracing.MAX_TRACES} times {size(tracing.MAX_HELD_BYTES)}",
        "kproxy omits frames, and the trace has their number",
        tracing.MAX_TRACES * tracing.MAX_HELD_BYTES,
        lambda worker: worker.traces.held_bytes,
    ),
    Account(
        "zookeeper",
        "ZooKeeper listeners: undecoded or unsent bytes, operations without an answer",
        f"{size(zookeeper_relay.QUEUE_BYTES)} to decode, {size(zookeeper_relay.WRITE_BYTES)} of each direction; "
        f"{FREE_PENDING} operations of a kind, and more from a shared pool: {MAX_PENDING:,} at most",
        f"{size(zookeeper.ROOM_BYTES)} of large frames; {size(zookeeper_relay.WAITING_BYTES)} to decode, including "
        f"{size(zookeeper_relay.CLOSED_BYTES)} of ended connections, and {size(zookeeper_relay.FREE_BYTES)} of each; "
        f"{zookeeper.ROOM_OPERATIONS:,} operations in the pool: {size(zookeeper.ROOM_OPERATIONS * OPERATION_BYTES)}",
        "bytes pass undecoded; the oldest operation counts as unanswered",
        zookeeper.ROOM_BYTES,
    ),
    Account(
        "addresses",
        "addresses of clients, for `max_connection_rate_per_address`",
        "1",
        f"{limits.MAX_ADDRESSES:,} of a cluster",
        "further addresses share one entry",
        limits.MAX_ADDRESSES,
    ),
    Account(
        "admin",
        "connections of the admin port",
        f"a request of {size(connections.MAX_LINE)} and as much of headers, a body of {size(admin.MAX_BODY)}; one "
        f"unread answer, for {connections.IDLE_S:g} s",
        f"{admin.MAX_CONNECTIONS}; {size(admin.MAX_UNTAKEN)} of answers, or one larger answer",
        "kproxy closes the connection that has been silent, or has read nothing of its answer, for longest; among "
        f"new ones, one of the network with the most of them if it has more than {admin.FEW}",
        admin.MAX_CONNECTIONS,
    ),
)


def table(accounts: Iterable[Account] = ACCOUNTS) -> str:
    """Return the accounts as a table in Markdown."""
    rows = [(each.what, each.of_one, each.of_all, each.then) for each in accounts]
    head = ("item", "per connection", "all together", "above the limit")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * 4, *rows)) + "\n"


def held(worker: Worker) -> dict[str, int]:
    """Return the amount of each measured account in a worker, by key; all are 0 if nobody is connected."""
    return {each.key: each.measure(worker) for each in ACCOUNTS if each.measure is not None}
