"""The meaning and the unit of each column of each table.

Duty: the one place that defines them. Files of tables carry them (Arrow's metadata of a field: `description`, `unit`),
and docs/reference/columns.md is made from them. Refuses to know how columns are filled.
"""

from collections.abc import Mapping

# Endings of the names of moments; all other columns in nanoseconds are durations.
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

# The meaning of a name in every table that does not define its own.
_USUAL = {
    "source": "the capture's name, or live:<listener>",
    "cluster": "the name that was given, or the cluster's id where captures show several",
    "time": "when it began, to the microsecond",
    "time_ns": "when the message that reports it was complete",
    "connection": "the connection's id, by both ends and its first moment: the same whatever the capture is called",
    "number": "the request's place on its connection, from 0; null: only its answer was seen",
    "client_address": "the client's IP address",
    "client_port": "the client's port",
    "broker_address": "the broker's IP address",
    "broker_port": "the broker's port",
    "broker_id": "the broker that advertises this address; null: no answer names it",
    "client_id": "the client.id in its requests",
    "group_id": "the group's name",
    "topic": "the topic's name; filled in if any answer in the capture gives the name for its id",
    "topic_id": "the topic's id, from Kafka 2.8 on",
    "partition": "the partition's number",
    "api": "the request's API",
    "direction": "request or response",
    "bytes": "its size",
    "records": "how many records",
    "codec": "compression: none, gzip, snappy, lz4, zstd",
    "magic": "format: 0 or 1: message set, 2: record batch",
    "generation": "generation of the classic protocol; epoch of the newer ones",
    "coordinator_id": "the broker that was asked",
    "group_type": "type of its members: consumer, connect, streams, share, or a name of their own; null: not seen",
    "protocol": "classic, consumer (KIP-848), share (KIP-932), streams (KIP-1071); unknown: no member was seen yet",
    "leader": "the leader's broker id; null: there is none",
    "leader_epoch": "as the message has it",
    "isr": "broker ids of the replicas in sync",
    "replicas": "broker ids of all replicas",
    "log_partition": "partition of the coordinators' log that holds the record",
    "log_offset": "the record's offset in that partition",
    "producer_id": "id of the idempotent or transactional producer",
    "producer_epoch": "epoch of that producer",
    "metadata": "text that the consumer committed with the offset",
    "transactional_id": "the producer's transactional.id",
}

_FIRST_BYTE = "first byte of its request, or of the answer if only that was seen"
_BATCH = {
    "base_offset": "the batch's first offset",
    "time": _FIRST_BYTE,
}

