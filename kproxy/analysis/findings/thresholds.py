"""The thresholds of all findings, each with its reason and the source of that.

Duty: the numbers as data, and a user's own numbers (NAME=VALUE, or a TOML file). Refuses to know how
anything is measured.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from kproxy.errors import KproxyError


class Threshold(NamedTuple):
    """`unit` is the unit of a value; `reason` explains the number, with its source."""

    name: str
    value: float
    unit: str
    reason: str


THRESHOLDS = {
    each.name: each
    for each in (
        Threshold("places_per_kind", 5, "findings", "Further places of one kind are only counted."),
        # what users of the cluster feel
        Threshold("felt_failed", 100, "requests", "Critical from here on: no retry loop hides a hundred of them."),
        Threshold(
            "felt_failed_share",
            0.5,
            "share of requests",
            "Critical from here on: a client whose requests mostly fail does not work.",
        ),
        Threshold(
            "felt_failed_few", 10, "requests", "Below ten requests half of them may be one attempt with its retries."
        ),
        Threshold(
            "felt_stood_still_s",
            10,
            "s",
            "Critical from here on: consumers miss two heartbeats of 3 s, interactive users have left.",
        ),
        Threshold(
            "unread_s",
            60,
            "s",
            "Critical from here on: a killed consumer leaves its partitions unread for session.timeout.ms, 45 s since "
            "Kafka 3.0.",
        ),
        Threshold(
            "felt_behind_records",
            100_000,
            "records",
            "Critical from here on: 200 polls of max.poll.records (500) only to catch up.",
        ),
        # failures
        Threshold("late_answer_s", 1, "s", "TCP retransmits after 0.2 and 0.6 s at first: everyday loss."),
        Threshold("connects_failed_min", 1, "connects", "In a healthy network no connect fails."),
        Threshold("tls_failed_min", 1, "handshakes", "With correct settings no handshake fails."),
        Threshold("unanswered_min", 3, "requests", "One or two requests are lost by any restart of a client."),
        Threshold(
            "gave_up_s",
            3,
            "s",
            "A client that waited this long and then closed the connection gave up; request.timeout.ms is 30 s by "
            "default.",
        ),
        Threshold(
            "refused_min", 3, "requests", "One or two errors are normal while a client discovers leaders and topics."
        ),
        Threshold(
            "retried_min",
            10,
            "requests",
            "When leadership moves, each client gets a few errors once; this many are more than one move.",
        ),
        Threshold(
            "silent_s",
            3,
            "s",
            "A broker answers fetches at least every fetch.max.wait.ms (500); after heartbeat.interval.ms (3 s) every "
            "group is affected.",
        ),
        Threshold(
            "silent_answers_min",
            5,
            "answers in 5 s",
            "A broker with few requests is silent without a fault: it must have answered this many just before.",
        ),
        Threshold(
            "all_silent_s",
            1,
            "s",
            "A broker answers an empty fetch after fetch.max.wait.ms (500): several brokers that answer nothing for "
            "twice as long, though requests wait, do not do so by chance.",
        ),
        Threshold(
            "paused_s",
            1,
            "s",
            "A broker answers metadata in milliseconds, and G1 aims at pauses below 0.2 s (MaxGCPauseMillis).",
        ),
        Threshold("paused_clients_min", 2, "clients", "What one client waits for may be its own, or on its way."),
        Threshold("silent_requests_min", 3, "requests", "One or two requests may be slow by themselves."),
        Threshold(
            "coordinator_outage_s",
            2,
            "s",
            "Clients find a moved coordinator with their next heartbeat (3 s); a shorter outage has no effect.",
        ),
        Threshold("controller_changes_min", 3, "elections", "The restart of a controller causes one or two."),
        Threshold(
            "replicas_s",
            2,
            "s",
            "When leadership moves, a partition has no leader for a shorter time.",
        ),
        Threshold(
            "out_of_sync_s",
            10,
            "s",
            "A broker that restarts is out of the ISR for a few seconds; replica.lag.time.max.ms is 30 s.",
        ),
        Threshold(
            "leaders_away_share",
            0.1,
            "share of partitions",
            "leader.imbalance.per.broker.percentage is 10: below it the controller moves no leader back, either.",
        ),
        Threshold(
            "storm_connections",
            20,
            "connections in 10 s",
            "reconnect.backoff.max.ms is 1 s: one client that honours it makes ten.",
        ),
        Threshold(
            "doubtful_records_min",
            10,
            "records",
            "Fewer records belong to one or two requests that were in flight when their connection ended.",
        ),
        Threshold(
            "writers_still_s",
            3,
            "s",
            "A controlled shutdown moves leadership within a second; a failed broker is detected after 6 to 9 s.",
        ),
        # producing
        Threshold(
            "batches_min", 200, "batches", "Fewer batches of a client to a topic cost nothing, whatever their size."
        ),
        Threshold(
            "single_record_share",
            0.8,
            "share",
            "A producer that batches has single records at the ends of bursts only; linger.ms is 0 before Kafka 4.0 "
            "and 5 since (KIP-1030).",
        ),
        Threshold(
            "single_record_rate",
            20,
            "batches/s per connection",
            "At fewer than 20 a second the next record comes later than a linger of 50 ms: waiting gains nothing.",
        ),
        Threshold(
            "uncompressed_bytes_min",
            1_000_000,
            "bytes",
            "Below 1 MB the saving is not noticeable.",
        ),
        Threshold(
            "uncompressed_rate",
            100_000,
            "bytes/s",
            "0.1 MB a second is 8.6 GB a day on every replica's disk.",
        ),
        Threshold(
            "uncompressed_batch_bytes",
            1000,
            "bytes per batch",
            "A batch is compressed as a whole: below 1 kB it repeats too little.",
        ),
        Threshold(
            "compression_ratio",
            1.3,
            "times",
            "Measured with zlib at level 1 on batches of 16 kB (batch.size): below 1.3 compression is not worth its "
            "CPU.",
        ),
        Threshold(
            "acks_requests_min",
            20,
            "requests",
            "A few requests may be a test: acks of 0 or 1 matters for producers that run all the time.",
        ),
        Threshold(
            "resent_batches",
            3,
            "batches",
            "One or two retried batches are chance; each may be in the log twice.",
        ),
        # consuming
        Threshold("fetches_min", 100, "fetches", "Fewer fetches do not show how a consumer polls."),
        Threshold(
            "empty_share",
            0.5,
            "share",
            "An idle consumer should wait fetch.max.wait.ms (500) in the broker rather than fetch again.",
        ),
        Threshold(
            "empty_rate",
            10,
            "fetches/s per connection",
            "An idle connection with the default fetch.max.wait.ms (500) sends 2 a second; 10 is five times that.",
        ),
        Threshold(
            "tiny_fetch_bytes",
            1000,
            "bytes per fetch",
            "An answer of less than 1 kB costs the broker about as much as one of 100 kB; fetch.min.bytes is 1.",
        ),
        Threshold(
            "tiny_fetch_rate",
            50,
            "fetches/s per connection",
            "At 50 a second, waiting 100 ms longer makes one fetch out of five.",
        ),
        # clients
        Threshold(
            "throttled_min",
            3,
            "answers",
            "One throttled answer may be a short burst, which quotas are meant to smooth.",
        ),
        Threshold("throttled_share", 0.01, "share", "Below 1 % of the answers quotas smooth bursts without harm."),
        Threshold(
            "throttled_time_share",
            0.1,
            "share of the time",
            "Warning from here on: the client spends a tenth of its time waiting for its quota.",
        ),
        Threshold(
            "connections_min",
            60,
            "connections",
            "A client of a large cluster opens one or two to each broker at start; a tool run ten times makes 30.",
        ),
        Threshold(
            "connections_per_minute",
            30,
            "connections/min",
            "Clients keep connections open for connections.max.idle.ms (9 minutes); one every two seconds is not a "
            "long-lived client.",
        ),
        Threshold(
            "short_connection_s", 10, "s", "Connections with a shorter median lifetime serve one or two requests each."
        ),
        Threshold("commits_min", 100, "commits", "Fewer commits cost nothing."),
        Threshold(
            "commit_rate",
            10,
            "commits/s per member",
            "auto.commit.interval.ms is 5000: 0.2 a second; ten a second is a commit for every poll or record.",
        ),
        # balance
        Threshold("hot_bytes_min", 1_000_000, "bytes", "In a smaller topic the result depends on a few batches."),
        Threshold(
            "hot_partition_times", 3, "times an even share", "Well-distributed keys stay below twice an even share."
        ),
        Threshold("hot_partition_batches", 100, "requests", "Fewer requests to a topic cannot be evenly distributed."),
        Threshold(
            "hot_broker_times", 2, "times an even share", "Brokers with balanced leaders differ by less than a quarter."
        ),
        Threshold("broker_requests_min", 500, "requests", "Fewer client requests do not show a broker's load."),
        Threshold(
            "slow_broker_times",
            3,
            "times the others",
            "Brokers of one cluster and kind answer Produce alike; p99 differs by less than this when none is slow.",
        ),
        Threshold(
            "slow_produce_ms",
            50,
            "ms",
            "Below 50 ms at p99 clients are not affected, even if other brokers are faster.",
        ),
        Threshold(
            "very_slow_produce_ms",
            1000,
            "ms",
            "A second at p99 is slow even without other brokers to compare; request.timeout.ms is 30 s.",
        ),
        Threshold(
            "slow_produces_min",
            3,
            "requests",
            "With 133 requests p99 is the second slowest: this many are no coincidence.",
        ),
        Threshold("produces_min", 100, "requests", "Below 100 requests p99 is the slowest single request."),
        # groups
        Threshold(
            "rebalances_min",
            5,
            "rebalances",
            "Without one rebalance (two if cooperative) for each member that joins for the first time: a deployment "
            "causes a few more.",
        ),
        Threshold(
            "rebalances_per_hour",
            12,
            "rebalances/h",
            "One every five minutes (max.poll.interval.ms): the group is never stable for long.",
        ),
        Threshold(
            "rebalancing_share",
            0.1,
            "share of the time",
            "Critical from here on: the group spends a tenth of its time rebalancing.",
        ),
        Threshold(
            "straggler_wait_s",
            5,
            "s",
            "Members learn of a rebalance from their next heartbeat, within heartbeat.interval.ms (3 s): a slower "
            "member was busy between two polls.",
        ),
        Threshold("lag_records_min", 1000, "records", "Twice max.poll.records (500): less is in flight."),
        Threshold("lag_growth", 1.5, "times", "Lag varies with the batches; growth by half is more than that."),
        Threshold(
            "lag_growth_per_s",
            100,
            "records/s",
            "A large lag grows by a small factor; this is max.poll.records (500) every 5 s.",
        ),
        Threshold("lag_span_s", 10, "s", "Growth over a shorter time is a burst."),
        Threshold(
            "stopped_fetching_s",
            60,
            "s",
            "A consumer that polls sends a Fetch every 0.5 s (fetch.max.wait.ms); max.poll.interval.ms is 300 s.",
        ),
        # transactions
        Threshold(
            "open_transaction_s",
            10,
            "s",
            "transaction.timeout.ms is 60 s, Streams commits every 100 ms: read_committed consumers wait this long.",
        ),
        Threshold(
            "hung_transaction_s",
            60,
            "s",
            "Critical from here on: read_committed consumers wait beyond the default transaction.timeout.ms (60 s).",
        ),
        # network
        Threshold("retransmissions_min", 50, "segments", "A few are normal on every network."),
        Threshold(
            "retransmission_share",
            0.01,
            "share of segments",
            "TCP's throughput falls with the square root of the loss rate: from 1 % a Kafka connection is slower. "
            "Segments count as 1448 bytes.",
        ),
        Threshold("zero_windows_min", 10, "times", "A window that closes now and then is normal back-pressure."),
        # kproxy
        Threshold(
            "loop_lag_ms",
            10,
            "ms",
            "Above 10 ms at p99 bytes wait for kproxy, not the broker: its core is full, or used by other processes "
            "(docs/metrics.md).",
        ),
        Threshold("core_share", 0.9, "share of a core", "One kproxy process uses one core."),
    )
}


class Limits:
    """The thresholds in force, as attributes."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = dict(values)

    def __getattr__(self, name: str) -> float:
        try:
            return float(self.__dict__["_values"][name])
        except KeyError:
            raise AttributeError(name) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Limits) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def as_dict(self) -> dict[str, float]:
        return dict(self._values)


