-- made by tools/make_reference.py
-- The tables as `kproxy spark ingest` lays them out, for a catalogue that wants them before there are data. Add
-- `location 'FOLDER/TABLE'`, and after each ingest `msck repair table TABLE`; or say `using delta` or `using iceberg`.

create table exchanges (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `connection` bigint not null comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `time` timestamp not null comment 'the first byte of the request; of the answer, if only that was seen',
  `request_start_ns` bigint comment 'the request\'s first byte, in ns since 1970-01-01 UTC',
  `request_end_ns` bigint comment 'its last byte, in ns since 1970-01-01 UTC',
  `response_start_ns` bigint comment 'the answer\'s first byte, in ns since 1970-01-01 UTC',
  `response_end_ns` bigint comment 'its last byte, in ns since 1970-01-01 UTC',
  `latency_ns` bigint comment 'from the request\'s last byte to the answer\'s first, in ns',
  `queue_ns` bigint comment 'behind earlier requests of the connection; a part of total_ns, in ns',
  `muted_ns` bigint comment 'while an earlier throttle muted the connection (KIP-219); a part of total_ns, in ns',
  `replica_id` int comment 'of the broker that fetches or lists offsets; null: a client, or bodies were not read',
  `total_ns` bigint comment 'from the request\'s first byte to the answer\'s last; the sum of its parts, in ns',
  `client_address` string comment 'the client\'s IP address',
  `client_port` int comment 'the client\'s port',
  `broker_address` string comment 'the broker\'s IP address',
  `broker_port` int comment 'the broker\'s port',
  `broker_id` int comment 'the broker that advertises this address; null: no answer names it',
  `api_key` smallint comment 'the API\'s number',
  `api` string comment 'the request\'s API',
  `api_version` smallint comment 'the version that the request has',
  `correlation_id` int comment 'as the request has it',
  `client_id` string comment 'as the client calls itself in its requests',
  `request_bytes` bigint comment 'with the 4 bytes of the size, in bytes',
  `response_bytes` bigint comment 'with the 4 bytes of the size, in bytes',
  `outcome` string not null comment 'answered; answered_by_proxy: by kproxy, no broker saw it; no_answer_expected: acks=0; unanswered: the connection ended first; request_not_seen: only the answer was; lost: in a hole of the capture',
  `error_code` smallint comment 'the answer\'s at its top level, else the first error in it; 0: none; null: it has no such level, and no error in it',
  `error` string comment 'the name of error_code: NONE for 0',
  `errors` int comment 'how many errors the answer has at all levels',
  `throttle_ms` int comment 'as the broker reported, in ms',
  `in_flight` int comment 'requests of the connection that waited already when this one came',
  `acks` smallint comment 'of a Produce',
  `max_wait_ms` int comment 'of a Fetch, in ms',
  `topics` int comment 'how many topics a Produce or Fetch names',
  `partitions` int comment 'how many partitions a Produce or Fetch names',
  `records` bigint comment 'how many records a Produce or Fetch carries',
  `group_id` string comment 'the group that the request names',
  `transactional_id` string comment 'that the request names',
  `decoded` string comment 'full, header: its body was not read, failed: it cannot be, opaque: not Kafka\'s',
  `retransmissions` int comment 'TCP segments of it that were sent again; null where TCP is not seen',
  `sending_ns` bigint comment 'until the request was sent, without what other parts explain; a part of total_ns, in ns',
  `broker_ns` bigint comment 'until the answer began, without what other parts explain; a part of total_ns, in ns',
  `receiving_ns` bigint comment 'until the answer ended, without what other parts explain; a part of total_ns, in ns',
  `loss_ns` bigint comment 'waiting for segments that were lost; a part of total_ns; null where TCP is not seen, in ns',
  `closed_window_ns` bigint comment 'waiting for a reader whose window was closed; a part of total_ns; null where TCP is not seen, in ns',
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
  `time` timestamp not null comment 'the first byte of its request; of the answer, if only that was seen',
  `api` string comment 'the request\'s API',
  `direction` string not null comment 'request or response',
  `topic` string comment 'the topic\'s name; filled in where any answer of the capture tells that of its id',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partition` int comment 'the partition\'s number',
  `bytes` bigint comment 'of what is produced or fetched, in bytes',
  `batches` int comment 'how many record batches',
  `records` bigint comment 'how many records',
  `codec` string comment 'compression: none, gzip, snappy, lz4, zstd',
  `magic` smallint comment 'format: 0 or 1: message set, 2: record batch',
  `error_code` smallint comment 'of this partition; 0: none; null: the answer has none for it, or there is no answer',
  `error` string comment 'the name of error_code: NONE for 0',
  `offset` bigint comment 'as the message has it: to fetch from, first produced, asked for or committed',
  `high_watermark` bigint comment 'as the answer has it',
  `last_stable_offset` bigint comment 'as the answer has it',
  `log_start_offset` bigint comment 'as the message has it',
  `leader_epoch` int comment 'as the message has it',
  `lag_records` bigint comment 'of a Fetch: records between it and the high watermark',
  `lag_ns` bigint comment 'of a Fetch: the age of the newest record that it brought, in ns',
  `metadata` string comment 'of a committed offset: what its consumer keeps beside it',
  `group_id` string comment 'of a committed offset: its group, at most 500 characters',
  `end_offset` bigint comment 'where the log ends, as an answer of its leader tells; null: it does not',
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
  `time` timestamp not null comment 'the first byte of its request; of the answer, if only that was seen',
  `api` string comment 'the request\'s API',
  `direction` string not null comment 'request or response',
  `topic` string comment 'the topic\'s name; filled in where any answer of the capture tells that of its id',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partition` int comment 'the partition\'s number',
  `base_offset` bigint comment 'the batch\'s first offset',
  `last_offset` bigint comment 'the batch\'s last offset',
  `records` bigint comment 'how many records',
  `bytes` bigint comment 'its size, in bytes',
  `codec` string comment 'compression: none, gzip, snappy, lz4, zstd',
  `magic` smallint comment 'format: 0 or 1: message set, 2: record batch',
  `timestamp_type` string comment 'CreateTime, LogAppendTime',
  `base_timestamp` bigint comment 'of its first record, in ms since 1970-01-01 UTC',
  `max_timestamp` bigint comment 'of its newest record, in ms since 1970-01-01 UTC',
  `producer_id` bigint comment 'of an idempotent or transactional producer',
  `producer_epoch` smallint comment 'of that producer',
  `base_sequence` int comment 'of an idempotent producer: that of the first record',
  `transactional` boolean comment 'whether it is of a transaction',
  `control` boolean comment 'whether it holds markers of transactions',
  `crc_valid` boolean comment 'whether its checksum fits; null: not checked (--checksums), or it is not all there',
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
  `client_bytes` bigint comment 'that the client sent, in bytes',
  `broker_bytes` bigint comment 'that the broker sent, in bytes',
  `software_name` string comment 'of the client (KIP-511)',
  `software_version` string comment 'of the client (KIP-511)',
  `sasl_mechanism` string comment 'by which the client logged in',
  `sasl_tokens` bigint comment 'raw tokens, which are no requests',
  `tls` string comment 'plain; tls; tls_decrypted: read with its keys, or kproxy ends the client\'s TLS',
  `start_seen` boolean comment 'whether its begin was seen',
  `end_seen` boolean comment 'whether its end was seen',
  `close` string comment 'how it ended: fin, reset, idle, reused, open; or how its connect failed: refused, unanswered',
  `handshake_rtt_ns` bigint comment 'the round trip of the TCP handshake, in ns',
  `retransmissions` bigint comment 'TCP segments that were sent again',
  `out_of_order` bigint comment 'TCP segments that came late',
  `zero_windows` bigint comment 'how often a reader\'s window closed',
  `gaps` bigint comment 'holes of the capture in it',
  `gap_bytes` bigint comment 'bytes that are missing there, in bytes',
  `resyncs` bigint comment 'how often reading began anew behind a hole',
  `faults` bigint comment 'how often bytes were not Kafka\'s protocol',
  `late_answers` bigint comment 'answers that were sent again before the client acknowledged them',
  `late_answer_ns` bigint comment 'for how long the latest of them went unacknowledged, in ns',
  `late_answer_since_ns` bigint comment 'since when the latest of them did, in ns since 1970-01-01 UTC',
  `late_answer_times` bigint comment 'how often the latest of them was sent again',
  `tls_failure` string comment 'why no TLS connection came about: the alert and its sender, as `unknown_ca by client`; unanswered; answered in clear; TLS expected: the client spoke none, and was answered by an alert',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table quality (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `kind` string not null comment 'the kind of flaw, or of what was counted',
  `count` bigint comment 'how many',
  `bytes` bigint comment 'of what was counted, in bytes',
  `first_ns` bigint comment 'the first one, in ns since 1970-01-01 UTC',
  `last_ns` bigint comment 'the last one, in ns since 1970-01-01 UTC',
  `sentence` string not null comment 'what it means'
)
using parquet;

create table group_events (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when it began, to the microsecond',
  `time_ns` bigint comment 'when the message that says so was complete, in ns since 1970-01-01 UTC',
  `group_id` string comment 'the group\'s name',
  `protocol` string comment 'classic, consumer (KIP-848), share (KIP-932), streams (KIP-1071); unknown: no member was seen yet',
  `event` string not null comment 'coordinator_found, coordinator_not_found, coordinator_moved; join, join_answered, sync, sync_answered; assigned, revoked (what is new, in reason), tasks_assigned (of Streams; what Connect adds), assignment_differs; heartbeat_failed, commit_failed, offset_fetch_failed; offsets_committed, offsets_aborted (in a transaction that ended); leave, member_replaced; described, deleted; of the coordinator\'s log, where somebody fetches __consumer_offsets: stored, removed (a group or a member, at the coordinator\'s time); inferred: expired (no later than its time), never_joined',
  `member_id` string comment 'whose it is',
  `group_instance_id` string comment 'of a static member',
  `client_id` string comment 'the member\'s',
  `client_address` string comment 'the member\'s',
  `generation` int comment 'of the classic protocol; the epoch, for the newer ones',
  `coordinator_id` int comment 'the broker that was asked',
  `error` string comment 'the answer\'s; null: none',
  `reason` string comment 'what the member or the coordinator says; of a join_answered what a worker of Connect (its URL, its config offset) or a member of Streams (process, endpoint, tasks whose state it has) says of itself',
  `connection` bigint comment 'the connection\'s id, by both ends and its first moment: the same whatever the capture is called',
  `number` bigint comment 'the request\'s place on its connection, from 0; null: only its answer was seen',
  `group_type` string comment 'what its members are: consumer, connect, streams, share, or as they call themselves; null: not seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table rebalances (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when it was set off',
  `group_id` string comment 'the group\'s name',
  `protocol` string comment 'classic, consumer (KIP-848), share (KIP-932), streams (KIP-1071); unknown: no member was seen yet',
  `strategy` string comment 'the assignor that its members agreed on',
  `generation` int comment 'of the classic protocol; the epoch, for the newer ones',
  `cause` string comment 'member_joined, member_left, session_expired, subscription_changed, metadata_changed, leader_rejoined, coordinator_moved, member_replaced, unknown',
  `cause_member` string comment 'who set it off',
  `reason` string comment 'why, in words',
  `started_ns` bigint comment 'when it was set off, in ns since 1970-01-01 UTC',
  `joined_ns` bigint comment 'when all had joined, in ns since 1970-01-01 UTC',
  `ended_ns` bigint comment 'when the last member was assigned; null: not all were, in ns since 1970-01-01 UTC',
  `members_before` int comment 'how many members the group had',
  `members_after` int comment 'how many it has then',
  `rejoined` int comment 'members that had to join again',
  `last_to_join` string comment 'the member that joined last, if somebody did',
  `coordinator_id` int comment 'the broker that was asked',
  `waited_ns` bigint comment 'how long all others waited for it, in ns',
  `group_type` string comment 'what its members are: consumer, connect, streams, share, or as they call themselves; null: not seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table assignments (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when the assignment was sent',
  `time_ns` bigint comment 'when the message that says so was complete, in ns since 1970-01-01 UTC',
  `group_id` string comment 'the group\'s name',
  `generation` int comment 'of the classic protocol; the epoch, for the newer ones',
  `member_id` string comment 'who was given it',
  `client_id` string comment 'the member\'s',
  `topic` string comment 'the topic; of Connect the connector, of streams groups (KIP-1071) the subtopology',
  `partition` int comment 'the partition; the task\'s number of Connect (-1: the connector itself) and of streams groups',
  `strategy` string comment 'the assignor that its members agreed on',
  `agrees` boolean comment 'whether it equals what the strategy computes (range, round robin), or holds what it must (sticky: each partition once, at a subscriber); null: neither can be said',
  `group_type` string comment 'what its members are: consumer, connect, streams, share, or as they call themselves; null: not seen',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table leadership (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'when the message that says so was complete, to the microsecond',
  `time_ns` bigint comment 'when the message that says so was complete, in ns since 1970-01-01 UTC',
  `api` string comment 'which message says so: LeaderAndIsr, StopReplica, UpdateMetadata, AlterPartition, Metadata',
  `controller_id` int comment 'who decided, where the message has it',
  `controller_epoch` int comment 'its epoch',
  `topic` string comment 'the topic\'s name; filled in where any answer of the capture tells that of its id',
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
  `time` timestamp not null comment 'when the message that says so was complete, to the microsecond',
  `time_ns` bigint comment 'when the message that says so was complete, in ns since 1970-01-01 UTC',
  `kind` string not null comment 'broker, controller, topic, partition',
  `broker_id` int comment 'of a broker or a controller',
  `host` string comment 'of a broker',
  `port` int comment 'of a broker',
  `rack` string comment 'of a broker',
  `topic` string comment 'the topic\'s name; filled in where any answer of the capture tells that of its id',
  `partition` int comment 'the partition\'s number',
  `leader` int comment 'the leader\'s broker id; null: there is none',
  `isr` array<int> comment 'broker ids of the replicas in sync',
  `replicas` array<int> comment 'broker ids of all replicas',
  `change` string comment 'appeared, changed, gone; of brokers also listener (the address of another listener of it, where changed is another address of the same one), registered, fenced, unfenced, shutting_down; of controllers active; of topics grown, recreated, and unknown, invalid_name, unauthorized: refused to a client that asked (its exchange has this time_ns as response_start_ns), once for each client id; of partitions as in leadership',
  `api` string comment 'which message says so',
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
  `time` timestamp not null comment 'when it was asked or answered, to the microsecond',
  `time_ns` bigint comment 'when the message that says so was complete, in ns since 1970-01-01 UTC',
  `api` string comment 'what was asked',
  `resource_type` string comment 'of what: topic, group, user, broker, ...',
  `resource_name` string comment 'of which',
  `client_id` string comment 'who asked',
  `client_address` string comment 'who asked',
  `principal` string comment 'who asked, as far as the wire says',
  `error` string comment 'the answer\'s; null: it was done, if it was answered',
  `detail` string comment 'JSON: what was asked, and what the answer adds; no secrets',
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
  `time` timestamp not null comment 'when it was complete, to the microsecond',
  `time_ns` bigint comment 'when the message that says so was complete, in ns since 1970-01-01 UTC',
  `session` string comment 'in hexadecimal, as ZooKeeper\'s log writes it; null: its begin was not seen',
  `client_address` string comment 'the client\'s IP address',
  `client_port` int comment 'the client\'s port',
  `xid` int comment 'the client\'s number of the request',
  `op` string comment 'ZooKeeper\'s own name of the operation; notification: a watch fired',
  `path` string comment 'of the node',
  `version` int comment 'of the node',
  `zxid` bigint comment 'ZooKeeper\'s number of the change',
  `ephemeral` boolean comment 'whether the node goes with its session',
  `error` string comment 'ZooKeeper\'s name of it; null: none',
  `latency_ns` bigint comment 'from the request to its answer, in ns',
  `value` string comment 'what was written or read',
  `kind` string not null comment 'what the node is to Kafka',
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
  `topic` string comment 'the topic\'s name; filled in where any answer of the capture tells that of its id',
  `partition` int comment 'the partition\'s number',
  `offset` bigint comment 'what was committed; null: there is none any more',
  `leader_epoch` int comment 'as the message has it',
  `metadata` string comment 'what its consumer keeps beside the offset',
  `change` string comment 'committed; pending: in a transaction; aborted: with it; removed: expired, deleted, or the group is. How a transaction ended is known where the log was read from its offsets to its marker, without a gap',
  `producer_id` bigint comment 'of the transaction',
  `expires_ns` bigint comment 'as brokers before 2.1 wrote it, in ns since 1970-01-01 UTC',
  `log_partition` int comment 'the partition of the coordinators\' log that has the record',
  `log_offset` bigint comment 'the record\'s offset in it',
  `connection` bigint comment 'the first that showed the record',
  `number` bigint comment 'the first exchange that showed it',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);

create table transactions (
  `source` string not null comment 'the capture\'s name, or live:<listener>',
  `cluster` string not null comment 'the name that was given, or the cluster\'s id where captures show several',
  `time` timestamp not null comment 'the coordinator\'s time of the record; of an answer, when it came',
  `time_ns` bigint comment 'the same, in ns since 1970-01-01 UTC',
  `transactional_id` string comment 'as its producer has it',
  `state` string comment 'as Kafka\'s tools call it: Empty, Ongoing, PrepareCommit, CompleteCommit, PrepareAbort, CompleteAbort, Dead (it is gone)',
  `producer_id` bigint comment 'of an idempotent or transactional producer',
  `producer_epoch` int comment 'of that producer',
  `timeout_ms` int comment 'transaction.timeout.ms of the producer: the coordinator aborts what is open for longer, in ms',
  `started_ns` bigint comment 'when the transaction began, in ns since 1970-01-01 UTC',
  `partitions` string comment 'those that it writes to: "orders-0, orders-1"',
  `partition_count` int comment 'how many these are',
  `coordinator_id` int comment 'the broker that was asked',
  `log_partition` int comment 'of __transaction_state; null: an answer to InitProducerId or DescribeTransactions says so',
  `log_offset` bigint comment 'the record\'s offset in it',
  `connection` bigint comment 'the first that showed the record',
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
  `time` timestamp not null comment 'the first byte of its request; of the answer, if only that was seen',
  `api` string comment 'the request\'s API',
  `direction` string not null comment 'request or response',
  `topic` string comment 'the topic\'s name; filled in where any answer of the capture tells that of its id',
  `topic_id` string comment 'the topic\'s id, from Kafka 2.8 on',
  `partition` int comment 'the partition\'s number',
  `base_offset` bigint comment 'the batch\'s first offset',
  `offset` bigint comment 'the record\'s',
  `timestamp` bigint comment 'the record\'s, in ms since 1970-01-01 UTC',
  `bytes` bigint comment 'of key, value and headers, before anything was cut, in bytes',
  `key_bytes` bigint comment 'the key\'s size, before it was cut, in bytes',
  `key` binary comment 'cut or hashed, as --record-values says',
  `value_bytes` bigint comment 'the value\'s size, before it was cut, in bytes',
  `value` binary comment 'cut or hashed, as --record-values says',
  `headers` array<struct<key: string, value: binary>> comment 'cut or hashed, as --record-values says',
  `date` string,
  `hour` string
)
using parquet
partitioned by (`date`, `hour`);
