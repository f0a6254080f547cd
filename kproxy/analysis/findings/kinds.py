"""The kinds of findings: the title of each, its sentence, why it matters, and settings to change.

Duty: the words, as data, and the thresholds and tables of each kind. docs/findings.md is made from this. `says` is one
line with names of the evidence, which `views` formats. Refuses to know how anything is measured.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    name: str
    title: str
    says: str
    why: str
    change: str
    settings: tuple[str, ...]
    thresholds: tuple[str, ...]
    evidence: str  # where it comes from
    job: str | None = None  # of `kproxy analyze`, which says more
    is_live: bool = False  # a running kproxy finds it, too
    says_live: str | None = None  # where its evidence is another one

    @property
    def says_part(self) -> str:
        """The sentence for some of its failures: it is not known how many requests were `asked` meanwhile."""
        return self.says.replace(" of {asked}", "")


# Outcomes of batches that were sent again, by the evidence that counts their records.
_OUTCOMES = {
    "doubled_records": "in the log twice",
    "doubtful_records": "perhaps in the log twice",
    "reordered_records": "in the log behind later ones",
}
# Evidence of several findings of one kind, taken together: counts add up, of these the largest stands for all.
SUMMED = frozenset(
    (
        *("failed", "asked", "refused", "unanswered", "refusals", "connections", "answers", "resent"),
        *(*_OUTCOMES, "not_in_log_records"),
    )
)
LARGEST = frozenset(("longest_ns", "longest_wait_ns", "outage_ns", "worst", "stuck_ns"))
NAMED = frozenset(("apis", "errors"))  # names with commas between them: of several findings, all of them


def outcome(evidence: Mapping[str, Any]) -> str:
    """The outcomes of records that were sent again, in words."""
    counts = ((evidence.get(name) or 0, how) for name, how in _OUTCOMES.items())
    return ", ".join(f"{count:,} record{' is' if count == 1 else 's are'} {how}" for count, how in counts if count)


KINDS = {
    each.name: each
    for each in (
        Kind(
            "broker_gone",
            "A broker gone",
            "no answer for {silent_ns}: {connections} connections ended with it, {failed} of its requests never "
            "answered",
            "Partitions that it led stand still until others lead them, groups that it coordinated until they find "
            "another coordinator; clients send again what was not answered.",
            "Look at its log and its host for why it stopped: a crash, the out-of-memory killer, a deployment. A "
            "controlled shutdown (SIGTERM) hands leaders over first; replication factor 3 with min.insync.replicas=2 "
            "lets writers go on.",
            ("controlled.shutdown.enable", "min.insync.replicas", "default.replication.factor"),
            ("silent_s", "silent_answers_min", "felt_stood_still_s"),
            "answers of the broker and ends of its connections, beside those of the other brokers; live connections "
            "that could not be made",
            "connections",
            True,
            "{unreachable} connections to it could not be made",
        ),
        Kind(
            "broker_standing_still",
            "A broker that stood still",
            "no answer for {silent_ns}, connections stayed: {held} requests waited until it went on, {failed} never "
            "answered",
            "All that it leads and coordinates waits; after broker.session.timeout.ms (9 s) the controller takes its "
            "leaders away, after their request.timeout.ms clients give up.",
            "Look at its garbage collection log, its disks (iostat), and a host that froze or swapped at that time.",
            ("broker.session.timeout.ms", "request.timeout.ms"),
            ("silent_s", "silent_answers_min", "silent_requests_min"),
            "requests that were answered only after a time in which the broker answered nobody",
            "slow",
        ),
        Kind(
            "connects_failed",
            "Connections that could not be made",
            "{failed} of {asked} connects failed: {refused} refused, {unanswered} not answered",
            "A client that reaches no broker does nothing; one that reaches some of them lacks the partitions that the "
            "others lead.",
            "Refused: nothing listens at that address; look whether the broker runs, and whether advertised.listeners "
            "names an address and port where it listens. Not answered: a firewall or security group drops packets, the "
            "host is down, or the advertised address is of a network that the client is not in.",
            ("advertised.listeners", "bootstrap.servers", "socket.connection.setup.timeout.ms"),
            ("connects_failed_min", "unanswered_min", "felt_failed", "felt_failed_share", "felt_failed_few"),
            "connections of one packet or two: a SYN that was answered by a reset, or sent again and again",
            "connections",
        ),
        Kind(
            "tls_failed",
            "TLS handshakes that fail",
            "{failed} of {asked} connections without a TLS handshake, most of them for: {reason}",
            "A client without a handshake sends no request, and tries again and again.",
            "An alert by the client (unknown_ca, certificate_unknown, bad_certificate): it does not trust the "
            "broker's certificate, or that does not name the host which was dialled; look at ssl.truststore.location"
            " and at the certificate's names and dates. An alert by the broker: certificate_required or "
            "bad_certificate, the client needs a certificate (ssl.keystore.location); handshake_failure or "
            "protocol_version, both have no TLS version or cipher suite in common (ssl.enabled.protocols). Answered "
            "in clear, or unanswered: the port speaks no TLS, most often. TLS expected: the client's "
            "security.protocol is without SSL, the port's is with it.",
            ("security.protocol", "ssl.truststore.location", "ssl.keystore.location", "ssl.enabled.protocols"),
            ("tls_failed_min", "unanswered_min", "felt_failed", "felt_failed_share", "felt_failed_few"),
            "the alert that ends the handshake, which is in clear up to TLS 1.2 and for most servers in 1.3; live "
            "kproxy's own handshakes with clients and brokers",
            "connections",
            True,
        ),
        Kind(
            "late_answers",
            "Answers that reached their client late",
            "answers sent again until the client acknowledged them: {answers}; one for {longest_ns}, sent again "
            "{times} times",
            "The broker answered in time, the client waited on: its time runs until the bytes arrive.",
            "Captured at the broker, packets towards that host are lost: an MTU that a tunnel or VPN makes smaller "
            "(large answers vanish, small ones pass: compare `ping -M do -s 1472`), a firewall that lost the "
            "connection, a host that is gone.",
            ("request.timeout.ms",),
            ("late_answer_s", "felt_stood_still_s"),
            "segments of answers that were sent again while the client had not acknowledged them",
            "slow",
        ),
        Kind(
            "coordinator_lost",
            "A group without its coordinator",
            "stood still for {outage_ns}; refused {refusals} times",
            "Without a coordinator members neither join nor commit: after it they join again, and read again what was "
            "not committed.",
            "Look at the broker that coordinated it, and at the leaders of __consumer_offsets: a coordinator that "
            "stays and refuses (moved: no) waits for other brokers to replicate it.",
            ("session.timeout.ms", "offsets.topic.replication.factor"),
            ("coordinator_outage_s",),
            "last good answer to a member before its coordinator refused it or was lost, and the first one after it, "
            "or the end of the join behind that; where none came, the group's last request (is back: no)",
            "coordinators",
        ),
        Kind(
            "controller_changes",
            "A cluster that changes its controller",
            "{elections} elections among {controllers} controllers",
            "Each election stops topics, leaders and replicas from changing until the new controller has read all of "
            "it.",
            "Look at ZooKeeper's sessions (zookeeper.session.timeout.ms), and at pauses of the controllers.",
            ("zookeeper.session.timeout.ms", "controller.quorum.election.timeout.ms"),
            ("controller_changes_min",),
            "controller epochs in requests of the controller to brokers",
            "topology",
        ),
        Kind(
            "offline_partitions",
            "Partitions without a leader",
            "partitions: {partitions}, for {longest_ns} at most; {at_end} when last told",
            "Nobody can write to them or read from them: all of their in-sync replicas are gone.",
            "Bring the brokers of their replicas back; give the topic a replication factor of 3.",
            ("default.replication.factor", "unclean.leader.election.enable"),
            ("replicas_s",),
            "the table leadership: changes to offline",
            "leadership",
            True,
            "partitions: {partitions} at this moment",
        ),
        Kind(
            "no_broker_may_stop",
            "A topic that no broker may stop of",
            "{replicas} of {replicas} replicas must be in sync to write to it: writers stand still while one broker "
            "is away",
            "min.insync.replicas is the replication factor, or there is one replica: each restart of a broker stops "
            "the topic's writers with acks=all, whatever else the cluster does right.",
            "Set min.insync.replicas one below the replication factor (2 of 3): kafka-configs --alter --entity-type "
            "topics --entity-name TOPIC --add-config min.insync.replicas=2.",
            ("min.insync.replicas", "default.replication.factor"),
            ("refused_min", "replicas_s"),
            "writes that were refused with NOT_ENOUGH_REPLICAS while the table leadership has all replicas but one in "
            "the ISR; topics of one replica that were offline",
            "leadership",
        ),
        Kind(
            "under_replicated",
            "Partitions without all their replicas",
            "{partitions} partitions lacked it in their ISR, for {longest_ns} at most; {at_end} when last told",
            "One more broker that fails loses records or availability; writers with acks=all may be refused.",
            "Look at the broker that is missing: is it there, and does it keep up (num.replica.fetchers, its disks)?",
            ("replica.lag.time.max.ms", "num.replica.fetchers"),
            ("out_of_sync_s",),
            "the table leadership: replicas that the ISR lacks",
            "leadership",
            True,
            "partitions: {partitions} at this moment",
        ),
        Kind(
            "unanswered",
            "Requests without an answer",
            "{failed} of {asked} requests were not answered before their connection ended ({apis})",
            "The client does not know whether they were done: it sends them again, or reports an error.",
            "Look at who ended the connections: a broker that stopped, a middlebox with an idle timeout, a limit of "
            "connections.",
            ("connections.max.idle.ms", "retries"),
            ("unanswered_min", "felt_failed", "felt_failed_share", "felt_failed_few"),
            "requests whose connection ended before the answer, of clients that went on",
            "errors",
            True,
            "{failed} of {asked} requests were not answered before their connection ended",
        ),
        Kind(
            "client_timeouts",
            "A client that gives up waiting",
            "{failed} of {asked} requests given up, the longest after {longest_wait_ns} ({apis})",
            "A request that its client gives up may still be done by the broker: it is sent again beside the first.",
            "Look at why the broker did not answer in time; a request.timeout.ms below the broker's slowest answers "
            "makes "
            "a slow broker slower.",
            ("request.timeout.ms", "delivery.timeout.ms", "socket.timeout.ms"),
            ("unanswered_min", "gave_up_s"),
            "requests that had waited when their client ended the connection",
            "errors",
        ),
        Kind(
            "timed_out",
            "Requests that brokers gave up",
            "{failed} of {asked} {api} requests were refused after their time: {errors}",
            "Replicas did not confirm in time what the client asked to be confirmed: it may be done, and is sent "
            "again.",
            "Look at followers that lag or are gone; raise request.timeout.ms of the producer above the replicas' "
            "pauses.",
            ("request.timeout.ms", "replica.lag.time.max.ms"),
            ("refused_min", "retried_min"),
            "REQUEST_TIMED_OUT in answers",
            "errors",
            True,
        ),
        Kind(
            "no_leader",
            "Requests to brokers that do not lead",
            "{failed} of {asked} {api} requests were refused: {errors}",
            "Leaders moved: the client asks for Metadata again, and sends again.",
            "Nothing, if a broker was restarted. Else look at why leaders move: brokers that come and go, "
            "auto.leader.rebalance.enable.",
            ("auto.leader.rebalance.enable", "metadata.max.age.ms"),
            ("refused_min", "retried_min"),
            "errors of partitions in answers",
            "errors",
            True,
        ),
        Kind(
            "not_enough_replicas",
            "Writes refused for lack of replicas",
            "{failed} of {asked} {api} requests were refused: {errors}",
            "Fewer replicas are in sync than min.insync.replicas: producers with acks=all stand still.",
            "Bring the missing broker back; min.insync.replicas equal to the replication factor lets no broker stop: "
            "set "
            "it one lower.",
            ("min.insync.replicas",),
            ("refused_min",),
            "errors of partitions in answers to Produce",
            "errors",
            True,
        ),
        Kind(
            "refused_authorization",
            "Requests refused for lack of rights",
            "{failed} of {asked} {api} requests were refused: {errors}",
            "The principal has no right to what it asks: no retry helps.",
            "Give the principal the right (kafka-acls --add), or have the client ask for its own topics and groups.",
            ("kafka-acls",),
            ("refused_min",),
            "authorization errors in answers",
            "errors",
            True,
        ),
        Kind(
            "login_failed",
            "Logins that fail",
            "{failed} of {asked} {api} failed: {errors}",
            "The client does not get in: a wrong password, an expired token, or somebody who tries.",
            "Correct the client's credentials (sasl.jaas.config, sasl.username); look at who tries from that address.",
            ("sasl.jaas.config", "sasl.mechanism"),
            ("refused_min",),
            "errors of SaslHandshake and SaslAuthenticate; connections that ended after a raw token",
            "errors",
            True,
        ),
        Kind(
            "refused_too_large",
            "Records too large",
            "{failed} of {asked} {api} requests were refused: {errors}",
            "The batch is larger than the topic or the broker takes: no retry helps, the records are lost.",
            "Raise max.message.bytes of the topic with replica.fetch.max.bytes, or have the producer send less "
            "(max.request.size, compression.type).",
            ("max.message.bytes", "message.max.bytes", "max.request.size"),
            ("refused_min",),
            "errors of partitions in answers to Produce",
            "errors",
            True,
        ),
        Kind(
            "unknown_topic",
            "Topics that do not exist",
            "{failed} of {asked} {api} requests name a topic that is not there: {errors}",
            "A mistyped or deleted topic: the client asks again and again, and its records time out.",
            "Correct the name at the client, or create the topic (kafka-topics --create).",
            ("auto.create.topics.enable", "allow.auto.create.topics"),
            ("refused_min",),
            "errors of topics and partitions in answers",
            "errors",
            True,
        ),
        Kind(
            "fenced",
            "Clients put out by another",
            "{failed} of {asked} {api} requests were refused: {errors}",
            "A newer producer or member has the same id, or the state of its producer id is gone: it must stop.",
            "Give each process its own transactional.id or group.instance.id; look for one that lives on after it was "
            "replaced, and for transaction.timeout.ms that is too short.",
            ("transactional.id", "group.instance.id", "transaction.timeout.ms"),
            ("refused_min",),
            "fencing errors in answers",
            "errors",
            True,
        ),
        Kind(
            "refused_records",
            "Records or requests that brokers do not take",
            "{failed} of {asked} {api} requests were refused: {errors}",
            "The broker takes what was sent for broken or against a rule of the topic: no retry helps.",
            "Look at the topic's settings (cleanup.policy=compact wants keys, message.timestamp.*) and the error's "
            "message "
            "in the client's log.",
            ("cleanup.policy", "message.timestamp.type"),
            ("refused_min",),
            "errors of partitions and requests in answers",
            "errors",
            True,
        ),
        Kind(
            "reconnect_storm",
            "Connections that serve nothing, over and over",
            "{connections} connections ended before a request was served, {worst} of them in ten seconds",
            "Each attempt costs the broker a thread's time, TLS and a login; a fleet of such clients keeps a broker "
            "that "
            "comes back from getting up.",
            "Raise reconnect.backoff.ms and reconnect.backoff.max.ms; look at why the connections end.",
            ("reconnect.backoff.ms", "reconnect.backoff.max.ms"),
            ("storm_connections",),
            "connections that ended after handshakes at most, by client and broker",
            "connections",
        ),
        Kind(
            "producers_standing_still",
            "Producers that stood still",
            "{clients} of {producers} producers had no write acknowledged for {shortest_ns} or more, {longest} for "
            "{longest_ns}",
            "Nothing that they send is written meanwhile: records wait in their memory (buffer.memory), and are given "
            "up after delivery.timeout.ms; what calls send() waits, or loses them.",
            "Look at what they waited for: a broker that does not answer, partitions without a leader, fewer in-sync "
            "replicas than min.insync.replicas. Java and librdkafka hold records for 2 and 5 minutes: a "
            "delivery.timeout.ms above the longest standstill loses none.",
            ("delivery.timeout.ms", "buffer.memory", "broker.session.timeout.ms"),
            ("writers_still_s", "felt_stood_still_s"),
            "Produce requests: from the first that is not acknowledged to the client's next acknowledgement, whatever "
            "broker and topic it is of",
            "slow",
            says_live="{clients} of {producers} producers had no write acknowledged for {longest_ns}",
        ),
        Kind(
            "records_lost",
            "Acknowledged records lost",
            "{records} records, acknowledged by {by} (acks={acks}), are gone: their offsets were acknowledged again, "
            "for other records (partition and offsets {offsets})",
            "The producer took them for written. A leader that was deposed, or failed before its followers had the "
            "records, acknowledged them; the next leader's log is without them.",
            "Set acks=all and enable.idempotence=true at the producer, min.insync.replicas=2 at the topic, and leave "
            "unclean.leader.election.enable=false: then only what all in-sync replicas have is acknowledged. Produce "
            "these records again, where their source still has them.",
            ("acks", "min.insync.replicas", "unclean.leader.election.enable"),
            (),
            "offsets of a partition in answers to Produce: the same ones twice, for different batches",
        ),
        Kind(
            "doubtful_records",
            "Records doubled or lost, perhaps",
            "{doubtful_records} records in {failed} batches without an answer, without a producer id; {resent} batches "
            "sent again",
            "Without a producer id the broker cannot know a batch that it has already: what was not answered and is "
            "sent "
            "again may be there twice, what is not sent again may be lost.",
            "Set enable.idempotence=true (the default of Java since 3.0), acks=all.",
            ("enable.idempotence", "acks"),
            ("doubtful_records_min",),
            "batches of Produce requests that were not answered, and later batches of the client with records of the "
            "same "
            "time",
        ),
        Kind(
            "single_record_batches",
            "Batches of one record",
            "{single_share} of {batches} batches have one record, {rate_per_s} a second on each connection",
            "Each batch costs a request's share of broker and network, 60 to 90 bytes of headers, and an entry in "
            "every replica's log; full ones cost hardly more, and compress.",
            "Raise linger.ms to 5-50 and leave batch.size at 16384 or more; with confluent-kafka do not flush() after "
            "each produce(), with Java do not get() each future.",
            ("linger.ms", "batch.size"),
            ("batches_min", "single_record_share", "single_record_rate"),
            "Produce requests: record batches with one record, by client and topic",
            "batching",
            True,
        ),
        Kind(
            "no_compression",
            "No compression",
            "{plain_bytes} in {batches} batches without compression, {bytes_per_batch} each; a sample of records "
            "became "
            "{measured_ratio} times smaller",
            "Records in one batch resemble each other: text and JSON shrink to a half or a fifth on the network, on "
            "every replica's disk, and for every consumer.",
            "Set compression.type to zstd or lz4 at the producer. Values that are compressed or encrypted already gain "
            "nothing: `kproxy convert --records TOPIC --record-values all` has some at hand to be measured.",
            ("compression.type",),
            ("uncompressed_bytes_min", "uncompressed_rate", "uncompressed_batch_bytes", "compression_ratio"),
            "Produce requests: batches with codec none, by client and topic; where the table records has whole values, "
            "some are compressed to see",
            "batching",
            True,
            "{plain_bytes} in {batches} batches without compression, {bytes_per_batch} each; whether they would shrink "
            "was not measured",
        ),
        Kind(
            "empty_fetches",
            "Fetches that come back empty",
            "{empty_share} of {fetches} fetches came back empty, {rate_per_s} a second on each connection",
            "A fetch that is answered with nothing at once costs broker and client as much as one that brings records.",
            "Raise fetch.max.wait.ms to 500 or more (the broker then waits for data); look for a poll loop around a "
            "consumer without it, such as max wait 0.",
            ("fetch.max.wait.ms", "fetch.min.bytes"),
            ("fetches_min", "empty_share", "empty_rate"),
            "Fetch answers without records, by client; those of a session that waited its time are few a second",
            "fetching",
        ),
        Kind(
            "tiny_fetches",
            "Fetches that bring next to nothing",
            "{bytes_per_fetch} in a fetch, {rate_per_s} fetches a second while a connection is open",
            "Each fetch costs about the same up to some 100 kB: many small ones load broker and consumer for nothing.",
            "Raise fetch.min.bytes (1 by default) to 10000 or more: the broker collects so much, for fetch.max.wait.ms "
            "at most.",
            ("fetch.min.bytes", "fetch.max.wait.ms"),
            ("fetches_min", "tiny_fetch_bytes", "tiny_fetch_rate"),
            "Fetch answers with records, by client",
            "fetching",
        ),
        Kind(
            "throttled",
            "Throttled by a quota",
            "{throttled} of {answers} answers throttled, {throttle_ms} in all",
            "The broker makes this client wait since it is over a quota: it is slower than it could be.",
            "Raise the quota with kafka-configs --alter (--entity-type users or clients): producer_byte_rate for "
            "Produce, consumer_byte_rate for Fetch, request_percentage for any, controller_mutation_rate for topics; "
            "or have the client send less (compression.type, batch.size).",
            ("producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate"),
            ("throttled_min", "throttled_share", "throttled_time_share"),
            "throttle_time_ms above 0 in answers, by client and API",
            "throttle",
            True,
        ),
        Kind(
            "old_versions",
            "Protocol versions that a newer Kafka drops",
            "{apis} in {requests} requests: Kafka {kafka} has no such versions",
            "Kafka 4.0 dropped what clients before 2.1 speak (KIP-896), and other releases dropped APIs: after the "
            "upgrade of the brokers this client does not connect, or fails.",
            "Upgrade the client library (Java 2.1, librdkafka 2.0, or newer) before the brokers; `kproxy compat` says "
            "what a release serves.",
            ("the client's version",),
            (),
            "API versions of requests against those that the newest release serves, by kproxy's data of releases",
            "clients",
            True,
        ),
        Kind(
            "weak_acks",
            "acks=0 or 1 on replicated topics",
            "acks={acks} for {requests} requests to topics with {replicas} replicas",
            "With 1 the leader answers before a follower has the records, with 0 nobody answers: if the leader fails, "
            "records are gone that the producer took for written, though replicas exist.",
            "Set acks=all (the default since Kafka 3.0) and min.insync.replicas=2 at the topic.",
            ("acks", "min.insync.replicas"),
            ("acks_requests_min",),
            "Produce requests with acks 0 or 1 to topics whose partitions have several replicas, by Metadata",
            "batching",
        ),
        Kind(
            "resent_not_idempotent",
            "Retries without idempotence",
            "{outcome}: batches that failed were sent again without a producer id, {resent} of which it was not known "
            "whether they had been written",
            "A batch whose answer was an error or was lost may be in the log already: sent again without a producer "
            "id it is there twice, and with several requests in flight behind later ones.",
            "Set enable.idempotence=true (the default since Kafka 3.0; it needs acks=all, retries above 0 and at most "
            "5 of max.in.flight.requests.per.connection).",
            ("enable.idempotence", "max.in.flight.requests.per.connection"),
            ("resent_batches",),
            "batches without a producer id whose first request failed or was not answered, and that came once more; "
            "offsets in answers, which skip records that were written and not acknowledged",
            "errors",
        ),
        Kind(
            "hot_partition",
            "A hot partition",
            "{share} of the topic's bytes, {times_even} times an even share of {partitions} partitions",
            "One broker and one consumer carry what many were meant for: the partition's lag and latency are the "
            "topic's.",
            "Look at the keys: one that is very frequent, null keys with a custom partitioner, or a producer that "
            "names its partition. Add to the key, or leave partitioner.class at its default.",
            ("partitioner.class", "the records' keys"),
            ("hot_bytes_min", "hot_partition_times", "hot_partition_batches"),
            "bytes of Produce requests (or of Fetch answers, of topics that nobody wrote to) by partition",
            "skew",
        ),
        Kind(
            "hot_broker",
            "A hot broker",
            "{share} of all bytes, {times_even} times an even share of {brokers} brokers",
            "Its network, disks and threads are full while others idle.",
            "Move leaders: kafka-leader-election --election-type preferred, then kafka-reassign-partitions; "
            "auto.leader.rebalance.enable=true keeps preferred leaders.",
            ("auto.leader.rebalance.enable",),
            ("hot_broker_times", "broker_requests_min"),
            "bytes of clients' requests and answers by broker",
            "talkers",
            True,
        ),
        Kind(
            "slow_broker",
            "A slow broker",
            "Produce takes {p99_ns} at p99, the other brokers {others_p99_ns}",
            "Each partition that it leads is as slow, and those that it follows wait for it with acks=all.",
            "Look at its disks, its page cache and garbage collection, and at followers that lag "
            "(num.replica.fetchers, replica.lag.time.max.ms).",
            ("num.replica.fetchers", "num.io.threads"),
            ("produces_min", "slow_broker_times", "slow_produce_ms", "very_slow_produce_ms", "slow_produces_min"),
            "latency of Produce without queue and throttle, by broker",
            "latency",
            True,
            "Produce takes {p99_ns} at p99 ({produces} requests)",
        ),
        Kind(
            "connection_churn",
            "Connections that come and go",
            "{connections} connections, {per_minute} a minute, half of them shorter than {life_p50_ns}",
            "Each one costs threads, a TLS handshake or a login, and Metadata; brokers limit them "
            "(max.connection.creation.rate).",
            "Keep one producer or consumer for the life of the process instead of one per message or per request; look "
            "for a client that crashes, or a probe.",
            ("connections.max.idle.ms", "max.connection.creation.rate"),
            ("connections_min", "connections_per_minute", "short_connection_s"),
            "connections that begin in the capture, by client; live how many are open at a time, and how many begin",
            "connections",
            True,
            "{connections} connections, {per_minute} a minute, open for {life_mean_ns} on average",
        ),
        Kind(
            "rebalance_storm",
            "A group that does not come to rest",
            "{rebalances} rebalances in {span_ns}, {rebalancing_ns} of it rebalancing, most often {cause}; {of_client} "
            "set off by members of client {client}",
            "While a group rebalances its members do not work, or not all of them; records are read twice behind it.",
            "Give members a group.instance.id, use CooperativeStickyAssignor (partition.assignment.strategy) or "
            "group.protocol=consumer (KIP-848).",
            ("session.timeout.ms", "max.poll.interval.ms", "group.instance.id", "partition.assignment.strategy"),
            ("rebalances_min", "rebalances_per_hour", "rebalancing_share"),
            "the table rebalances, by group, while there is traffic: pauses of more than 5 minutes do not count",
            "rebalances",
            True,
            "{rebalances} rebalances in {span_ns}, {rebalancing_ns} of it rebalancing, most often {cause}",
        ),
        Kind(
            "straggler",
            "A member that the others wait for",
            "all others waited {waited_ns} for it in {rebalances} rebalances, {longest_ns} at most",
            "A rebalance ends when the last member has joined again: it joins with its next poll().",
            "Make the time between two polls shorter: lower max.poll.records, work on another thread; lower "
            "max.poll.interval.ms so that it is put out earlier.",
            ("max.poll.records", "max.poll.interval.ms"),
            ("straggler_wait_s",),
            "the table rebalances: who joined last, and how long all others had waited",
            "rebalances",
        ),
        Kind(
            "commit_storm",
            "Commits for every record",
            "{commits} commits, {rate_per_s} a second on each connection",
            "Each commit is a write to __consumer_offsets with acks=all, and a round trip of the consumer.",
            "Commit once per poll or per second: enable.auto.commit with auto.commit.interval.ms=5000, or "
            "commitAsync() behind the loop over a poll's records.",
            ("auto.commit.interval.ms", "enable.auto.commit"),
            ("commits_min", "commit_rate"),
            "OffsetCommit requests by group",
            "offsets",
        ),
        Kind(
            "stopped_fetching",
            "A consumer that no longer fetches",
            "it has fetched nothing for {silent_ns}, and sent {heartbeats} heartbeats meanwhile",
            "Its poll loop hangs, waits for something else or is paused. Heartbeats come from a thread of their own: "
            "the group leaves it its partitions until max.poll.interval.ms has passed, and nobody reads them.",
            "Look at what the consumer does between two polls (a thread dump), and what it waits for: more members do "
            "not help. Processing that takes this long belongs behind pause(), or needs a lower max.poll.records.",
            ("max.poll.interval.ms", "max.poll.records"),
            ("stopped_fetching_s",),
            "heartbeats of a member behind its last Fetch, without a SyncGroup between them",
            "groups",
        ),
        Kind(
            "growing_lag",
            "Lag that grows",
            "lag grew from {first_lag_records} to {last_lag_records} records in {span_ns}",
            "The consumer is slower than its producers: it falls behind until retention deletes what it has not read.",
            "Add members up to the number of partitions, or partitions; raise max.poll.records, "
            "max.partition.fetch.bytes and fetch.min.bytes; look at what the consumer does with a record.",
            ("max.poll.records", "max.partition.fetch.bytes", "retention.ms"),
            ("lag_records_min", "lag_growth", "lag_growth_per_s", "lag_span_s"),
            "lag by fetches of each client and topic, by commits of each group and topic: growth and height",
            "lag",
            True,
        ),
        Kind(
            "open_transaction",
            "A transaction left open",
            "open for {open_ns} when the capture ended",
            "Readers with isolation.level=read_committed get nothing behind it, and compaction stops, in every "
            "partition that it wrote to.",
            "The coordinator aborts it when the producer's transaction.timeout.ms has passed. `kproxy analyze "
            "transactions` has that timeout, the partitions and their start offsets. Where nobody commits it, end it "
            "now: kafka-transactions.sh abort --topic TOPIC --partition N --start-offset OFFSET, for each partition. "
            "Then look for what the producer does between send and commit.",
            ("transaction.timeout.ms", "isolation.level"),
            ("open_transaction_s", "hung_transaction_s"),
            "requests of a transactional id without an EndTxn behind them, at the end",
            "transactions",
        ),
        Kind(
            "stuck_stable_offset",
            "Readers of committed data stand still",
            "the last stable offset stood at {last_stable_offset} for {stuck_ns} while the log grew by {records}",
            "A transaction is open in this partition: readers with read_committed get nothing behind it.",
            "kafka-transactions.sh find-hanging names its producer; abort ends it. Lower transaction.timeout.ms.",
            ("transaction.timeout.ms", "isolation.level"),
            ("open_transaction_s", "hung_transaction_s", "lag_records_min", "felt_behind_records"),
            "last stable offset and high watermark of Fetch answers, by partition",
            "lag",
        ),
        Kind(
            "retransmissions",
            "The network loses segments",
            "{retransmissions} segments sent again, {segment_share} of all",
            "Each loss stops its connection for 200 ms or more, and halves its throughput.",
            "Look at interfaces, duplex, MTU and full links between the two; more in flight hides it "
            "(socket.send.buffer.bytes, socket.receive.buffer.bytes).",
            ("socket.send.buffer.bytes", "socket.receive.buffer.bytes"),
            ("retransmissions_min", "retransmission_share"),
            "TCP of the capture: segments that came again, by client's host and broker",
            "connections",
        ),
        Kind(
            "zero_windows",
            "A receiver that reads too slowly",
            "a receive window was closed {zero_windows} times; connections: {connections}",
            "Client or broker does not read what it was sent: its peer stands still meanwhile.",
            "Of a consumer: its process is short of CPU, or stops (garbage collection, swap); raise "
            "receive.buffer.bytes. Of a broker: socket.receive.buffer.bytes, num.network.threads.",
            ("receive.buffer.bytes", "socket.receive.buffer.bytes"),
            ("zero_windows_min",),
            "TCP of the capture: windows of 0, by client's host and broker",
            "connections",
        ),
        Kind(
            "core_full",
            "Bytes wait for kproxy",
            "bytes wait {loop_lag_ns} for kproxy at p99; its process uses {core_share} of a core",
            "What clients take for the brokers' latency is kproxy's own: its core is full, or, where its process uses "
            "much less than a core, other processes or a CPU limit keep the core from it.",
            "Of a full core: give it more processes with --workers, or more cores; lower detail to headers. Otherwise: "
            "raise the container's CPU limit, or move what else runs on the machine.",
            ("workers", "detail"),
            ("loop_lag_ms", "core_share"),
            "the running process: kproxy_loop_lag_seconds and its CPU time",
            None,
            True,
        ),
    )
}