def limits(given: Mapping[str, Any] | None = None) -> Limits:
    """The thresholds, some of them as given. Raises KproxyError for a name that is none, and for no number."""
    values = {name: threshold.value for name, threshold in THRESHOLDS.items()}
    for name, value in (given or {}).items():
        if name not in THRESHOLDS:
            near = get_close_matches(name, THRESHOLDS, 3, 0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(THRESHOLDS)}"
            raise KproxyError(f"--threshold: there is no {name[:60]!r}: {hint}")
        values[name] = _number(name, value)
    return Limits(values)


def read(texts: Sequence[str] = (), file: str | None = None) -> Limits:
    """The thresholds with those of a TOML file (`NAME = VALUE` lines), then of texts NAME=VALUE."""
    given: dict[str, Any] = {}
    if file is not None:
        try:
            given.update(tomllib.loads(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError) as fault:
            raise KproxyError(f"--thresholds {file}: {getattr(fault, 'strerror', None) or fault}") from fault
    return limits(given | parted(texts))


def parted(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE as names and values. Raises KproxyError for anything else."""
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise KproxyError(f"--threshold {text[:80]!r}: give NAME=VALUE, like single_record_share=0.9")
        given[name.strip()] = value.strip()
    return given


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < 1e18:
        raise KproxyError(f"--threshold {name}: {str(value)[:60]!r} is no number of 0 or more")
    return number
