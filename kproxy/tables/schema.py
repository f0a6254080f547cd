"""The tables as Arrow schemas: the columns, their order and types, how they are stored and how their rows are sorted.

Duty: the only definition of the tables; the live recorder, `kproxy convert` and Spark all write them. Columns are
added, never renamed or moved, and each addition raises VERSION; `meanings` describes them. `time` has microseconds, the
resolution of Spark; exact times and durations are nanoseconds as plain integers.

Does not compute rows.
"""

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from kproxy.tables import meanings

VERSION = 13

TIME = pa.timestamp("us", tz="UTC")
I16, I32, I64, TEXT, FLAG = pa.int16(), pa.int32(), pa.int64(), pa.string(), pa.bool_()
BYTES = pa.binary()
INTEGERS = pa.list_(pa.field("element", I32))
HEADERS = pa.list_(pa.field("element", pa.struct([("key", TEXT), ("value", BYTES)]), nullable=False))


# Columns that are never null, in every table, whatever bytes peers sent.
_ALWAYS = frozenset(("source", "cluster", "time", "direction", "outcome", "kind", "sentence", "event"))


def _columns(*columns: tuple[str, pa.DataType], always: tuple[str, ...] = ()) -> pa.Schema:
    """Return a schema. always: columns that are never null, in addition to _ALWAYS."""
    return pa.schema([pa.field(name, kind, nullable=name not in (*_ALWAYS, *always)) for name, kind in columns])


@dataclass(frozen=True)
class Table:
    """A table: its name is its folder in a dataset."""

    name: str
    schema: pa.Schema
    keys: tuple[str, ...]  # rows are sorted by these columns; equal rows keep the order of arrival
    weight: str | None = None  # a column with the approximate bytes of a row, if rows differ much in size

    @cached_property
    def described(self) -> pa.Schema:
        """Return the schema for files, with the description and the unit of each column as metadata."""
        return pa.schema([_described(self.name, field) for field in self.schema])

    @cached_property
    def deltas(self) -> list[str]:
        """Return the delta-encoded columns: times and counters, whose neighbours differ little."""
        return [
            field.name
            for field in self.schema
            if field.type == TIME or field.name.endswith(("_ns", "_bytes", "offset")) or field.name in _COUNTERS
        ]

    @property
    def has_names(self) -> bool:
        """Return whether topics or brokers may be filled in after the whole capture was read (`names.Names.fill`)."""
        return bool({"direction", "broker_address"} & set(self.schema.names))

    @cached_property
    def words(self) -> list[str]:
        """Return the dictionary-encoded columns: all but delta-encoded ones and flags."""
        return [field.name for field in self.schema if field.name not in self.deltas and field.type != FLAG]


def _described(table: str, field: pa.Field) -> pa.Field:
    told = {"description": meanings.meaning(table, field.name), "unit": meanings.unit(field.name)}
    return field.with_metadata({name: text for name, text in told.items() if text is not None})


_COUNTERS = frozenset(
    ("number", "correlation_id", "zxid", "bytes", "high_watermark", "base_timestamp", "max_timestamp", "timestamp")
)

EXCHANGES = Table(
    "exchanges",
    _columns(
        ("source", TEXT),
        ("cluster", TEXT),
        ("connection", I64),
        ("number", I64),
        ("time", TIME),
        ("request_start_ns", I64),
        ("request_end_ns", I64),
        ("response_start_ns", I64),
        ("response_end_ns", I64),
        ("latency_ns", I64),
        ("queue_ns", I64),
        ("muted_ns", I64),
        ("replica_id", I32),
        ("total_ns", I64),
        ("client_address", TEXT),
        ("client_port", I32),
        ("broker_address", TEXT),
        ("broker_port", I32),
        ("broker_id", I32),
        ("api_key", I16),
        ("api", TEXT),
        ("api_version", I16),
        ("correlation_id", I32),
        ("client_id", TEXT),
        ("request_bytes", I64),
        ("response_bytes", I64),
        ("outcome", TEXT),
        ("error_code", I16),
        ("error", TEXT),
        ("errors", I32),
        ("throttle_ms", I32),
        ("in_flight", I32),
        ("acks", I16),
        ("max_wait_ms", I32),
        ("topics", I32),
        ("partitions", I32),
        ("records", I64),
        ("group_id", TEXT),
        ("transactional_id", TEXT),
        ("decoded", TEXT),
        ("retransmissions", I32),
        # The sum of the next five, queue_ns and muted_ns is total_ns in every case.
        ("sending_ns", I64),
        ("broker_ns", I64),
        ("receiving_ns", I64),
        ("loss_ns", I64),
        ("closed_window_ns", I64),
        always=("connection",),
    ),
    ("time", "connection", "number", "response_start_ns", "correlation_id"),
)

