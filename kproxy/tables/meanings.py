"""What each column of each table means, and in which unit.

Duty: the one place that says so. Files of tables carry it (Arrow's metadata of a field: `description`, `unit`), and
docs/reference/columns.md is made of it. Refuses to know how columns are filled.
"""

from collections.abc import Mapping

# How the names of moments end; all other columns in nanoseconds are durations.
_MOMENTS = (
    *("start_ns", "end_ns", "started_ns", "ended_ns", "joined_ns", "first_ns", "last_ns", "time_ns", "since_ns"),
    "expires_ns",
)
_UNITS = {
    "base_timestamp": "ms since 1970-01-01 UTC",
    "max_timestamp": "ms since 1970-01-01 UTC",
    "timestamp": "ms since 1970-01-01 UTC",
    "bytes": "bytes",
}
_ENDINGS = {"_ns": "ns", "_ms": "ms", "_bytes": "bytes"}

# What a name means in every table that has no meaning of its own for it.
_USUAL = {
    "source": "the capture's name, or live:<listener>",
    "cluster": "the name that was given, or the cluster's id where captures show several",
    "time": "when it began, to the microsecond",
    "time_ns": "when the message that says so was complete",
    "connection": "the connection's id, by both ends and its first moment: the same whatever the capture is called",
    "number": "the request's place on its connection, from 0; null: only its answer was seen",
    "client_address": "the client's IP address",
    "client_port": "the client's port",
    "broker_address": "the broker's IP address",
    "broker_port": "the broker's port",
    "broker_id": "the broker that advertises this address; null: no answer names it",
    "client_id": "as the client calls itself in its requests",
    "group_id": "the group's name",
    "topic": "the topic's name; filled in where any answer of the capture tells that of its id",
    "topic_id": "the topic's id, from Kafka 2.8 on",
    "partition": "the partition's number",
    "api": "the request's API",
    "direction": "request or response",
    "bytes": "its size",
    "records": "how many records",
    "codec": "compression: none, gzip, snappy, lz4, zstd",
    "magic": "format: 0 or 1: message set, 2: record batch",
    "generation": "of the classic protocol; the epoch, for the newer ones",
    "coordinator_id": "the broker that was asked",
    "group_type": "what its members are: consumer, connect, streams, share, or as they call themselves; null: not seen",
    "protocol": "classic, consumer (KIP-848), share (KIP-932), streams (KIP-1071); unknown: no member was seen yet",
    "leader": "the leader's broker id; null: there is none",
    "leader_epoch": "as the message has it",
    "isr": "broker ids of the replicas in sync",
    "replicas": "broker ids of all replicas",
    "log_partition": "the partition of the coordinators' log that has the record",
    "log_offset": "the record's offset in it",
    "producer_id": "of an idempotent or transactional producer",
    "producer_epoch": "of that producer",
    "metadata": "what its consumer keeps beside the offset",
    "transactional_id": "as its producer has it",
}

_FIRST_BYTE = "the first byte of its request; of the answer, if only that was seen"
_BATCH = {
    "base_offset": "the batch's first offset",
    "time": _FIRST_BYTE,
}

