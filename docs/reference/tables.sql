-- made by tools/make_reference.py
-- The tables in the layout of `kproxy spark ingest`, for a catalogue that needs them before there are data. Add
-- `location 'FOLDER/TABLE'`, and after each ingest `msck repair table TABLE`; or add `using delta` or `using iceberg`.

create table exchanges (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `connection` bigint not null comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `time` timestamp not null comment 'first byte of the request, or of the answer if only that was seen',
  `request_start_ns` bigint comment 'the request\'s first byte, in ns since 1970-01-01 UTC',
  `request_end_ns` bigint comment 'its last byte, in ns since 1970-01-01 UTC',
  `response_start_ns` bigint comment 'the answer\'s first byte, in ns since 1970-01-01 UTC',
  `response_end_ns` bigint comment 'its last byte, in ns since 1970-01-01 UTC',
  `latency_ns` bigint comment 'from the request\'s last byte to the answer\'s first, in ns',
  `queue_ns` bigint comment 'waiting behind earlier requests of the connection; a part of total_ns, in ns',
  `muted_ns` bigint comment 'waiting while an earlier throttle muted the connection (KIP-219); a part of total_ns, in ns',
  `replica_id` int comment 'id of the broker that fetches or lists offsets; null: a client, or bodies were not read',
  `total_ns` bigint comment 'from the request\'s first byte to the answer\'s last; the sum of its parts, in ns',
  `client_address` string comment 'the client\'s IP address',
  `client_port` int comment 'the client\'s port',
  `broker_address` string comment 'the broker\'s IP address',
  `broker_port` int comment 'the broker\'s port',
  `broker_id` int comment 'the broker that advertises this address; null: no answer names it',
  `api_key` smallint comment 'the API\'s number',
  `api` string comment 'the request\'s API',
  `api_version` smallint comment 'version of the request',
  `correlation_id` int comment 'as the request has it',
  `client_id` string comment 'the client.id in its requests',
  `request_bytes` bigint comment 'size of the request, including the 4 bytes of its length, in bytes',
  `response_bytes` bigint comment 'size of the answer, including the 4 bytes of its length, in bytes',
  `outcome` string not null comment 'answered; answered_by_proxy: kproxy answered, no broker got it; no_answer_expected: acks=0; unanswered: the connection ended first; request_not_seen: only the answer was seen; lost: the answer is in a gap of the capture, or a later request of the connection was answered, since brokers answer in order',
  `error_code` smallint comment 'the answer\'s top-level code, else the first error inside; 0: none; null: no top-level code, and no error inside',
  `error` string comment 'the name of error_code: NONE for 0',
  `errors` int comment 'how many errors the answer has at all levels',
  `throttle_ms` int comment 'as the broker reported, in ms',
  `in_flight` int comment 'requests already in flight on the connection when this one arrived',
  `acks` smallint comment 'of a Produce',
  `max_wait_ms` int comment 'of a Fetch, in ms',
  `topics` int comment 'how many topics a Produce names, or the answer to a Fetch has',
  `partitions` int comment 'how many partitions a Produce names, or the answer to a Fetch has',
  `records` bigint comment 'how many records a Produce or Fetch carries',
  `group_id` string comment 'the group that the request names',
  `transactional_id` string comment 'the transactional id that the request names',
  `decoded` string comment 'full, header: its body was not read, failed: it cannot be, opaque: not Kafka\'s',
  `retransmissions` int comment 'retransmitted TCP segments of it; null where TCP is not seen',
  `sending_ns` bigint comment 'time until the request was sent, without the other parts; a part of total_ns, in ns',
  `broker_ns` bigint comment 'time until the answer began, without the other parts; a part of total_ns, in ns',
  `receiving_ns` bigint comment 'time until the answer ended, without the other parts; a part of total_ns, in ns',
  `loss_ns` bigint comment 'waiting for lost segments; a part of total_ns; null where TCP is not seen, in ns',
  `closed_window_ns` bigint comment 'waiting for a receiver whose window was closed; a part of total_ns; null where TCP is not seen, in ns',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table partitions (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `connection` bigint not null comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `time` timestamp not null comment 'first byte of its request, or of the answer if only that was seen',
  `api` string comment 'the request\'s API',
  `direction` string not null comment 'request or response',
  `topic` string comment 'the topic\'s name; filled in if any answer in the capture gives the name for its id',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partition` int comment 'the partition\'s number',
  `bytes` bigint comment 'size of the records produced or fetched, in bytes',
  `batches` int comment 'how many record batches',
  `records` bigint comment 'how many records',
  `codec` string comment 'compression: none, gzip, snappy, lz4, zstd',
  `magic` smallint comment 'format: 0 or 1: message set, 2: record batch',
  `error_code` smallint comment 'of this partition; 0: none; null: the answer has none for it, or there is no answer',
  `error` string comment 'the name of error_code: NONE for 0',
  `offset` bigint comment 'the message\'s offset: to fetch from, first one produced, listed, or committed',
  `high_watermark` bigint comment 'as the answer has it',
  `last_stable_offset` bigint comment 'as the answer has it',
  `log_start_offset` bigint comment 'as the message has it',
  `leader_epoch` int comment 'as the message has it',
  `lag_records` bigint comment 'of a Fetch: records between it and the high watermark',
  `lag_ns` bigint comment 'of a Fetch: the age of the newest record that it brought, in ns',
  `metadata` string comment 'of a committed offset: text that the consumer committed with it',
  `group_id` string comment 'of a committed offset: its group, at most 500 characters',
  `end_offset` bigint comment 'end of the log, if the answer is its leader\'s and reports it; else null',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table batches (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `connection` bigint not null comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `time` timestamp not null comment 'first byte of its request, or of the answer if only that was seen',
  `api` string comment 'the request\'s API',
  `direction` string not null comment 'request or response',
  `topic` string comment 'the topic\'s name; filled in if any answer in the capture gives the name for its id',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partition` int comment 'the partition\'s number',
  `base_offset` bigint comment 'the batch\'s first offset',
  `last_offset` bigint comment 'the batch\'s last offset',
  `records` bigint comment 'how many records',
  `bytes` bigint comment 'its size, in bytes',
  `codec` string comment 'compression: none, gzip, snappy, lz4, zstd',
  `magic` smallint comment 'format: 0 or 1: message set, 2: record batch',
  `timestamp_type` string comment 'CreateTime, LogAppendTime',
  `base_timestamp` bigint comment 'timestamp of its first record, in ms since 1970-01-01 UTC',
  `max_timestamp` bigint comment 'timestamp of its newest record, in ms since 1970-01-01 UTC',
  `producer_id` bigint comment 'id of the idempotent or transactional producer',
  `producer_epoch` smallint comment 'epoch of that producer',
  `base_sequence` int comment 'sequence number of the first record; idempotent producers only',
  `transactional` boolean comment 'whether it belongs to a transaction',
  `control` boolean comment 'whether it holds transaction markers',
  `crc_valid` boolean comment 'whether its checksum is right; null: not checked (--checksums), or the batch is incomplete',
  `partial` boolean comment 'whether the answer ends inside it',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table connections (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `connection` bigint not null comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `time` timestamp not null comment 'its first packet',
  `start_ns` bigint comment 'its first packet, in ns since 1970-01-01 UTC',
  `end_ns` bigint comment 'its last packet, in ns since 1970-01-01 UTC',
  `client_address` string comment 'the client\'s IP address',
  `client_port` int comment 'the client\'s port',
  `broker_address` string comment 'the broker\'s IP address',
  `broker_port` int comment 'the broker\'s port',
  `broker_id` int comment 'the broker that advertises this address; null: no answer names it',
  `requests` bigint comment 'how many the client sent',
  `answers` bigint comment 'how many the broker sent',
  `client_bytes` bigint comment 'bytes that the client sent, in bytes',
  `broker_bytes` bigint comment 'bytes that the broker sent, in bytes',
  `software_name` string comment 'of the client (KIP-511)',
  `software_version` string comment 'of the client (KIP-511)',
  `sasl_mechanism` string comment 'SASL mechanism of the client\'s login',
  `sasl_tokens` bigint comment 'raw SASL tokens, which are no requests',
  `tls` string comment 'plain; tls; tls_decrypted: read with its keys, or kproxy ends the client\'s TLS',
  `start_seen` boolean comment 'whether its beginning was seen',
  `end_seen` boolean comment 'whether its end was seen',
  `close` string comment 'how it ended: fin, reset, idle, reused, open; or how its connect failed: refused, unanswered, closed_at_once: by the server, before a byte of either side; as ICMP reports: port_unreachable, host_unreachable, net_unreachable, prohibited',
  `handshake_rtt_ns` bigint comment 'the round trip of the TCP handshake, in ns',
  `retransmissions` bigint comment 'retransmitted TCP segments',
  `out_of_order` bigint comment 'TCP segments that came late',
  `zero_windows` bigint comment 'how often a reader\'s window closed',
  `gaps` bigint comment 'gaps of the capture in it',
  `gap_bytes` bigint comment 'bytes missing in these gaps, in bytes',
  `resyncs` bigint comment 'how often decoding resumed after a gap',
  `faults` bigint comment 'how often bytes were not Kafka\'s protocol',
  `late_answers` bigint comment 'answers that were retransmitted before the client acknowledged them',
  `late_answer_ns` bigint comment 'how long the latest of them stayed unacknowledged, in ns',
  `late_answer_since_ns` bigint comment 'since when the latest of them was unacknowledged, in ns since 1970-01-01 UTC',
  `late_answer_times` bigint comment 'how often the latest of them was retransmitted',
  `tls_failure` string comment 'why the TLS handshake failed: the alert and its sender, as `unknown_ca by client`; unanswered; answered in clear; TLS expected: the client sent no TLS, and got an alert',
  `path_mtu` bigint comment 'the smallest MTU, in bytes, that a router named when it dropped a packet of the connection as too large (ICMP); null: none did',
  `closed_by` string comment 'which side ended it first, by a FIN or RST: client, broker; neither: kproxy ended it; null: no end was seen, or the first may be missing from the capture',
  `closed_ns` bigint comment 'when that was: the first FIN or RST; null where closed_by is null, in ns',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table quality (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `kind` string not null comment 'the kind of flaw, or of fact, that is counted',
  `count` bigint comment 'how many',
  `bytes` bigint comment 'how many bytes, in bytes',
  `first_ns` bigint comment 'the first one, in ns since 1970-01-01 UTC',
  `last_ns` bigint comment 'the last one, in ns since 1970-01-01 UTC',
  `sentence` string not null comment 'what it means'
)
using parquet;

create table group_events (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when it began, to the microsecond',
  `time_ns` bigint comment 'when the message that reports it was complete, in ns since 1970-01-01 UTC',
  `group_id` string comment 'the group\'s name',
  `protocol` string comment 'classic, consumer (KIP-848), share (KIP-932), streams (KIP-1071); unknown: no member was seen yet',
  `event` string not null comment 'coordinator_found, coordinator_not_found, coordinator_moved; join, join_answered, sync, sync_answered; assigned, revoked (what is new, in reason), tasks_assigned (of Streams; what Connect adds), assignment_differs; heartbeat_failed, commit_failed, offset_fetch_failed; offsets_committed, offsets_aborted (in a transaction that ended); leave, member_replaced; described, deleted; of the coordinator\'s log, where somebody fetches __consumer_offsets: stored, removed (a group or a member, at the coordinator\'s time); inferred: expired (at its time or before), never_joined',
  `member_id` string comment 'the member\'s id',
  `group_instance_id` string comment 'of a static member',
  `client_id` string comment 'the member\'s',
  `client_address` string comment 'the member\'s',
  `generation` int comment 'generation of the classic protocol; epoch of the newer ones',
  `coordinator_id` int comment 'the broker that was asked',
  `error` string comment 'the answer\'s; null: none',
  `reason` string comment 'reason given by the member or the coordinator; for join_answered, data that a Connect worker (its URL, its config offset) or a Streams member (process, endpoint, tasks whose state it has) sent',
  `connection` bigint comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `group_type` string comment 'type of its members: consumer, connect, streams, share, or a name of their own; null: not seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table rebalances (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when its cause occurred',
  `group_id` string comment 'the group\'s name',
  `protocol` string comment 'classic, consumer (KIP-848), share (KIP-932), streams (KIP-1071); unknown: no member was seen yet',
  `strategy` string comment 'the assignor that its members agreed on',
  `generation` int comment 'generation of the classic protocol; epoch of the newer ones',
  `cause` string comment 'member_joined, member_left, session_expired, subscription_changed, metadata_changed, leader_rejoined, coordinator_moved, member_replaced, unknown',
  `cause_member` string comment 'the member that caused it',
  `reason` string comment 'why, in words',
  `started_ns` bigint comment 'when its cause occurred, in ns since 1970-01-01 UTC',
  `joined_ns` bigint comment 'when all had joined, in ns since 1970-01-01 UTC',
  `ended_ns` bigint comment 'when the last member got its assignment; null: not all did, in ns since 1970-01-01 UTC',
  `members_before` int comment 'how many members the group had',
  `members_after` int comment 'how many it has then',
  `rejoined` int comment 'members that had to join again',
  `last_to_join` string comment 'the member that joined last, if somebody did',
  `coordinator_id` int comment 'the broker that was asked',
  `waited_ns` bigint comment 'how long all others waited for it, in ns',
  `group_type` string comment 'type of its members: consumer, connect, streams, share, or a name of their own; null: not seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table assignments (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when the assignment was sent',
  `time_ns` bigint comment 'when the message that reports it was complete, in ns since 1970-01-01 UTC',
  `group_id` string comment 'the group\'s name',
  `generation` int comment 'generation of the classic protocol; epoch of the newer ones',
  `member_id` string comment 'the member that got it',
  `client_id` string comment 'the member\'s',
  `topic` string comment 'the topic; for Connect the connector, for streams groups (KIP-1071) the subtopology',
  `partition` int comment 'the partition; for Connect (-1: the connector itself) and streams groups the task\'s number',
  `strategy` string comment 'the assignor that its members agreed on',
  `agrees` boolean comment 'whether it equals what the strategy computes (range, round robin), or holds what it must (sticky: each partition once, at a subscriber); null: neither can be checked',
  `group_type` string comment 'type of its members: consumer, connect, streams, share, or a name of their own; null: not seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table leadership (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when the message that reports it was complete, to the microsecond',
  `time_ns` bigint comment 'when the message that reports it was complete, in ns since 1970-01-01 UTC',
  `api` string comment 'the message that reports it: LeaderAndIsr, StopReplica, UpdateMetadata, AlterPartition, Metadata',
  `controller_id` int comment 'the controller that decided, where the message has it',
  `controller_epoch` int comment 'its epoch',
  `topic` string comment 'the topic\'s name; filled in if any answer in the capture gives the name for its id',
  `partition` int comment 'the partition\'s number',
  `leader` int comment 'the leader\'s broker id; null: there is none',
  `leader_epoch` int comment 'as the message has it',
  `isr` array<int> comment 'broker ids of the replicas in sync',
  `replicas` array<int> comment 'broker ids of all replicas',
  `change` string comment 'created, elected, isr_shrunk (a replica left the ISR), isr_grown, offline, moved, deleted',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table topology (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when the message that reports it was complete, to the microsecond',
  `time_ns` bigint comment 'when the message that reports it was complete, in ns since 1970-01-01 UTC',
  `kind` string not null comment 'broker, controller, topic, partition',
  `broker_id` int comment 'id of a broker or a controller',
  `host` string comment 'a broker\'s host',
  `port` int comment 'a broker\'s port',
  `rack` string comment 'a broker\'s rack',
  `topic` string comment 'the topic\'s name; filled in if any answer in the capture gives the name for its id',
  `partition` int comment 'the partition\'s number',
  `leader` int comment 'the leader\'s broker id; null: there is none',
  `isr` array<int> comment 'broker ids of the replicas in sync',
  `replicas` array<int> comment 'broker ids of all replicas',
  `change` string comment 'appeared, changed, gone; for brokers also listener (the address of another listener of it, where changed is another address of the same one), registered, fenced, unfenced, shutting_down; for controllers active; for topics grown, recreated, and unknown, invalid_name, unauthorized: refused to a client that asked (its exchange has this time_ns as response_start_ns), once for each client id; for partitions as in leadership',
  `api` string comment 'the message that reports it',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partitions` int comment 'how many partitions a topic has',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table changes (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when it was requested or answered, to the microsecond',
  `time_ns` bigint comment 'when the message that reports it was complete, in ns since 1970-01-01 UTC',
  `api` string comment 'the requested API',
  `resource_type` string comment 'type of the resource: topic, group, user, broker, ...',
  `resource_name` string comment 'name of the resource',
  `client_id` string comment 'the requesting client\'s id',
  `client_address` string comment 'its IP address',
  `principal` string comment 'its principal, as far as the traffic shows it',
  `error` string comment 'the answer\'s; null: it was done, if it was answered',
  `detail` string comment 'JSON: the request, and the data that the answer adds; no secrets',
  `connection` bigint comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `answered` boolean comment 'whether an answer was seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table registry (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when the operation was complete, to the microsecond',
  `time_ns` bigint comment 'when the message that reports it was complete, in ns since 1970-01-01 UTC',
  `session` string comment 'session id in hexadecimal, as in ZooKeeper\'s log; null: its beginning was not seen',
  `client_address` string comment 'the client\'s IP address',
  `client_port` int comment 'the client\'s port',
  `xid` int comment 'the client\'s number of the request',
  `op` string comment 'ZooKeeper\'s own name of the operation; notification: a watch fired',
  `path` string comment 'path of the node',
  `version` int comment 'version of the node',
  `zxid` bigint comment 'ZooKeeper\'s number of the change',
  `ephemeral` boolean comment 'whether the node is deleted with its session',
  `error` string comment 'ZooKeeper\'s name of it; null: none',
  `latency_ns` bigint comment 'from the request to its answer, in ns',
  `value` string comment 'the value written or read',
  `kind` string not null comment 'role of the node in Kafka',
  `watch` boolean comment 'whether a read set a watch',
  `server_address` string comment 'the server\'s IP address',
  `server_port` int comment 'the server\'s port',
  `connection` bigint comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the operation\'s place on its connection',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table committed_offsets (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'the coordinator\'s time of the record',
  `time_ns` bigint comment 'the coordinator\'s time of the record, in ns since 1970-01-01 UTC',
  `group_id` string comment 'the group\'s name',
  `topic` string comment 'the topic\'s name; filled in if any answer in the capture gives the name for its id',
  `partition` int comment 'the partition\'s number',
  `offset` bigint comment 'the committed offset; null: there is none any more',
  `leader_epoch` int comment 'as the message has it',
  `metadata` string comment 'text that the consumer committed with the offset',
  `change` string comment 'committed; pending: in a transaction; aborted: with it; removed: it expired, or it or its group was deleted. A transaction\'s end shows only where the log was read without a gap, offsets to marker',
  `producer_id` bigint comment 'of the transaction',
  `expires_ns` bigint comment 'when it expires, as brokers before 2.1 wrote it, in ns since 1970-01-01 UTC',
  `log_partition` int comment 'partition of the coordinators\' log that holds the record',
  `log_offset` bigint comment 'the record\'s offset in that partition',
  `connection` bigint comment 'the first connection that showed the record',
  `number` bigint comment 'the first exchange that showed it',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table transactions (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'the coordinator\'s time of the record; for an answer, when it arrived',
  `time_ns` bigint comment 'the same, in ns since 1970-01-01 UTC',
  `transactional_id` string comment 'the producer\'s transactional.id',
  `state` string comment 'as Kafka\'s tools call it: Empty, Ongoing, PrepareCommit, CompleteCommit, PrepareAbort, CompleteAbort, Dead (it is gone)',
  `producer_id` bigint comment 'id of the idempotent or transactional producer',
  `producer_epoch` int comment 'epoch of that producer',
  `timeout_ms` int comment 'transaction.timeout.ms of the producer: the coordinator aborts what is open for longer, in ms',
  `started_ns` bigint comment 'when the transaction began, in ns since 1970-01-01 UTC',
  `partitions` string comment 'those that it writes to: "orders-0, orders-1"',
  `partition_count` int comment 'how many these are',
  `coordinator_id` int comment 'the broker that was asked',
  `log_partition` int comment 'partition of __transaction_state; null: an InitProducerId or DescribeTransactions answer',
  `log_offset` bigint comment 'the record\'s offset in that partition',
  `connection` bigint comment 'the first connection that showed the record',
  `number` bigint comment 'the first exchange that showed it',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table records (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `connection` bigint not null comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `time` timestamp not null comment 'first byte of its request, or of the answer if only that was seen',
  `api` string comment 'the request\'s API',
  `direction` string not null comment 'request or response',
  `topic` string comment 'the topic\'s name; filled in if any answer in the capture gives the name for its id',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partition` int comment 'the partition\'s number',
  `base_offset` bigint comment 'the batch\'s first offset',
  `offset` bigint comment 'the record\'s',
  `timestamp` bigint comment 'the record\'s, in ms since 1970-01-01 UTC',
  `bytes` bigint comment 'size of key, value and headers, before anything was cut, in bytes',
  `key_bytes` bigint comment 'the key\'s size, before it was cut, in bytes',
  `key` binary comment 'the key, cut or hashed by --record-values',
  `value_bytes` bigint comment 'the value\'s size, before it was cut, in bytes',
  `value` binary comment 'the value, cut or hashed by --record-values',
  `headers` array<struct<key: string, value: binary>> comment 'the headers, cut or hashed by --record-values',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);