_OF_PARTITION = [
    ("source", TEXT),
    ("cluster", TEXT),
    ("connection", I64),
    ("number", I64),
    ("time", TIME),
    ("api", TEXT),
    ("direction", TEXT),
    ("topic", TEXT),
    ("topic_id", TEXT),
    ("partition", I32),
]

PARTITIONS = Table(
    "partitions",
    _columns(
        *_OF_PARTITION,
        ("bytes", I64),
        ("batches", I32),
        ("records", I64),
        ("codec", TEXT),
        ("magic", I16),
        ("error_code", I16),
        ("error", TEXT),
        ("offset", I64),
        ("high_watermark", I64),
        ("last_stable_offset", I64),
        ("log_start_offset", I64),
        ("leader_epoch", I32),
        ("lag_records", I64),
        ("lag_ns", I64),
        ("metadata", TEXT),
        ("group_id", TEXT),
        ("end_offset", I64),
        always=("connection",),
    ),
    ("time", "connection", "number", "direction", "topic_id", "topic", "partition"),
)

BATCHES = Table(
    "batches",
    _columns(
        *_OF_PARTITION,
        ("base_offset", I64),
        ("last_offset", I64),
        ("records", I64),
        ("bytes", I64),
        ("codec", TEXT),
        ("magic", I16),
        ("timestamp_type", TEXT),
        ("base_timestamp", I64),
        ("max_timestamp", I64),
        ("producer_id", I64),
        ("producer_epoch", I16),
        ("base_sequence", I32),
        ("transactional", FLAG),
        ("control", FLAG),
        ("crc_valid", FLAG),
        ("partial", FLAG),
        always=("connection",),
    ),
    ("time", "connection", "number", "direction", "topic_id", "topic", "partition", "base_offset"),
)

# Only on request (`--records`), for the chosen topics.
RECORDS = Table(
    "records",
    _columns(
        *_OF_PARTITION,
        ("base_offset", I64),
        ("offset", I64),
        ("timestamp", I64),
        ("bytes", I64),
        ("key_bytes", I64),
        ("key", BYTES),
        ("value_bytes", I64),
        ("value", BYTES),
        ("headers", HEADERS),
        always=("connection",),
    ),
    ("time", "connection", "number", "direction", "topic_id", "topic", "partition", "offset"),
    weight="bytes",
)

CONNECTIONS = Table(
    "connections",
    _columns(
        ("source", TEXT),
        ("cluster", TEXT),
        ("connection", I64),
        ("time", TIME),
        ("start_ns", I64),
        ("end_ns", I64),
        ("client_address", TEXT),
        ("client_port", I32),
        ("broker_address", TEXT),
        ("broker_port", I32),
        ("broker_id", I32),
        ("requests", I64),
        ("answers", I64),
        ("client_bytes", I64),
        ("broker_bytes", I64),
        ("software_name", TEXT),
        ("software_version", TEXT),
        ("sasl_mechanism", TEXT),
        ("sasl_tokens", I64),
        ("tls", TEXT),
        ("start_seen", FLAG),
        ("end_seen", FLAG),
        ("close", TEXT),
        ("handshake_rtt_ns", I64),
        ("retransmissions", I64),
        ("out_of_order", I64),
        ("zero_windows", I64),
        ("gaps", I64),
        ("gap_bytes", I64),
        ("resyncs", I64),
        ("faults", I64),
        ("late_answers", I64),
        ("late_answer_ns", I64),
        ("late_answer_since_ns", I64),
        ("late_answer_times", I64),
        ("tls_failure", TEXT),
        ("path_mtu", I64),
        ("closed_by", TEXT),
        ("closed_ns", I64),
        always=("connection",),
    ),
    ("time", "connection"),
)

QUALITY = Table(
    "quality",
    _columns(
        ("source", TEXT),
        ("kind", TEXT),
        ("count", I64),
        ("bytes", I64),
        ("first_ns", I64),
        ("last_ns", I64),
        ("sentence", TEXT),
    ),
    ("source",),
)

# Tables of `kproxy.insight`. A row's `source` is the source of the exchange that completed the row.
_OF_KNOWLEDGE = [("source", TEXT), ("cluster", TEXT), ("time", TIME)]

GROUP_EVENTS = Table(
    "group_events",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("group_id", TEXT),
        ("protocol", TEXT),
        ("event", TEXT),
        ("member_id", TEXT),
        ("group_instance_id", TEXT),
        ("client_id", TEXT),
        ("client_address", TEXT),
        ("generation", I32),
        ("coordinator_id", I32),
        ("error", TEXT),
        ("reason", TEXT),
        ("connection", I64),
        ("number", I64),
        ("group_type", TEXT),
    ),
    ("time",),
)

