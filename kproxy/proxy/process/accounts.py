"""The memory that peers can make a process hold: each kind of content, its bound, and the effect of reaching it.

Duty: one place that lists every kind with the constants that bound it, and with a function that measures it in a
running worker. The table in docs/limits.md is `table()`, and a test fills each account through sockets. Refuses to hold
anything itself, and to enforce bounds: the holder of the content does.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kproxy.admin import connections
from kproxy.admin import server as admin
from kproxy.metrics import lag, marks, named, offsets
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
from kproxy.wire.interest import MAX_NOTED_TOGETHER
from kproxy.wire.kept import MAX_TOGETHER
from kproxy.wire.own_answers import MAX_OWN_BYTES
from kproxy.wire.state import NOTE_STEP, NOTED_LEAST
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
        "requests that wait for brokers, some 400 bytes each",
        f"{pressure.FREE_REQUESTS}, and more on loan",
        f"{pressure.MOST_REQUESTS:,} on loan: 50 MiB",
        f"a connection with {pressure.FREE_REQUESTS} is not read until one is answered (`pending_requests`)",
        pressure.MOST_REQUESTS,
        lambda worker: worker.pressure.lent,
    ),
    Account(
        "said",
        "contents of these requests: ids, with `detail` above `headers` topics; copies of requests in parts, first "
        f"fields of {size(MAX_PREFIX)} and bodies of as much; with a policy, denied names and lines of the audit",
        f"{NOTED_LEAST} bytes of each request, {size(NOTE_STEP)} of one whose end is not here; of the policy's "
        f"{size(MAX_KEPT_BYTES)} and what one request names",
        size(MAX_NOTED_TOGETHER),
        "ids are cut to 256 characters, topics are not counted, the requests pass (`too_much_named` in "
        "`kproxy_protocol_faults_total`); where a policy decides the connection is closed (`held_too_many`, or "
        "`too_large` in `kproxy_policy_refusals_total`), a line of the audit is written at once (`not_awaited`)",
        MAX_NOTED_TOGETHER,
        lambda worker: worker.held.noted_bytes,
    ),
    Account(
        "kept",
        "bytes read that cannot go on, what TLS has encrypted or not decrypted included",
        f"{size(pressure.FEW_BYTES)} of each side; a first read of 512 KiB, while all hold less",
        size(pressure.MANY_BYTES),
        f"all reads are of {size(pressure.FEW_BYTES)} (`kept_bytes`)",
        pressure.MANY_BYTES + pressure.MOST_LARGE_BYTES,
        lambda worker: worker.pressure.kept_bytes,
    ),
    Account(
        "large",
        "frames that were buffered, and kproxy's own answers, that are larger than a read and not taken",
        "one of each side",
        size(pressure.MOST_LARGE_BYTES),
        "the connection that has waited for longest, and for a second, is closed; if there is none, that one "
        "(`unsent_frames`, `client_stalled`)",
        pressure.MOST_LARGE_BYTES,
        lambda worker: worker.pressure.large_bytes,
    ),
    Account(
        "held",
        "answers with brokers' addresses that arrive in parts, requests that the policy reads, refusals that wait for "
        "older answers, what a client sends behind an unanswered raw SASL token",
        "16 MiB of a request, 4 MiB of an answer, 32 MiB of a list, 512 KiB behind a token",
        f"`max_held_bytes`, {size(MAX_HELD_BYTES)}",
        "the request that has been incomplete for longest, and for a second, is given up and its connection closed; if "
        "there is none, that connection (`held_too_many` in `kproxy_protocol_faults_total`)",
        MAX_HELD_BYTES,
        lambda worker: worker.held.held_bytes,
    ),
    Account(
        "parts",
        "with the compiled core: the first bytes of a frame, which wait for the others; what pending Produces carry",
        f"{size(MAX_PART)} of each side",
        f"{size(MAX_PARTS)}",
        "the session has them: it forwards most bytes at once, and counts what requests name",
        MAX_PARTS,
        lambda worker: 0 if worker.core is None else worker.core.part_bytes,
    ),
    Account(
        "slow_work",
        f"a request that the policy reads, of more than {FEW_ELEMENTS} elements or 32 KiB, and an answer of more than "
        "8 KiB that it edits: names and bodies while it is decided",
        "two connections at a time; others wait with their frames in `max_held_bytes`",
        f"{TURN_NS // 10**6} ms of a turn, with reads of ZooKeeper's connections; {MAX_ELEMENTS:,} elements of "
        "a request",
        "the connection waits; with more elements the request is refused whole, or its connection closed (`too_large` "
        "in `kproxy_policy_refusals_total`)",
        2 * MAX_ELEMENTS,
    ),
    Account(
        "own_answers",
        "refusals that wait for older answers of their connection",
        f"{size(MAX_OWN_BYTES)} and one more answer",
        "within `max_held_bytes`",
        "the client is not read until some have left (`own_answers`)",
        MAX_HELD_BYTES,
        lambda worker: worker.held.held_bytes,
    ),
    Account(
        "ended",
        f"clients that ended while {pressure.FREE_REQUESTS} or more of their requests wait",
        "1",
        f"{pressure.MOST_ENDED}",
        "the one that has waited for longest is closed (`ended_clients`)",
        pressure.MOST_ENDED,
        lambda worker: worker.pressure.ended,
    ),
    Account(
        "frames",
        "with `detail` above `headers`: frames for groups, until they are answered and until they are decoded",
        "8 MiB of a frame",
        f"{size(MAX_TOGETHER)} of a cluster, {size(QUEUE_BYTES)} that wait",
        "the frames are not kept (`kproxy_insight_left_out_total`)",
        QUEUE_BYTES,
        lambda worker: worker.feed.waiting_bytes,
    ),
    Account(
        "logins",
        "logins at kproxy that are in progress",
        f"{size(authentication.SMALL_FRAME)} that are not counted, {size(MAX_LOGIN_FRAME)} of a frame",
        f"{size(authentication.MAX_HELD_TOGETHER)} of a cluster",
        "the client of the request that has been incomplete for longest, and for a second, is refused; if there is "
        "none, this client (`authentication`)",
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
        "entries are dropped, and computed again",
        policy.MAX_REMEMBERED_BYTES,
    ),
    Account(
        "audit",
        "lines of the audit, and of the log, that are not written",
        "none",
        f"{size(audit.MAX_WAITING_BYTES)} of the audit, {MAX_LOG_LINES:,} lines of the log",
        "they are left out (`kproxy_audit_lines_dropped_total`, `kproxy_log_lines_dropped_total`)",
        audit.MAX_WAITING_BYTES,
        lambda worker: 0 if worker.audit is None else worker.audit.waiting_bytes,
    ),
    Account(
        "telemetry",
        "metrics that clients push and that are not read, and the clients that are remembered",
        "`max_push_bytes` of a push, as sent and unpacked",
        f"of a cluster {size(telemetry.MAX_WAITING_BYTES)} and {telemetry.MAX_INSTANCES:,} clients; series by "
        "`max_clients` and `max_series_per_client`",
        "the push is refused with THROTTLING_QUOTA_EXCEEDED (`kproxy_telemetry_answers_total`), a series left out "
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
        "others are counted as `other`; the oldest go (`kproxy_lag_evicted_total`)",
        2 * named.MAX_TOPICS,
    ),
    Account(
        "traces",
        "frames of traces that are not read",
        f"{size(tracing.MAX_FRAME)} of a frame",
        f"{tracing.MAX_TRACES} times {size(tracing.MAX_HELD_BYTES)}",
        "frames are left out, which the trace says",
        tracing.MAX_TRACES * tracing.MAX_HELD_BYTES,
        lambda worker: worker.traces.held_bytes,
    ),
    Account(
        "zookeeper",
        "of ZooKeeper's listeners: bytes that are not read or not taken, operations without an answer",
        f"{size(zookeeper_relay.QUEUE_BYTES)} to read, {size(zookeeper_relay.WRITE_BYTES)} of each direction; "
        f"{FREE_PENDING} operations of a kind, and what is lent: {MAX_PENDING:,} at most",
        f"{size(zookeeper.ROOM_BYTES)} of large frames; {size(zookeeper_relay.WAITING_BYTES)} to read, of which "
        f"{size(zookeeper_relay.CLOSED_BYTES)} of ended connections, and {size(zookeeper_relay.FREE_BYTES)} of each; "
        f"{zookeeper.ROOM_OPERATIONS:,} operations are lent: {size(zookeeper.ROOM_OPERATIONS * OPERATION_BYTES)}",
        "operations are not read, bytes pass; the oldest operation counts as unanswered",
        zookeeper.ROOM_BYTES,
    ),
    Account(
        "addresses",
        "addresses of clients, for `max_connection_rate_per_address`",
        "1",
        f"{limits.MAX_ADDRESSES:,} of a cluster",
        "those beyond share one",
        limits.MAX_ADDRESSES,
    ),
    Account(
        "admin",
        "connections of the admin port",
        f"a request of {size(connections.MAX_LINE)} and as much of headers, a body of {size(admin.MAX_BODY)}; one "
        f"answer that is not taken, for {connections.IDLE_S:g} s",
        f"{admin.MAX_CONNECTIONS}; {size(admin.MAX_UNTAKEN)} of answers, or one that is larger",
        "the one that has been silent, or has taken nothing of its answer, for longest is closed; of those that have "
        f"just come, one of the network with most of them, where that has more than {admin.FEW}",
        admin.MAX_CONNECTIONS,
    ),
)


def table(accounts: Iterable[Account] = ACCOUNTS) -> str:
    """Return the accounts as a table in Markdown."""
    rows = [(each.what, each.of_one, each.of_all, each.then) for each in accounts]
    head = ("what", "per connection", "all together", "beyond it")
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * 4, *rows)) + "\n"


def held(worker: Worker) -> dict[str, int]:
    """Return the amount of each measured account in a worker, by key; all are 0 if nobody is connected."""
    return {each.key: each.measure(worker) for each in ACCOUNTS if each.measure is not None}