OF_TABLES: Mapping[str, Mapping[str, str]] = {
    "exchanges": {
        "time": "the first byte of the request; of the answer, if only that was seen",
        "request_start_ns": "the request's first byte",
        "request_end_ns": "its last byte",
        "response_start_ns": "the answer's first byte",
        "response_end_ns": "its last byte",
        "latency_ns": "from the request's last byte to the answer's first",
        "queue_ns": "behind earlier requests of the connection; a part of total_ns",
        "muted_ns": "while an earlier throttle muted the connection (KIP-219); a part of total_ns",
        "replica_id": "of the broker that fetches or lists offsets; null: a client, or bodies were not read",
        "total_ns": "from the request's first byte to the answer's last; the sum of its parts",
        "api_key": "the API's number",
        "api_version": "the version that the request has",
        "correlation_id": "as the request has it",
        "request_bytes": "with the 4 bytes of the size",
        "response_bytes": "with the 4 bytes of the size",
        "outcome": "answered; answered_by_proxy: by kproxy, no broker saw it; no_answer_expected: acks=0; "
        "unanswered: the connection ended first; request_not_seen: only the answer was; lost: in a hole of the "
        "capture",
        "error_code": "the answer's at its top level, else the first error in it; 0: none; null: it has no such level, "
        "and no error in it",
        "error": "the name of error_code: NONE for 0",
        "errors": "how many errors the answer has at all levels",
        "throttle_ms": "as the broker reported",
        "in_flight": "requests of the connection that waited already when this one came",
        "acks": "of a Produce",
        "max_wait_ms": "of a Fetch",
        "topics": "how many topics a Produce or Fetch names",
        "partitions": "how many partitions a Produce or Fetch names",
        "records": "how many records a Produce or Fetch carries",
        "group_id": "the group that the request names",
        "transactional_id": "that the request names",
        "decoded": "full, header: its body was not read, failed: it cannot be, opaque: not Kafka's",
        "retransmissions": "TCP segments of it that were sent again; null where TCP is not seen",
        "sending_ns": "until the request was sent, without what other parts explain; a part of total_ns",
        "broker_ns": "until the answer began, without what other parts explain; a part of total_ns",
        "receiving_ns": "until the answer ended, without what other parts explain; a part of total_ns",
        "loss_ns": "waiting for segments that were lost; a part of total_ns; null where TCP is not seen",
        "closed_window_ns": "waiting for a reader whose window was closed; a part of total_ns; null where TCP is not"
        " seen",
    },
    "partitions": {
        "time": _FIRST_BYTE,
        "bytes": "of what is produced or fetched",
        "batches": "how many record batches",
        "error_code": "of this partition; 0: none; null: the answer has none for it, or there is no answer",
        "error": "the name of error_code: NONE for 0",
        "offset": "as the message has it: to fetch from, first produced, asked for or committed",
        "high_watermark": "as the answer has it",
        "last_stable_offset": "as the answer has it",
        "log_start_offset": "as the message has it",
        "lag_records": "of a Fetch: records between it and the high watermark",
        "lag_ns": "of a Fetch: the age of the newest record that it brought",
        "metadata": "of a committed offset: what its consumer keeps beside it",
        "group_id": "of a committed offset: its group, at most 500 characters",
        "end_offset": "where the log ends, as an answer of its leader tells; null: it does not",
    },
    "batches": {
        **_BATCH,
        "last_offset": "the batch's last offset",
        "timestamp_type": "CreateTime, LogAppendTime",
        "base_timestamp": "of its first record",
        "max_timestamp": "of its newest record",
        "base_sequence": "of an idempotent producer: that of the first record",
        "transactional": "whether it is of a transaction",
        "control": "whether it holds markers of transactions",
        "crc_valid": "whether its checksum fits; null: not checked (--checksums), or it is not all there",
        "partial": "whether the answer ends inside it",
    },
    "records": {
        **_BATCH,
        "offset": "the record's",
        "timestamp": "the record's",
        "bytes": "of key, value and headers, before anything was cut",
        "key_bytes": "the key's size, before it was cut",
        "key": "cut or hashed, as --record-values says",
        "value_bytes": "the value's size, before it was cut",
        "value": "cut or hashed, as --record-values says",
        "headers": "cut or hashed, as --record-values says",
    },
    "connections": {
        "time": "its first packet",
        "start_ns": "its first packet",
        "end_ns": "its last packet",
        "requests": "how many the client sent",
        "answers": "how many the broker sent",
        "client_bytes": "that the client sent",
        "broker_bytes": "that the broker sent",
        "software_name": "of the client (KIP-511)",
        "software_version": "of the client (KIP-511)",
        "sasl_mechanism": "by which the client logged in",
        "sasl_tokens": "raw tokens, which are no requests",
        "tls": "plain; tls; tls_decrypted: read with its keys, or kproxy ends the client's TLS",
        "start_seen": "whether its begin was seen",
        "end_seen": "whether its end was seen",
        "close": "how it ended: fin, reset, idle, reused, open; or how its connect failed: refused, unanswered",
        "handshake_rtt_ns": "the round trip of the TCP handshake",
        "retransmissions": "TCP segments that were sent again",
        "out_of_order": "TCP segments that came late",
        "zero_windows": "how often a reader's window closed",
        "gaps": "holes of the capture in it",
        "gap_bytes": "bytes that are missing there",
        "resyncs": "how often reading began anew behind a hole",
        "faults": "how often bytes were not Kafka's protocol",
        "late_answers": "answers that were sent again before the client acknowledged them",
        "late_answer_ns": "for how long the latest of them went unacknowledged",
        "late_answer_since_ns": "since when the latest of them did",
        "late_answer_times": "how often the latest of them was sent again",
        "tls_failure": "why no TLS connection came about: the alert and its sender, as `unknown_ca by client`; "
        "unanswered; answered in clear; TLS expected: the client spoke none, and was answered by an alert",
    },
    "quality": {
        "kind": "the kind of flaw, or of what was counted",
        "count": "how many",
        "bytes": "of what was counted",
        "first_ns": "the first one",
        "last_ns": "the last one",
        "sentence": "what it means",
    },
    "group_events": {
        "event": "coordinator_found, coordinator_not_found, coordinator_moved; join, join_answered, sync, "
        "sync_answered; assigned, revoked (what is new, in reason), tasks_assigned (of Streams; what Connect adds),"
        " assignment_differs; heartbeat_failed, commit_failed, offset_fetch_failed; offsets_committed, "
        "offsets_aborted (in a transaction that ended); leave, member_replaced; described, deleted; of the "
        "coordinator's log, where somebody fetches __consumer_offsets: stored, removed (a group or a member, at the"
        " coordinator's time); inferred: expired (no later than its time), never_joined",
        "member_id": "whose it is",
        "group_instance_id": "of a static member",
        "client_id": "the member's",
        "client_address": "the member's",
        "error": "the answer's; null: none",
        "reason": "what the member or the coordinator says; of a join_answered what a worker of Connect (its URL, "
        "its config offset) or a member of Streams (process, endpoint, tasks whose state it has) says of itself",
    },
    "rebalances": {
        "time": "when it was set off",
        "strategy": "the assignor that its members agreed on",
        "cause": "member_joined, member_left, session_expired, subscription_changed, metadata_changed, "
        "leader_rejoined, coordinator_moved, member_replaced, unknown",
        "cause_member": "who set it off",
        "reason": "why, in words",
        "started_ns": "when it was set off",
        "joined_ns": "when all had joined",
        "ended_ns": "when the last member was assigned; null: not all were",
        "members_before": "how many members the group had",
        "members_after": "how many it has then",
        "rejoined": "members that had to join again",
        "last_to_join": "the member that joined last, if somebody did",
        "waited_ns": "how long all others waited for it",
    },
    "assignments": {
        "time": "when the assignment was sent",
        "member_id": "who was given it",
        "client_id": "the member's",
        "topic": "the topic; of Connect the connector, of streams groups (KIP-1071) the subtopology",
        "partition": "the partition; the task's number of Connect (-1: the connector itself) and of streams groups",
        "strategy": "the assignor that its members agreed on",
        "agrees": "whether it equals what the strategy computes (range, round robin), or holds what it must (sticky:"
        " each partition once, at a subscriber); null: neither can be said",
    },
    "leadership": {
        "time": "when the message that says so was complete, to the microsecond",
        "api": "which message says so: LeaderAndIsr, StopReplica, UpdateMetadata, AlterPartition, Metadata",
        "controller_id": "who decided, where the message has it",
        "controller_epoch": "its epoch",
        "change": "created, elected, isr_shrunk (a replica left the ISR), isr_grown, offline, moved, deleted",
    },
    "topology": {
        "time": "when the message that says so was complete, to the microsecond",
        "kind": "broker, controller, topic, partition",
        "broker_id": "of a broker or a controller",
        "host": "of a broker",
        "port": "of a broker",
        "rack": "of a broker",
        "change": "appeared, changed, gone; of brokers also listener (the address of another listener of it, where "
        "changed is another address of the same one), registered, fenced, unfenced, shutting_down; of controllers "
        "active; of topics grown, recreated, and unknown, invalid_name, unauthorized: refused to a "
        "client that asked (its exchange has this time_ns as response_start_ns), once for each client id; of "
        "partitions as in leadership",
        "api": "which message says so",
        "partitions": "how many partitions a topic has",
    },
    "changes": {
        "time": "when it was asked or answered, to the microsecond",
        "api": "what was asked",
        "resource_type": "of what: topic, group, user, broker, ...",
        "resource_name": "of which",
        "client_id": "who asked",
        "client_address": "who asked",
        "principal": "who asked, as far as the wire says",
        "error": "the answer's; null: it was done, if it was answered",
        "detail": "JSON: what was asked, and what the answer adds; no secrets",
        "answered": "whether an answer was seen",
    },
    "registry": {
        "time": "when it was complete, to the microsecond",
        "session": "in hexadecimal, as ZooKeeper's log writes it; null: its begin was not seen",
        "xid": "the client's number of the request",
        "op": "ZooKeeper's own name of the operation; notification: a watch fired",
        "path": "of the node",
        "version": "of the node",
        "zxid": "ZooKeeper's number of the change",
        "ephemeral": "whether the node goes with its session",
        "error": "ZooKeeper's name of it; null: none",
        "latency_ns": "from the request to its answer",
        "value": "what was written or read",
        "kind": "what the node is to Kafka",
        "watch": "whether a read set a watch",
        "server_address": "the server's IP address",
        "server_port": "the server's port",
        "number": "the operation's place on its connection",
    },
    "committed_offsets": {
        "time": "the coordinator's time of the record",
        "time_ns": "the coordinator's time of the record",
        "offset": "what was committed; null: there is none any more",
        "change": "committed; pending: in a transaction; aborted: with it; removed: expired, deleted, or the group "
        "is. How a transaction ended is known where the log was read from its offsets to its marker, without a gap",
        "producer_id": "of the transaction",
        "expires_ns": "as brokers before 2.1 wrote it",
        "connection": "the first that showed the record",
        "number": "the first exchange that showed it",
    },
    "transactions": {
        "time": "the coordinator's time of the record; of an answer, when it came",
        "time_ns": "the same",
        "state": "as Kafka's tools call it: Empty, Ongoing, PrepareCommit, CompleteCommit, PrepareAbort, "
        "CompleteAbort, Dead (it is gone)",
        "timeout_ms": "transaction.timeout.ms of the producer: the coordinator aborts what is open for longer",
        "started_ns": "when the transaction began",
        "partitions": 'those that it writes to: "orders-0, orders-1"',
        "partition_count": "how many these are",
        "log_partition": "of __transaction_state; null: an answer to InitProducerId or DescribeTransactions says so",
        "connection": "the first that showed the record",
        "number": "the first exchange that showed it",
    },
}


def meaning(table: str, column: str) -> str | None:
    """What a column means; None of a table or a column that is not in datasets."""
    return OF_TABLES.get(table, {}).get(column) or _USUAL.get(column)


def unit(column: str) -> str | None:
    """The unit of a column's numbers, if they have one."""
    if column.endswith(_MOMENTS):
        return "ns since 1970-01-01 UTC"
    return _UNITS.get(column) or next((unit for ending, unit in _ENDINGS.items() if column.endswith(ending)), None)
