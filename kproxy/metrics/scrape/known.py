"""Label values known in advance: their counters are exposed at 0 from the start.

Prometheus' increase() and rate() see a change only between two samples. A counter whose first sample is 3 has, for
them, never increased, so the first burst of a fault would raise no alert. Only small, finite sets are listed here,
since each value is a line of every scrape.

Refuses to know events and cells.
"""

from kproxy.protocol.error_codes import error_name
from kproxy.wire.events import SIDES

MAX_BORN = 256  # brokers with series before their first connection: an answer can name thousands

# Causes of the end of a connection, as the relay and the cluster report them.
DISCONNECT_CAUSES = (
    "authentication",
    "broker_closed",
    "broker_reset",
    "broker_stalled",
    "client_closed",
    "client_reset",
    "client_stalled",
    "defect",
    "drain_timeout",
    "drained",
    "fault",
    "foreign_destination",
    "handshake_timeout",
    "idle_timeout",
    "limit",
    "login_expired",
    "loop",
    "max_age",
    "not_redirected",
    "operator",
    "proxy_header",
    "tls",
    "unreachable",
    "untrusted_proxy",
    "worker_lost",
)

# Limits that can be reached: settings of [cluster.limits], and limits over all connections of a process.
LIMITS = (
    "ended_clients",
    "handshake_timeout_s",
    "idle_timeout_s",
    "kept_bytes",
    "max_age_s",
    "max_connection_rate",
    "max_connection_rate_per_address",
    "max_connections",
    "max_connections_per_address",
    "max_requests_in_flight",
    "open_files",
    "own_answers",
    "pending_requests",
    "unsent_frames",
)

# Causes of unanswered requests that may be the broker's fault: alerts use them.
UNANSWERED_CAUSES = ("broker_closed", "broker_reset", "broker_stalled")

# Outcomes of kproxy's own requests for offsets: a complete response; at least one part not authorised, or refused for
# another reason; no response.
LAG_OUTCOMES = ("answered", "not_authorized", "refused", "failed")

# (side, kind) of the faults that a live session reports.
_OF_BOTH_SIDES = ("size", "too_much_named")
FAULTS = (
    *((side, kind) for kind in _OF_BOTH_SIDES for side in SIDES),
    ("client", "held_too_large"),
    ("client", "held_too_many"),
    ("client", "http"),
    ("client", "malformed_request"),
    ("client", "proxy_protocol"),
    ("client", "refused"),
    ("client", "sasl_token"),
    ("client", "tls"),
    ("client", "unreadable_carrier"),
    ("broker", "held_too_large"),
    ("broker", "held_too_many"),
    ("broker", "malformed_answer"),
    ("broker", "out_of_order"),
    ("broker", "tls"),
    ("broker", "unexpected_answer"),
)

# Reasons why insight does not get an exchange.
UNHEARD = ("too_large", "too_many", "queue_full")

# Responses whose addresses may follow the records of a large body, where they are hidden instead of replaced.
HIDING_APIS = ("Fetch", "ShareFetch")
# Requests that kproxy answers in the broker's place: an ApiVersions of a version newer than it supports.
OWN_APIS = ("ApiVersions",)
# Responses with broker addresses.
ADDRESS_APIS = (
    "DescribeCluster",
    "Fetch",
    "FindCoordinator",
    "Metadata",
    "Produce",
    "ShareAcknowledge",
    "ShareFetch",
)

# A policy's reasons to refuse everyday requests; other reasons begin with one series each.
EVERYDAY_REASONS = ("default", "read_only", "rule")

# APIs that clients and administrators use every day: these always have series of their own.
EVERYDAY_APIS = frozenset(
    (
        *("AddOffsetsToTxn", "AddPartitionsToTxn", "AlterConfigs", "ApiVersions", "ConsumerGroupDescribe"),
        *("ConsumerGroupHeartbeat", "CreateAcls", "CreatePartitions", "CreateTopics", "DeleteAcls", "DeleteGroups"),
        *("DeleteRecords", "DeleteTopics", "DescribeAcls", "DescribeCluster", "DescribeConfigs", "DescribeGroups"),
        *("DescribeLogDirs", "DescribeProducers", "DescribeTopicPartitions", "EndTxn", "Fetch", "FindCoordinator"),
        *("GetTelemetrySubscriptions", "Heartbeat", "IncrementalAlterConfigs", "InitProducerId", "JoinGroup"),
        *("LeaveGroup", "ListGroups", "ListOffsets", "Metadata", "OffsetCommit", "OffsetFetch"),
        *("OffsetForLeaderEpoch", "Produce", "PushTelemetry", "SaslAuthenticate", "SaslHandshake", "ShareAcknowledge"),
        *("ShareFetch", "ShareGroupHeartbeat", "StreamsGroupHeartbeat", "SyncGroup", "TxnOffsetCommit"),
    )
)

# Outside int16: the cells of the error codes beyond the caps, known and unknown.
OTHER_ERROR = 0x10000
UNKNOWN_OTHER_ERROR = 0x10001


def error_label(code: int) -> str:
    """Return the label of an error code's cell."""
    if code == OTHER_ERROR:
        return "other"
    return "unknown_other" if code == UNKNOWN_OTHER_ERROR else error_name(code)