REBALANCES = Table(
    "rebalances",
    _columns(
        *_OF_KNOWLEDGE,
        ("group_id", TEXT),
        ("protocol", TEXT),
        ("strategy", TEXT),
        ("generation", I32),
        ("cause", TEXT),
        ("cause_member", TEXT),
        ("reason", TEXT),
        ("started_ns", I64),
        ("joined_ns", I64),
        ("ended_ns", I64),
        ("members_before", I32),
        ("members_after", I32),
        ("rejoined", I32),
        ("last_to_join", TEXT),
        ("coordinator_id", I32),
        ("waited_ns", I64),
        ("group_type", TEXT),
    ),
    ("time", "group_id", "generation"),
)

ASSIGNMENTS = Table(
    "assignments",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("group_id", TEXT),
        ("generation", I32),
        ("member_id", TEXT),
        ("client_id", TEXT),
        ("topic", TEXT),
        ("partition", I32),
        ("strategy", TEXT),
        ("agrees", FLAG),
        ("group_type", TEXT),
    ),
    ("time", "group_id", "generation", "member_id", "topic", "partition"),
)

LEADERSHIP = Table(
    "leadership",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("api", TEXT),
        ("controller_id", I32),
        ("controller_epoch", I32),
        ("topic", TEXT),
        ("partition", I32),
        ("leader", I32),
        ("leader_epoch", I32),
        ("isr", INTEGERS),
        ("replicas", INTEGERS),
        ("change", TEXT),
    ),
    ("time",),
)

TOPOLOGY = Table(
    "topology",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("kind", TEXT),
        ("broker_id", I32),
        ("host", TEXT),
        ("port", I32),
        ("rack", TEXT),
        ("topic", TEXT),
        ("partition", I32),
        ("leader", I32),
        ("isr", INTEGERS),
        ("replicas", INTEGERS),
        ("change", TEXT),
        ("api", TEXT),
        ("topic_id", TEXT),
        ("partitions", I32),
    ),
    ("time",),
)

CHANGES = Table(
    "changes",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("api", TEXT),
        ("resource_type", TEXT),
        ("resource_name", TEXT),
        ("client_id", TEXT),
        ("client_address", TEXT),
        ("principal", TEXT),
        ("error", TEXT),
        ("detail", TEXT),
        ("connection", I64),
        ("number", I64),
        ("answered", FLAG),
    ),
    ("time",),
)

REGISTRY = Table(
    "registry",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("session", TEXT),
        ("client_address", TEXT),
        ("client_port", I32),
        ("xid", I32),
        ("op", TEXT),
        ("path", TEXT),
        ("version", I32),
        ("zxid", I64),
        ("ephemeral", FLAG),
        ("error", TEXT),
        ("latency_ns", I64),
        ("value", TEXT),
        ("kind", TEXT),
        ("watch", FLAG),
        ("server_address", TEXT),
        ("server_port", I32),
        ("connection", I64),
        ("number", I64),
    ),
    ("time", "time_ns", "connection", "number"),
)

COMMITTED_OFFSETS = Table(
    "committed_offsets",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("group_id", TEXT),
        ("topic", TEXT),
        ("partition", I32),
        ("offset", I64),
        ("leader_epoch", I32),
        ("metadata", TEXT),
        ("change", TEXT),
        ("producer_id", I64),
        ("expires_ns", I64),
        ("log_partition", I32),
        ("log_offset", I64),
        ("connection", I64),
        ("number", I64),
    ),
    ("time", "log_partition", "log_offset"),
)

TRANSACTIONS = Table(
    "transactions",
    _columns(
        *_OF_KNOWLEDGE,
        ("time_ns", I64),
        ("transactional_id", TEXT),
        ("state", TEXT),
        ("producer_id", I64),
        ("producer_epoch", I32),
        ("timeout_ms", I32),
        ("started_ns", I64),
        ("partitions", TEXT),
        ("partition_count", I32),
        ("coordinator_id", I32),
        ("log_partition", I32),
        ("log_offset", I64),
        ("connection", I64),
        ("number", I64),
    ),
    ("time", "log_partition", "log_offset"),
)

KNOWLEDGE = (
    GROUP_EVENTS,
    REBALANCES,
    ASSIGNMENTS,
    LEADERSHIP,
    TOPOLOGY,
    CHANGES,
    REGISTRY,
    COMMITTED_OFFSETS,
    TRANSACTIONS,
)

# The tables of every dataset.
TABLES = {table.name: table for table in (EXCHANGES, PARTITIONS, BATCHES, CONNECTIONS, QUALITY, *KNOWLEDGE)}
BY_NAME = TABLES | {RECORDS.name: RECORDS}
# The VERSION that added a table, if it was not the first.
SINCE = {table.name: 3 for table in KNOWLEDGE} | {COMMITTED_OFFSETS.name: 4, TRANSACTIONS.name: 4}