OF_TABLES: Mapping[str, Mapping[str, str]] = {
    "exchanges": {
        "time": "first byte of the request, or of the answer if only that was seen",
        "request_start_ns": "the request's first byte",
        "request_end_ns": "its last byte",
        "response_start_ns": "the answer's first byte",
        "response_end_ns": "its last byte",
        "latency_ns": "from the request's last byte to the answer's first",
        "queue_ns": "waiting behind earlier requests of the connection; a part of total_ns",
        "muted_ns": "waiting while an earlier throttle muted the connection (KIP-219); a part of total_ns",
        "replica_id": "id of the broker that fetches or lists offsets; null: a client, or bodies were not read",
        "total_ns": "from the request's first byte to the answer's last; the sum of its parts",
        "api_key": "the API's number",
        "api_version": "version of the request",
        "correlation_id": "as the request has it",
        "request_bytes": "size of the request, including the 4 bytes of its length",
        "response_bytes": "size of the answer, including the 4 bytes of its length",
        "outcome": "answered; answered_by_proxy: kproxy answered, no broker got it; no_answer_expected: acks=0; "
        "unanswered: the connection ended first; request_not_seen: only the answer was seen; lost: the answer is in a "
        "gap of the capture, or a later request of the connection was answered, since brokers answer in order",
        "error_code": "the answer's top-level code, else the first error inside; 0: none; null: no top-level code, "
        "and no error inside",
        "error": "the name of error_code: NONE for 0",
        "errors": "how many errors the answer has at all levels",
        "throttle_ms": "as the broker reported",
        "in_flight": "requests already in flight on the connection when this one arrived",
        "acks": "of a Produce",
        "max_wait_ms": "of a Fetch",
        "topics": "how many topics a Produce names, or the answer to a Fetch has",
        "partitions": "how many partitions a Produce names, or the answer to a Fetch has",
        "records": "how many records a Produce or Fetch carries",
        "group_id": "the group that the request names",
        "transactional_id": "the transactional id that the request names",
        "decoded": "full, header: its body was not read, failed: it cannot be, opaque: not Kafka's",
        "retransmissions": "retransmitted TCP segments of it; null where TCP is not seen",
        "sending_ns": "time until the request was sent, without the other parts; a part of total_ns",
        "broker_ns": "time until the answer began, without the other parts; a part of total_ns",
        "receiving_ns": "time until the answer ended, without the other parts; a part of total_ns",
        "loss_ns": "waiting for lost segments; a part of total_ns; null where TCP is not seen",
        "closed_window_ns": "waiting for a receiver whose window was closed; a part of total_ns; null where TCP is "
        "not seen",
    },
    "partitions": {
        "time": _FIRST_BYTE,
        "bytes": "size of the records produced or fetched",
        "batches": "how many record batches",
        "error_code": "of this partition; 0: none; null: the answer has none for it, or there is no answer",
        "error": "the name of error_code: NONE for 0",
        "offset": "the message's offset: to fetch from, first one produced, listed, or committed",
        "high_watermark": "as the answer has it",
        "last_stable_offset": "as the answer has it",
        "log_start_offset": "as the message has it",
        "lag_records": "of a Fetch: records between it and the high watermark",
        "lag_ns": "of a Fetch: the age of the newest record that it brought",
        "metadata": "of a committed offset: text that the consumer committed with it",
        "group_id": "of a committed offset: its group, at most 500 characters",
        "end_offset": "end of the log, if the answer is its leader's and reports it; else null",
    },
    "batches": {
        **_BATCH,
        "last_offset": "the batch's last offset",
        "timestamp_type": "CreateTime, LogAppendTime",
        "base_timestamp": "timestamp of its first record",
        "max_timestamp": "timestamp of its newest record",
        "base_sequence": "sequence number of the first record; idempotent producers only",
        "transactional": "whether it belongs to a transaction",
        "control": "whether it holds transaction markers",
        "crc_valid": "whether its checksum is right; null: not checked (--checksums), or the batch is incomplete",
        "partial": "whether the answer ends inside it",
    },
    "records": {
        **_BATCH,
        "offset": "the record's",
        "timestamp": "the record's",
        "bytes": "size of key, value and headers, before anything was cut",
        "key_bytes": "the key's size, before it was cut",
        "key": "the key, cut or hashed by --record-values",
        "value_bytes": "the value's size, before it was cut",
        "value": "the value, cut or hashed by --record-values",
        "headers": "the headers, cut or hashed by --record-values",
    },
    "connections": {
        "time": "its first packet",
        "start_ns": "its first packet",
        "end_ns": "its last packet",
        "requests": "how many the client sent",
        "answers": "how many the broker sent",
        "client_bytes": "bytes that the client sent",
        "broker_bytes": "bytes that the broker sent",
        "software_name": "of the client (KIP-511)",
        "software_version": "of the client (KIP-511)",
        "sasl_mechanism": "SASL mechanism of the client's login",
        "sasl_tokens": "raw SASL tokens, which are no requests",
        "tls": "plain; tls; tls_decrypted: read with its keys, or kproxy ends the client's TLS",
        "start_seen": "whether its beginning was seen",
        "end_seen": "whether its end was seen",
        "close": "how it ended: fin, reset, idle, reused, open; or how its connect failed: refused, unanswered, "
        "closed_at_once: by the server, before a byte of either side; as ICMP reports: port_unreachable, "
        "host_unreachable, net_unreachable, prohibited",
        "handshake_rtt_ns": "the round trip of the TCP handshake",
        "retransmissions": "retransmitted TCP segments",
        "out_of_order": "TCP segments that came late",
        "zero_windows": "how often a reader's window closed",
        "gaps": "gaps of the capture in it",
        "gap_bytes": "bytes missing in these gaps",
        "resyncs": "how often decoding resumed after a gap",
        "faults": "how often bytes were not Kafka's protocol",
        "late_answers": "answers that were retransmitted before the client acknowledged them",
        "late_answer_ns": "how long the latest of them stayed unacknowledged",
        "late_answer_since_ns": "since when the latest of them was unacknowledged",
        "late_answer_times": "how often the latest of them was retransmitted",
        "tls_failure": "why the TLS handshake failed: the alert and its sender, as `unknown_ca by client`; "
        "unanswered; answered in clear; TLS expected: the client sent no TLS, and got an alert",
        "path_mtu": "the smallest MTU, in bytes, that a router named when it dropped a packet of the connection as too "
        "large (ICMP); null: none did",
        "closed_by": "which side ended it first, by a FIN or RST: client, broker; neither: kproxy ended it; null: no "
        "end was seen, or the first may be missing from the capture",
        "closed_ns": "when that was: the first FIN or RST; null where closed_by is null",
    },
    "quality": {
        "kind": "the kind of flaw, or of fact, that is counted",
        "count": "how many",
        "bytes": "how many bytes",
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
        " coordinator's time); inferred: expired (at its time or before), never_joined",
        "member_id": "the member's id",
        "group_instance_id": "of a static member",
        "client_id": "the member's",
        "client_address": "the member's",
        "error": "the answer's; null: none",
        "reason": "reason given by the member or the coordinator; for join_answered, data that a Connect worker (its "
        "URL, its config offset) or a Streams member (process, endpoint, tasks whose state it has) sent",
    },
    "rebalances": {
        "time": "when its cause occurred",
        "strategy": "the assignor that its members agreed on",
        "cause": "member_joined, member_left, session_expired, subscription_changed, metadata_changed, "
        "leader_rejoined, coordinator_moved, member_replaced, unknown",
        "cause_member": "the member that caused it",
        "reason": "why, in words",
        "started_ns": "when its cause occurred",
        "joined_ns": "when all had joined",
        "ended_ns": "when the last member got its assignment; null: not all did",
        "members_before": "how many members the group had",
        "members_after": "how many it has then",
        "rejoined": "members that had to join again",
        "last_to_join": "the member that joined last, if somebody did",
        "waited_ns": "how long all others waited for it",
    },
    "assignments": {
        "time": "when the assignment was sent",
        "member_id": "the member that got it",
        "client_id": "the member's",
        "topic": "the topic; for Connect the connector, for streams groups (KIP-1071) the subtopology",
        "partition": "the partition; for Connect (-1: the connector itself) and streams groups the task's number",
        "strategy": "the assignor that its members agreed on",
        "agrees": "whether it equals what the strategy computes (range, round robin), or holds what it must (sticky:"
        " each partition once, at a subscriber); null: neither can be checked",
    },
    "leadership": {
        "time": "when the message that reports it was complete, to the microsecond",
        "api": "the message that reports it: LeaderAndIsr, StopReplica, UpdateMetadata, AlterPartition, Metadata",
        "controller_id": "the controller that decided, where the message has it",
        "controller_epoch": "its epoch",
        "change": "created, elected, isr_shrunk (a replica left the ISR), isr_grown, offline, moved, deleted",
    },
    "topology": {
        "time": "when the message that reports it was complete, to the microsecond",
        "kind": "broker, controller, topic, partition",
        "broker_id": "id of a broker or a controller",
        "host": "a broker's host",
        "port": "a broker's port",
        "rack": "a broker's rack",
        "change": "appeared, changed, gone; for brokers also listener (the address of another listener of it, where "
        "changed is another address of the same one), registered, fenced, unfenced, shutting_down; for controllers "
        "active; for topics grown, recreated, and unknown, invalid_name, unauthorized: refused to a "
        "client that asked (its exchange has this time_ns as response_start_ns), once for each client id; "
        "for partitions as in leadership",
        "api": "the message that reports it",
        "partitions": "how many partitions a topic has",
    },
    "changes": {
        "time": "when it was requested or answered, to the microsecond",
        "api": "the requested API",
        "resource_type": "type of the resource: topic, group, user, broker, ...",
        "resource_name": "name of the resource",
        "client_id": "the requesting client's id",
        "client_address": "its IP address",
        "principal": "its principal, as far as the traffic shows it",
        "error": "the answer's; null: it was done, if it was answered",
        "detail": "JSON: the request, and the data that the answer adds; no secrets",
        "answered": "whether an answer was seen",
    },
    "registry": {
        "time": "when the operation was complete, to the microsecond",
        "session": "session id in hexadecimal, as in ZooKeeper's log; null: its beginning was not seen",
        "xid": "the client's number of the request",
        "op": "ZooKeeper's own name of the operation; notification: a watch fired",
        "path": "path of the node",
        "version": "version of the node",
        "zxid": "ZooKeeper's number of the change",
        "ephemeral": "whether the node is deleted with its session",
        "error": "ZooKeeper's name of it; null: none",
        "latency_ns": "from the request to its answer",
        "value": "the value written or read",
        "kind": "role of the node in Kafka",
        "watch": "whether a read set a watch",
        "server_address": "the server's IP address",
        "server_port": "the server's port",
        "number": "the operation's place on its connection",
    },
    "committed_offsets": {
        "time": "the coordinator's time of the record",
        "time_ns": "the coordinator's time of the record",
        "offset": "the committed offset; null: there is none any more",
        "change": "committed; pending: in a transaction; aborted: with it; removed: it expired, or it or its "
        "group was deleted. A transaction's end shows only where the log was read without a gap, offsets to marker",
        "producer_id": "of the transaction",
        "expires_ns": "when it expires, as brokers before 2.1 wrote it",
        "connection": "the first connection that showed the record",
        "number": "the first exchange that showed it",
    },
    "transactions": {
        "time": "the coordinator's time of the record; for an answer, when it arrived",
        "time_ns": "the same",
        "state": "as Kafka's tools call it: Empty, Ongoing, PrepareCommit, CompleteCommit, PrepareAbort, "
        "CompleteAbort, Dead (it is gone)",
        "timeout_ms": "transaction.timeout.ms of the producer: the coordinator aborts what is open for longer",
        "started_ns": "when the transaction began",
        "partitions": 'those that it writes to: "orders-0, orders-1"',
        "partition_count": "how many these are",
        "log_partition": "partition of __transaction_state; null: an InitProducerId or DescribeTransactions answer",
        "connection": "the first connection that showed the record",
        "number": "the first exchange that showed it",
    },
}


def meaning(table: str, column: str) -> str | None:
    """The meaning of a column; None for a table or a column that is not in datasets."""
    return OF_TABLES.get(table, {}).get(column) or _USUAL.get(column)


def unit(column: str) -> str | None:
    """The unit of a column's numbers, if they have one."""
    if column.endswith(_MOMENTS):
        return "ns since 1970-01-01 UTC"
    return _UNITS.get(column) or next((unit for ending, unit in _ENDINGS.items() if column.endswith(ending)), None)
