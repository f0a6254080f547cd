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
        Threshold("places_per_kind", 5, "findings", "More places of one kind say nothing new: they are counted."),
        # what users of the cluster feel
        Threshold("felt_failed", 100, "requests", "Critical from here on: no retry loop hides a hundred of them."),
        Threshold(
            "felt_failed_share",
            0.5,
            "share of requests",
            "Critical from here on: who fails more often than not does not work at all.",
        ),
        Threshold(
            "felt_failed_few", 10, "requests", "Half of fewer than ten requests may be one attempt with retries."
        ),
        Threshold(
            "felt_stood_still_s",
            10,
            "s",
            "Critical from here on: consumers miss two heartbeats of 3 s, interactive users have left.",
        ),
        Threshold(
            "felt_behind_records",
            100_000,
            "records",
            "Critical from here on: 200 polls of max.poll.records (500) only to catch up.",
        ),
        # failures
        Threshold("late_answer_s", 1, "s", "TCP sends again after 0.2 and 0.6 s at first: everyday loss."),
        Threshold("connects_failed_min", 1, "connects", "Connects do not fail where everything works."),
        Threshold("tls_failed_min", 1, "handshakes", "Handshakes do not fail where everything works."),
        Threshold("unanswered_min", 3, "requests", "One or two requests are lost by any restart of a client."),
        Threshold(
            "gave_up_s",
            3,
            "s",
            "Who waited this long before the connection ended gave up; request.timeout.ms is 30 s, and less where set.",
        ),
        Threshold(
            "refused_min", 3, "requests", "A client that meets an error once or twice looks for leaders and topics."
        ),
        Threshold(
            "retried_min",
            10,
            "requests",
            "A leader that moves refuses a few requests of each client, once; so many are two.",
        ),
        Threshold(
            "silent_s",
            3,
            "s",
            "Answers come every fetch.max.wait.ms (500) at least; after heartbeat.interval.ms (3 s) every group feels "
            "it.",
        ),
        Threshold(
            "silent_answers_min",
            5,
            "answers in 5 s",
            "A broker that nobody asks much is silent without being ill: so many answers just before.",
        ),
        Threshold("silent_requests_min", 3, "requests", "One or two requests may be slow by themselves."),
        Threshold(
            "coordinator_outage_s",
            2,
            "s",
            "A coordinator that moves is found again by the next heartbeat, every 3 s at most; quicker is not felt.",
        ),
        Threshold("controller_changes_min", 3, "elections", "A controller that is restarted makes one or two."),
        Threshold(
            "replicas_s",
            2,
            "s",
            "A leader that moves leaves its partition without one for less: metadata of clients tell of it later.",
        ),
        Threshold(
            "out_of_sync_s",
            10,
            "s",
            "A broker that is restarted in order lacks for a few seconds; replica.lag.time.max.ms is 30 s.",
        ),
        Threshold(
            "storm_connections",
            20,
            "connections in 10 s",
            "reconnect.backoff.max.ms is 1 s: one client that follows it makes ten.",
        ),
        Threshold(
            "doubtful_records_min",
            10,
            "records",
            "Fewer than ten records are of a request or two, which the connections' end explains.",
        ),
        Threshold(
            "writers_still_s",
            3,
            "s",
            "Leaders that are handed over move within a second; a broker that fails is noticed after 6 to 9 s.",
        ),
        # producing
        Threshold(
            "batches_min", 200, "batches", "Fewer batches of a client to a topic cost nothing, whatever is in them."
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
            "Below 1 MB of batches there is nothing to save that anybody would notice.",
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
            "A batch is compressed as a whole: one of less than 1 kB has too little in common with itself.",
        ),
        Threshold(
            "compression_ratio",
            1.3,
            "times",
            "Measured with zlib at level 1 on batches of 16 kB (batch.size): below 1.3 the CPU is better spent.",
        ),
        Threshold(
            "acks_requests_min",
            20,
            "requests",
            "A few requests are somebody's test: acks of 0 or 1 matters for what is produced all the time.",
        ),
        Threshold(
            "resent_batches",
            3,
            "batches",
            "Each batch that is sent again without a producer id may be there twice; one or two are chance.",
        ),
        # consuming
        Threshold("fetches_min", 100, "fetches", "Fewer say nothing about how a consumer polls."),
        Threshold(
            "empty_share",
            0.5,
            "share",
            "Half of the fetches bring nothing: an idle consumer waits fetch.max.wait.ms (500) at the broker instead.",
        ),
        Threshold(
            "empty_rate",
            10,
            "fetches/s per connection",
            "With the default fetch.max.wait.ms of 500 an idle connection has 2 a second; 10 is five times that.",
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
            "At 50 a second waiting 100 ms more makes one fetch of five.",
        ),
        # clients
        Threshold("throttled_min", 3, "answers", "One throttled answer may be a burst that a quota is there for."),
        Threshold("throttled_share", 0.01, "share", "Less than 1 % of the answers is what quotas smooth without harm."),
        Threshold(
            "throttled_time_share",
            0.1,
            "share of the time",
            "Told of as a warning from here on: a tenth of the client's time is spent waiting for its quota.",
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
            "Clients keep connections open for connections.max.idle.ms (9 minutes); one every two seconds is no client "
            "that lives.",
        ),
        Threshold(
            "short_connection_s", 10, "s", "Connections whose median life is shorter are made for one request or two."
        ),
        Threshold("commits_min", 100, "commits", "Fewer commits cost nothing."),
        Threshold(
            "commit_rate",
            10,
            "commits/s per member",
            "auto.commit.interval.ms is 5000: 0.2 a second; ten a second is a commit for every poll or record.",
        ),
        # balance
        Threshold("hot_bytes_min", 1_000_000, "bytes", "With less in a topic the luck of a few batches decides."),
        Threshold(
            "hot_partition_times", 3, "times an even share", "Keys that are spread well stay below twice an even share."
        ),
        Threshold("hot_partition_batches", 100, "requests", "Fewer requests to a topic are too few to be spread."),
        Threshold(
            "hot_broker_times", 2, "times an even share", "Leaders that are balanced differ by less than a quarter."
        ),
        Threshold("broker_requests_min", 500, "requests", "Fewer requests of clients say nothing about a broker."),
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
            "Below 50 ms at p99 nobody suffers, however much faster others are.",
        ),
        Threshold(
            "very_slow_produce_ms",
            1000,
            "ms",
            "A second at p99 is slow for a broker that stands alone, too; request.timeout.ms is 30 s.",
        ),
        Threshold(
            "slow_produces_min", 3, "requests", "A p99 of 133 requests is the second slowest: so many make no chance."
        ),
        Threshold("produces_min", 100, "requests", "Below 100 requests a p99 is the slowest of them, by luck."),
        # groups
        Threshold(
            "rebalances_min",
            5,
            "rebalances",
            "Beyond those by which its members came, one each (two where cooperative): a deployment makes a few more.",
        ),
        Threshold(
            "rebalances_per_hour",
            12,
            "rebalances/h",
            "One in five minutes (max.poll.interval.ms): the group does not come to rest.",
        ),
        Threshold(
            "rebalancing_share",
            0.1,
            "share of the time",
            "Told of as critical from here on: in a tenth of its time the group does not work.",
        ),
        Threshold(
            "straggler_wait_s",
            5,
            "s",
            "Members hear of a rebalance by the next heartbeat, within heartbeat.interval.ms (3 s): who takes longer "
            "was busy between two polls.",
        ),
        Threshold("lag_records_min", 1000, "records", "Two max.poll.records (500): less is on its way."),
        Threshold("lag_growth", 1.5, "times", "Lag swings with the batches; half as much again is more than that."),
        Threshold(
            "lag_growth_per_s",
            100,
            "records/s",
            "A large lag grows by a small factor; this is max.poll.records in 5 s.",
        ),
        Threshold("lag_span_s", 10, "s", "Over less time a growing lag is a burst."),
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
            "transaction.timeout.ms is 60 s, Streams commits every 100 ms: readers of committed data wait this long.",
        ),
        Threshold(
            "hung_transaction_s",
            60,
            "s",
            "Told of as critical from here on: transaction.timeout.ms is over, the coordinator should have aborted it.",
        ),
        # network
        Threshold("retransmissions_min", 50, "segments", "A few are normal on every network."),
        Threshold(
            "retransmission_share",
            0.01,
            "share of segments",
            "TCP's throughput falls with the root of the loss: 1 % is where a Kafka connection feels it. Segments are "
            "counted as 1448 bytes.",
        ),
        Threshold("zero_windows_min", 10, "times", "A window that closes now and then is back-pressure at work."),
        # kproxy
        Threshold(
            "loop_lag_ms",
            10,
            "ms",
            "Above 10 ms at p99 bytes wait for kproxy, not the broker: its core is full or taken (docs/metrics.md).",
        ),
        Threshold("core_share", 0.9, "share of a core", "One process of kproxy relays on one core."),
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
