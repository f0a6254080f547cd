"""The bounds and times of metrics are those that the docs state."""

from kproxy.metrics import cells, groups, known, lag, named, offsets, pushed_pieces, telemetry, top
from tests.documented import missing, size

MINUTE_NS = 60 * 10**9


def test_the_bounds_of_names_and_positions_are_those_of_the_docs():
    assert not missing(
        "limits.md",
        f"| {lag.MAX_POSITIONS:,} partitions |",
        f"of a cluster {named.MAX_TOPICS} topics and as many clients with series",
        f" {lag.MAX_ALL_POSITIONS:,} partitions of all connections",
        f" {offsets.MAX_LOGS:,} ends of logs",
        f" {offsets.MAX_COMMITTED:,} commits",
        f" {offsets.MAX_REMOVED:,} removals",
        f" {offsets.MAX_SEEN:,} groups and {offsets.MAX_PENDING:,} offsets of transactions",
        f"names of {named.MAX_LABEL} characters",
    )
    assert named.MAX_CLIENTS == named.MAX_TOPICS


def test_the_bounds_of_series_are_those_of_the_docs():
    assert not missing(
        "inside/bounds.md",
        f"| {cells.MAX_APIS} APIs per cluster, those of every day always,"
        f" and {cells.MAX_ERRORS} pairs of an API and an error;",
        f"| {cells.UNKNOWN_APIS} each, the rest share `unknown_other`;",
        f"| series of brokers that nobody has connected to yet | {known.MAX_BORN} per cluster |",
        f"| series of groups | {groups.MAX_GROUPS} of a cluster, the rest share `other`;",
        f"; {groups.MAX_PARTITIONS:,} partitions are remembered as offline, and as not in sync |",
        f"| names of topics by id | {named.MAX_NAMES} per cluster |",
        f"`other` has {telemetry.MAX_OTHER} |",
        f"; {lag.PARTITION_SERIES} series by partition of each kind, or none;"
        f" the {lag.MAX_SERIES} largest lags of clients and of groups are shown",
    )
    assert cells.UNKNOWN_ERRORS == cells.UNKNOWN_APIS


def test_the_bounds_of_pushed_metrics_are_those_of_the_docs():
    assert not missing(
        "telemetry.md",
        f"of {telemetry.CHARACTERS} characters on average",
        f" {telemetry.MAX_ITEMS:,} metrics and points",
        f"a point of a push above {size(telemetry.WHOLE_BYTES)} | {size(pushed_pieces.PIECE_BYTES)};",
        f" {size(pushed_pieces.OTHER_BYTES)} of a metric",
        f"| {telemetry.MAX_LABELS}, values of {named.MAX_LABEL} characters |",
        {3: "three"}[telemetry.LIFE_INTERVALS] + " intervals after their client's last push",
    )
    assert pushed_pieces.MAX_FIELDS == telemetry.MAX_ITEMS


def test_series_stay_and_change_as_the_docs_say():
    assert not missing(
        "metrics.md",
        "until it has been idle for an hour",
        f"at most {named.MAX_TOPICS // 10} are replaced at once, then one a minute",
        "A replaced series is exposed five minutes longer",
        "A partition whose end no answer has confirmed for a minute has no series",
    )
    assert (named.EXPIRY_NS, top.REPLACE_NS, top.LEAVE_NS) == (60 * MINUTE_NS, MINUTE_NS, 5 * MINUTE_NS)
    assert lag.UNCONFIRMED_NS == MINUTE_NS
