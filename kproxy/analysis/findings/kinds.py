"""The kinds of findings: the title of each, its sentence, why it matters, and settings to change.

Duty: the words, as data, and the thresholds and tables of each kind. docs/findings.md is made from this. `says` is one
line with placeholders for evidence, which `views` fills: {failed} is the number, {failed:request} the number with its
noun, {failed:was|were} the word for one or for several. Refuses to know how anything is measured.
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
    evidence: str  # its source
    job: str | None = None  # the job of `kproxy analyze` with details
    is_live: bool = False  # a running kproxy finds it, too
    says_live: str | None = None  # where its evidence is another one
    says_each: str | None = None  # text for each of several places in one line; without it, one text has their sum
    says_again: str | None = None  # text for several occurrences in one finding; `times` is their number

    @property
    def says_part(self) -> str:
        """The sentence for some of its failures: it is not known how many requests were `asked` meanwhile."""
        return self.says.replace("{failed} of {asked", "{failed").replace("{asked:", "{failed:")


# Outcomes of batches that were sent again, by the evidence that counts their records.
_OUTCOMES = {
    "doubled_records": "in the log twice",
    "doubtful_records": "perhaps in the log twice",
    "reordered_records": "out of order in the log",
}
# Evidence that is added up if several findings of one kind are taken together.
SUMMED = frozenset(
    (
        *(
            "failed",
            "asked",
            "refused",
            "unanswered",
            "closed_at_once",
            "undelivered",
            "refusals",
            "connections",
            "answers",
            "resent",
            "rebalances",
            "members",
            "waiting",
            "answered_meanwhile",
            "waited_ns",
            "given_up_records",
            "given_up_batches",
            "new_epochs",
            "unsent_ns",
            "about_records",
            "at_least_records",
        ),
        *(*_OUTCOMES, "not_in_log_records"),
    )
)
# Evidence whose largest value stands for all in that case.
LARGEST = frozenset(("longest_ns", "longest_wait_ns", "outage_ns", "worst", "stuck_ns", "paused_ns"))
CONTROLLED_SHUTDOWN = "A broker away after a controlled shutdown"  # the title of such a `broker_gone`
NAMED = frozenset(("apis", "errors"))  # lists of names, separated by commas; several findings together have all names


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
            "no answer for {silent_ns}: {connections:connection} ended, {failed} of its requests "
            "{failed:was|were} never answered",
            "Partitions that it led stand still until they have another leader, and its groups until they have "
            "another coordinator; clients retry unanswered requests.",
            "Find out from its log and its host why it stopped: a crash, the out-of-memory killer, a deployment. A "
            "controlled shutdown (SIGTERM) moves leadership away first; with replication factor 3 and "
            "min.insync.replicas=2 writers continue.",
            ("controlled.shutdown.enable", "min.insync.replicas", "default.replication.factor"),
            ("silent_s", "silent_answers_min", "felt_stood_still_s"),
            "answers and connection ends of this broker, compared with the other brokers; live: failed connects",
            "connections",
            True,
            "{unreachable:connection} to it could not be made",
        ),
        Kind(
            "broker_absent",
            "A broker that was not there from the beginning",
            "not there for {absent_ns} from the capture's beginning: {connects:connect} to it failed "
            "meanwhile, {partitions:partition} lacked it",
            "It stopped before the capture began. Partitions without another replica have no leader, and those with as "
            "many replicas as min.insync.replicas take no writes with acks=all.",
            "Find out from its log and its host when and why it stopped; a capture that begins earlier shows how.",
            ("min.insync.replicas", "default.replication.factor"),
            ("silent_s",),
            "no answer of it; connects that fail from the beginning, and Metadata that no longer names it; or replicas "
            "on it, though Metadata never names it",
            "connections",
        ),
        Kind(
            "broker_standing_still",
            "A broker that stood still",
            "no answer for {silent_ns} on connections that stayed open: {held:request} waited until it "
            "continued, {failed} {failed:was|were} never answered",
            "Its partitions and groups wait. After 6 to 9 s (broker.session.timeout.ms) the controller elects other "
            "leaders; after request.timeout.ms clients give up.",
            "Look at its garbage collection log and its disks (iostat), and whether the host froze or swapped at that "
            "time.",
            ("broker.session.timeout.ms", "request.timeout.ms"),
            ("silent_s", "silent_answers_min", "silent_requests_min"),
            "requests that were pending while the broker answered no client",
            "slow",
        ),
        Kind(
            "broker_paused",
            "A broker that paused",
            "answered nobody for {paused_ns}, then {clients} clients at once: {waiting} of their requests had waited "
            "that a broker answers at once",
            "All of its clients wait, and its followers fall behind; beyond replica.lag.time.max.ms (30 s) or "
            "broker.session.timeout.ms (9 s) a pause becomes an outage.",
            "Look at its garbage collection log and its disks (iostat) at that time, then at its host: swapping, steal "
            "time, CPUs that have no time left. Pauses that return grow with the heap, with its page cache that is too "
            "small, or with a neighbour on its disk.",
            ("replica.lag.time.max.ms", "broker.session.timeout.ms"),
            ("paused_s", "paused_clients_min", "silent_s"),
            "requests of several clients that wait for nothing but this broker, were answered together, and no answer "
            "of it to anybody before",
            "slow",
            says_again="paused {times} times, {paused_ns} at the longest, {in_all_ns} in all: {waiting} requests had "
            "waited that a broker answers at once",
        ),
        Kind(
            "writes_waiting_together",
            "Writes that waited together",
            "{waiting} writes with acks=all at {leaders} waited for {longest_ns} at the same moment and were "
            "acknowledged together; what these leaders share is {shared}: they answered {answered_meanwhile:other "
            "request|other requests} at once meanwhile",
            "A leader acknowledges a write with acks=all once its in-sync replicas have the records: a follower that "
            "pauses keeps the writes of all its leaders waiting, up to replica.lag.time.max.ms (30 s).",
            "Look at the follower's garbage collection log, its disks (iostat) and its host at that time, and at the "
            "network between it and these leaders. Without a name, it is a broker that replicates partitions of all of "
            "them.",
            ("replica.lag.time.max.ms", "num.replica.fetchers"),
            ("paused_s", "silent_requests_min", "felt_stood_still_s"),
            "Produce requests with acks=all at two or more leaders that waited for the same time, while each of these "
            "leaders answered other Produce or Fetch requests at once; the common follower by the replicas of their "
            "partitions in Metadata",
            "slow",
            says_again="{times} times writes with acks=all at {leaders} waited at the same moment, for up to "
            "{longest_ns}, {in_all_ns} in all, {waiting} of them; what these leaders share is {shared}: they answered "
            "{answered_meanwhile:other request|other requests} at once meanwhile",
        ),
        Kind(
            "all_brokers_silent",
            "All brokers silent at once",
            "all {brokers} brokers answered nothing for {silent_ns}, though {waiting} requests waited that need no "
            "other broker; clients sent {sent_meanwhile} requests meanwhile",
            "Brokers that stop and continue together do not fail one by one: a shared component stopped, such as their "
            "host, the network to them, or the capture itself.",
            "Look at the host of the brokers, or of the capture: a pause of the virtual machine (steal time), "
            "swapping, a full disk queue, CPUs that have no time left; then at the network between. Clients that "
            "sent nothing meanwhile stood still too, or the capture did.",
            (),
            ("all_silent_s", "silent_requests_min", "felt_stood_still_s"),
            "no answer of any broker, while requests waited at each; at two or more of them requests that wait for no "
            "other broker",
            "slow",
        ),
        Kind(
            "connects_failed",
            "Connections that could not be made",
            "{failed} of {asked:connect} failed: {refused} refused, {unanswered} not answered, {closed_at_once} "
            "closed at once, {undelivered} not delivered",
            "A client that reaches no broker can do nothing; one that reaches only some brokers lacks the partitions "
            "of the others.",
            "Refused: no process listens at that address; check that the broker runs, and that advertised.listeners "
            "names an address and port where it listens. Not answered: a firewall or security group drops packets, "
            "the host is down, or the client cannot route to the advertised address. Closed at once: a load balancer "
            "has no broker behind it, or a limit of connections is reached (max.connections, max.connections.per.ip). "
            "Not delivered: a firewall, a router or the host rejects them by ICMP, for the reason in the evidence.",
            ("advertised.listeners", "bootstrap.servers", "socket.connection.setup.timeout.ms", "max.connections"),
            ("connects_failed_min", "unanswered_min", "felt_failed", "felt_failed_share", "felt_failed_few"),
            "TCP of the capture: SYNs answered by a reset or by ICMP, or retransmitted without an answer; connections "
            "that the broker's side closed within a second, before a byte of either side",
            "connections",
        ),
        Kind(
            "tls_failed",
            "TLS handshakes that fail",
            "{failed} of {asked} TLS {asked:handshake|handshakes} failed, most often: {reason}",
            "The client cannot send a request, and reconnects again and again.",
            "An alert by the client (unknown_ca, certificate_unknown, bad_certificate): it does not trust the "
            "broker's certificate, or the certificate does not name the host that the client dialled; look at "
            "ssl.truststore.location and at the certificate's names and dates. An alert by the broker: "
            "certificate_required or bad_certificate: the client needs a valid certificate (ssl.keystore.location); "
            "handshake_failure or protocol_version: they have no TLS version or cipher suite in common "
            "(ssl.enabled.protocols). Answered in clear, or unanswered: most often the port has no TLS. TLS expected: "
            "the client's security.protocol is without SSL, the listener's has it.",
            ("security.protocol", "ssl.truststore.location", "ssl.keystore.location", "ssl.enabled.protocols"),
            ("tls_failed_min", "gave_up_s", "unanswered_min", "felt_failed", "felt_failed_share", "felt_failed_few"),
            "the alert that ends the handshake, readable up to TLS 1.2 and for most servers in 1.3; live: kproxy's "
            "own handshakes with clients and brokers",
            "connections",
            True,
        ),
        Kind(
            "late_answers",
            "Answers that reached their client late",
            "answers retransmitted until the client acknowledged them: {answers}; one for {longest_ns}, {times:time}",
            "The broker answered in time, but the answer reached the client late: its request.timeout.ms runs until "
            "the bytes arrive.",
            "If captured at the broker, packets towards that host are lost: a tunnel or VPN with a smaller MTU (large "
            "answers vanish, small ones arrive: compare `ping -M do -s 1472`), a firewall that dropped its state of "
            "the connection, a host that is down.",
            ("request.timeout.ms",),
            ("late_answer_s", "felt_stood_still_s"),
            "retransmitted segments of answers that the client had not acknowledged; `mtu`: ICMP messages that a "
            "packet of these connections was too large",
            "slow",
        ),
        Kind(
            "coordinator_lost",
            "A group that its coordinator did not serve",
            "stood still for {outage_ns}; refused {refusals:time}",
            "Without a coordinator members can neither join nor commit. Afterwards they join again, and read "
            "uncommitted records a second time.",
            "Look at the former coordinator's broker, and at the leaders of __consumer_offsets: a coordinator that "
            "stays and refuses (moved: no) waits for in-sync replicas.",
            ("session.timeout.ms", "offsets.topic.replication.factor"),
            ("coordinator_outage_s",),
            "time from the first request that failed, or the end of a member's connection to the coordinator, to the "
            "next successful answer that no refusal follows at once, or to the end of the next join; without one, to "
            "the group's last request (is back: no)",
            "coordinators",
            says_each="stood still for {outage_ns}",
        ),
        Kind(
            "controller_changes",
            "A cluster that changes its controller",
            "{elections:election} among {controllers} controllers",
            "During an election no topic, leader or replica can change, until the new controller has loaded the "
            "metadata.",
            "Look at ZooKeeper's sessions (zookeeper.session.timeout.ms), and at pauses of the controllers.",
            ("zookeeper.session.timeout.ms", "controller.quorum.election.timeout.ms"),
            ("controller_changes_min",),
            "controller epochs in requests of the controller to brokers",
            "topology",
        ),
        Kind(
            "offline_partitions",
            "Partitions without a leader",
            "partitions: {partitions}, for {longest_ns} from the first report of it; {at_end} at the end",
            "No client can write to them or read from them: all their in-sync replicas are down.",
            "Restart the brokers of their replicas; give the topic a replication factor of 3.",
            ("default.replication.factor", "unclean.leader.election.enable"),
            ("replicas_s",),
            "the table leadership: changes to offline",
            "leadership",
            True,
            "partitions: {partitions} at this moment",
            says_each="partitions: {partitions}, for {longest_ns} from the first report of it; {at_end} at the end",
        ),
        Kind(
            "no_broker_may_stop",
            "A topic whose brokers may not restart",
            "writes need {replicas} of {replicas} replicas in sync: producers stand still while one broker is away",
            "min.insync.replicas equals the replication factor, or there is one replica: each restart of a broker "
            "stops producers with acks=all.",
            "Set min.insync.replicas one below the replication factor (2 of 3): kafka-configs --alter --entity-type "
            "topics --entity-name TOPIC --add-config min.insync.replicas=2.",
            ("min.insync.replicas", "default.replication.factor"),
            ("refused_min", "replicas_s"),
            "Produce answers NOT_ENOUGH_REPLICAS while the table leadership has all replicas but one in the ISR; "
            "offline topics of one replica",
            "leadership",
        ),
        Kind(
            "under_replicated",
            "Partitions without all their replicas",
            "{partitions:partition} lacked it in {partitions:its|their} ISR, until the next report or the capture's "
            "end, {longest_ns} later at the latest; {at_end} at the end",
            "The failure of one more broker can lose records or availability; writes with acks=all may be refused.",
            "Look at the missing broker: does it run, and does it keep up (num.replica.fetchers, its disks)?",
            ("replica.lag.time.max.ms", "num.replica.fetchers"),
            ("out_of_sync_s",),
            "the table leadership: replicas missing from the ISR, up to the next change reported of a partition",
            "leadership",
            True,
            "partitions: {partitions} at this moment",
            says_each="partitions: {partitions}, until the next report or the end of the capture, {longest_ns} later "
            "at the latest; {at_end} at the end",
        ),
        Kind(
            "leaders_away",
            "Leaders that did not move back",
            "{partitions} of {led:partition} that it led {partitions:has|have} another leader since it was away, "
            "though it is in sync again; partitions are led {leads}",
            "The brokers that took over do its work, too, and its own CPUs and disks idle.",
            "kafka-leader-election --election-type preferred --all-topic-partitions moves them back at once; with "
            "auto.leader.rebalance.enable=true the controller does so, every five minutes "
            "(leader.imbalance.check.interval.seconds).",
            ("auto.leader.rebalance.enable", "leader.imbalance.per.broker.percentage"),
            ("leaders_away_share",),
            "the table leadership: leaders that left the ISR, and are in it again",
            "leadership",
        ),
        Kind(
            "unanswered",
            "Requests without an answer",
            "{failed} of {asked:request} {failed:was|were} not answered before {failed:its|their} connection or the "
            "capture ended ({apis})",
            "The client does not know whether they were executed: it retries, or reports an error.",
            "Find out which side closed the connections: a broker that stopped, a middlebox with an idle timeout, a "
            "connection limit; and why the broker let requests wait.",
            ("connections.max.idle.ms", "retries"),
            ("unanswered_min", "felt_failed", "felt_failed_share", "felt_failed_few"),
            "requests whose connection ended before the answer, if the client continued or the broker ended it; "
            "requests that were pending when the capture ended",
            "errors",
            True,
            "{failed} of {asked:request} {failed:was|were} not answered before {failed:its|their} connection ended",
        ),
        Kind(
            "client_timeouts",
            "A client that gives up waiting",
            "{failed} of {asked:request} given up, the longest after {longest_wait_ns} ({apis})",
            "The broker may still execute a request that its client gave up, and receive the retry as well.",
            "Find out why the broker did not answer in time; a request.timeout.ms below the broker's slowest answers "
            "makes a slow broker slower.",
            ("request.timeout.ms", "delivery.timeout.ms", "socket.timeout.ms"),
            ("unanswered_min", "gave_up_s"),
            "pending requests when their client closed the connection",
            "errors",
        ),
        Kind(
            "timed_out",
            "Requests that timed out in the broker",
            "{failed} of {asked} {api} {asked:request|requests} timed out in the broker: {errors}",
            "Replicas did not confirm the request in time: it may have been executed, and the client retries.",
            "Look at followers that lag or are down; raise the producer's request.timeout.ms above the replicas' "
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
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "Leaders moved: the client refreshes its Metadata, and retries.",
            "Nothing, if a broker was restarted. Otherwise find out why leaders move: brokers that restart, "
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
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "Fewer replicas are in sync than min.insync.replicas: producers with acks=all stand still.",
            "Restart the missing broker. If min.insync.replicas equals the replication factor, set it one lower: "
            "otherwise each restart of a broker stops producers.",
            ("min.insync.replicas",),
            ("refused_min",),
            "errors of partitions in answers to Produce",
            "errors",
            True,
        ),
        Kind(
            "refused_authorization",
            "Requests refused by authorization",
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "The principal lacks an ACL for the operation: retries cannot succeed.",
            "Grant the ACL (kafka-acls --add), or restrict the client to its own topics and groups.",
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
            "The client cannot connect: a wrong password, an expired token, or an attempt to break in.",
            "Correct the client's credentials (sasl.jaas.config, sasl.username); find out which program runs at that "
            "address.",
            ("sasl.jaas.config", "sasl.mechanism"),
            ("refused_min",),
            "errors of SaslHandshake and SaslAuthenticate, a single one if the client got no further; connections that "
            "ended after a raw token",
            "errors",
            True,
        ),
        Kind(
            "refused_too_large",
            "Records too large",
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "The batch exceeds the limit of the topic or broker: retries cannot succeed, the records are lost.",
            "Raise the topic's max.message.bytes together with replica.fetch.max.bytes, or make the producer's "
            "batches smaller (max.request.size, compression.type).",
            ("max.message.bytes", "message.max.bytes", "max.request.size"),
            ("refused_min",),
            "errors of partitions in answers to Produce",
            "errors",
            True,
        ),
        Kind(
            "unknown_topic",
            "Topics that do not exist",
            "{failed} of {asked} {api} {asked:request|requests} {failed:names|name} a topic that does not exist: "
            "{errors}",
            "The topic's name is mistyped, or the topic was deleted: the client retries, and its records time out.",
            "Correct the name in the client, or create the topic (kafka-topics --create).",
            ("auto.create.topics.enable", "allow.auto.create.topics"),
            ("refused_min",),
            "errors of topics and partitions in answers",
            "errors",
            True,
        ),
        Kind(
            "topic_deleted",
            "A topic deleted while clients used it",
            "{clients:client} had used it, and {refused:request} {refused:was|were} refused from then on",
            "Its records are gone. Producers keep what they have to send to it until delivery.timeout.ms and lose it "
            "then; consumers ask for it over and over.",
            "Find out who deleted it (DeleteTopics). If that was a mistake, create it anew with its former settings; "
            "else stop its clients. Without the right to Delete nobody does so by mistake (kafka-acls).",
            ("delete.topic.enable", "auto.create.topics.enable"),
            ("refused_min",),
            "topics that answers no longer name, and requests about them before and afterwards",
            "changes",
        ),
        Kind(
            "fenced",
            "Clients that are fenced",
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "A newer producer or member has the same id, or the broker dropped the state of its producer id: the "
            "client must stop. An idempotent producer without a transactional.id is fenced by its own next epoch.",
            "Give each process its own transactional.id or group.instance.id; look for a process that still runs "
            "after its replacement started, and for a transaction.timeout.ms that is too short.",
            ("transactional.id", "group.instance.id", "transaction.timeout.ms"),
            ("refused_min",),
            "fencing errors in answers",
            "errors",
            True,
        ),
        Kind(
            "refused_records",
            "Invalid records or requests",
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "The request is malformed, or violates a setting of the topic: retries cannot succeed.",
            "Look at the topic's settings (cleanup.policy=compact requires keys, message.timestamp.*) and at the "
            "error in the client's log.",
            ("cleanup.policy", "message.timestamp.type"),
            ("refused_min",),
            "errors of partitions and requests in answers",
            "errors",
            True,
        ),
        Kind(
            "refused_members",
            "Members that their group refuses",
            "{failed} of {asked} {api} {asked:request|requests} {failed:was|were} refused: {errors}",
            "The client is no member and reads nothing; it asks again and again, or gives up. Its partitions stay with "
            "the members that are there.",
            "INCONSISTENT_GROUP_PROTOCOL: give all members an assignor in common (partition.assignment.strategy; to "
            "change it, add the new one everywhere before you remove the old one) and one group.protocol; "
            "INVALID_SESSION_TIMEOUT: set session.timeout.ms within the broker's group.min.session.timeout.ms and "
            "group.max.session.timeout.ms; "
            "GROUP_MAX_SIZE_REACHED: the broker's group.max.size; UNRELEASED_INSTANCE_ID: another process has the same "
            "group.instance.id.",
            ("partition.assignment.strategy", "group.protocol", "session.timeout.ms", "group.instance.id"),
            ("refused_min",),
            "errors of joins in answers",
            "errors",
            True,
        ),
        Kind(
            "reconnect_storm",
            "Reconnecting again and again without success",
            "{connections:connection} ended before a request succeeded, {worst} of them within ten seconds",
            "Each attempt costs the broker CPU for TLS and login; a fleet of such clients can overload a broker that "
            "restarts.",
            "Raise reconnect.backoff.ms and reconnect.backoff.max.ms; find out why the connections end.",
            ("reconnect.backoff.ms", "reconnect.backoff.max.ms"),
            ("storm_connections",),
            "connections that ended during or right after their handshakes, by client and broker",
            "connections",
        ),
        Kind(
            "producers_standing_still",
            "Producers that stood still",
            "{clients} of {producers} producers had no write acknowledged for {shortest_ns} or more, {longest} for "
            "{longest_ns}",
            "None of their records are written meanwhile: records wait in the producer's buffer (buffer.memory), and "
            "expire after delivery.timeout.ms; when the buffer is full, send() blocks or fails.",
            "Find out what they waited for: a broker that does not answer, partitions without a leader, fewer in-sync "
            "replicas than min.insync.replicas. Java keeps records for 2 minutes, librdkafka for 5: with "
            "delivery.timeout.ms above the longest standstill no record expires.",
            ("delivery.timeout.ms", "buffer.memory", "broker.session.timeout.ms"),
            ("writers_still_s", "felt_stood_still_s"),
            "Produce requests: time from a client's first unacknowledged request to its next acknowledgement, from "
            "any broker and topic",
            "slow",
            says_live="{clients} of {producers} producers had no write acknowledged for {longest_ns}",
            says_each="no write acknowledged for {longest_ns}",
        ),
        Kind(
            "records_lost",
            "Acknowledged records lost",
            "{records:record}, acknowledged by {by} (acks={acks}), {records:is|are} lost: the same offsets were "
            "acknowledged again for other records (partition and offsets {offsets})",
            "The producer considers them written. Their leader acknowledged them, and was replaced before a follower "
            "had copied them; the next leader's log does not have them.",
            "Set acks=all and enable.idempotence=true at the producer, min.insync.replicas=2 at the topic, and leave "
            "unclean.leader.election.enable=false: then a record is acknowledged only when all in-sync replicas have "
            "it. Produce these records again if their source still has them.",
            ("acks", "min.insync.replicas", "unclean.leader.election.enable"),
            (),
            "offsets of a partition in answers to Produce: the same ones twice, for different batches",
            says_each="{records:record} (acks={acks}, partition and offsets {offsets})",
        ),
        Kind(
            "records_given_up",
            "Records that a producer gave up on",
            "{given_up_records:record} failed ({errors}; batches: {given_up_batches}) and {given_up_records:was|were} "
            "never sent again",
            "They are in no log, unless a request that was not answered was written all the same. The application got "
            "an error for each, and must have handled it, or the records are lost.",
            "Remove the cause of the producer's delay, which this finding names if it is known. delivery.timeout.ms "
            "(librdkafka: message.timeout.ms) must be longer than an outage lasts, and the buffer large enough for it "
            "(buffer.memory, queue.buffering.max.kbytes). Have the application look at the result of each send, and "
            "send these records again if their source still has them.",
            ("delivery.timeout.ms", "message.timeout.ms", "retries", "buffer.memory"),
            (),
            "batches whose last request was refused or not answered, and whose records are in no later request, though "
            "their producer went on; records that expired in the client's queue are not in a capture, except as a time "
            "that timestamps skip when an idempotent producer begins a new epoch",
            says_each="{given_up_records:record} ({errors}; batches: {given_up_batches})",
        ),
        Kind(
            "doubtful_records",
            "Records possibly duplicated or lost",
            "{doubtful_records:record} in {failed} unanswered {failed:batch|batches} without a "
            "producer id; {resent} {resent:batch|batches} retried",
            "Without a producer id the broker cannot detect a duplicate: an unanswered batch may be in the log twice "
            "if it was retried, and may be lost if not.",
            "Set enable.idempotence=true (the default of Java since 3.0), acks=all.",
            ("enable.idempotence", "acks"),
            ("doubtful_records_min",),
            "batches of unanswered Produce requests, and the client's later batches with records of the same "
            "timestamps",
            says_each="{doubtful_records:record} in {failed} unanswered {failed:batch|batches}",
        ),
        Kind(
            "single_record_batches",
            "Batches of one record",
            "{single_share} of {batches} batches have one record, {rate_per_s} a second on each connection",
            "Each batch costs the broker a share of a request, 60 to 90 bytes of headers, and an append on every "
            "replica. A full batch costs hardly more, and compresses better.",
            "Raise linger.ms to 5-50 and leave batch.size at 16384 or more; do not call flush() after each produce() "
            "(confluent-kafka), or get() on each future (Java).",
            ("linger.ms", "batch.size"),
            ("batches_min", "single_record_share", "single_record_rate"),
            "Produce requests: record batches with one record, by client and topic",
            "batching",
            True,
        ),
        Kind(
            "no_compression",
            "No compression",
            "{plain_bytes} in {batches} uncompressed batches, {bytes_per_batch} each; a sample of records shrank by a "
            "factor of {measured_ratio}",
            "Records of one batch are similar: text and JSON shrink to a half or a fifth on the network, on every "
            "replica's disk, and for every consumer.",
            "Set compression.type to zstd or lz4 at the producer. Values that are already compressed or encrypted do "
            "not shrink: `kproxy convert --records TOPIC --record-values all` keeps values, so that this finding can "
            "measure it.",
            ("compression.type",),
            ("uncompressed_bytes_min", "uncompressed_rate", "uncompressed_batch_bytes", "compression_ratio"),
            "Produce requests: batches with codec none, by client and topic; if the table records has whole values, "
            "kproxy compresses a sample",
            "batching",
            True,
            "{plain_bytes} in {batches} uncompressed batches, {bytes_per_batch} each; whether they would shrink was "
            "not measured",
        ),
        Kind(
            "empty_fetches",
            "Empty fetches",
            "{empty_share} of {fetches} fetches were empty, {rate_per_s} a second on each connection",
            "An immediate empty answer costs broker and client as much as one with records.",
            "Raise fetch.max.wait.ms to 500 or more, so that the broker waits for data; look for a client that polls "
            "with a maximum wait of 0.",
            ("fetch.max.wait.ms", "fetch.min.bytes"),
            ("fetches_min", "empty_share", "empty_rate"),
            "Fetch answers without records, by client, above the rate that long polls explain",
            "fetching",
        ),
        Kind(
            "tiny_fetches",
            "Tiny fetches",
            "{bytes_per_fetch} per fetch, {rate_per_s} fetches a second on each open connection",
            "Every fetch up to about 100 kB costs the same: many small ones waste CPU of broker and consumer.",
            "Raise fetch.min.bytes (1 by default) to 10000 or more: the broker then answers when it has that many "
            "bytes, or after fetch.max.wait.ms.",
            ("fetch.min.bytes", "fetch.max.wait.ms"),
            ("fetches_min", "tiny_fetch_bytes", "tiny_fetch_rate"),
            "Fetch answers with records, by client",
            "fetching",
        ),
        Kind(
            "throttled",
            "Throttled by a quota",
            "{throttled} of {answers:answer} throttled, {throttle_ms} in total over all its connections",
            "The client exceeds a quota: the broker slows it down.",
            "Raise the quota with kafka-configs --alter (--entity-type users or clients): producer_byte_rate for "
            "Produce, consumer_byte_rate for Fetch, request_percentage for any, controller_mutation_rate for topics; "
            "or reduce the client's traffic (compression.type, batch.size).",
            ("producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate"),
            ("throttled_min", "throttled_share", "throttled_time_share"),
            "throttle_time_ms above 0 in answers, by client and API",
            "throttle",
            True,
        ),
        Kind(
            "old_versions",
            "Protocol versions that newer brokers dropped",
            "{apis} in {requests} requests: Kafka {kafka} does not support these versions",
            "Kafka 4.0 removed the protocol versions of clients before 2.1 (KIP-896), and other releases removed "
            "APIs: after an upgrade of the brokers this client cannot connect, or fails.",
            "Upgrade the client library (Java 2.1, librdkafka 2.0, or newer) before the brokers; `kproxy compat` "
            "lists the versions that a release supports.",
            ("the client's version",),
            (),
            "API versions of requests, compared with those of the newest release that kproxy knows",
            "clients",
            True,
        ),
        Kind(
            "weak_acks",
            "acks=0 or 1 on replicated topics",
            "acks={acks} for {requests} requests to topics with {replicas} replicas",
            "With acks=1 the leader acknowledges before a follower has the records; with acks=0 there is no "
            "acknowledgement. If the leader fails, acknowledged records are lost although replicas exist.",
            "Set acks=all (the default since Kafka 3.0) and min.insync.replicas=2 at the topic.",
            ("acks", "min.insync.replicas"),
            ("acks_requests_min",),
            "Produce requests with acks 0 or 1 to topics whose partitions have several replicas, by Metadata",
            "batching",
        ),
        Kind(
            "resent_not_idempotent",
            "Retries without idempotence",
            "{outcome}: failed batches were retried without a producer id, {resent} of them without knowing whether "
            "the first attempt was written",
            "A batch whose answer was an error or got lost may already be in the log. Retried without a producer id "
            "it is there twice; with several requests in flight it is appended after later batches.",
            "Set enable.idempotence=true (the default since Kafka 3.0; it needs acks=all, retries above 0 and at most "
            "5 of max.in.flight.requests.per.connection).",
            ("enable.idempotence", "max.in.flight.requests.per.connection"),
            ("resent_batches",),
            "batches without a producer id that were retried after an error or without an answer; gaps of offsets in "
            "answers, left by records that were written and not acknowledged",
            "errors",
            says_each="{outcome}",
        ),
        Kind(
            "hot_partition",
            "A hot partition",
            "{share} of the topic's bytes, {times_even} times an even share of {partitions} partitions",
            "One broker and one consumer carry most of the load: the partition's lag and latency limit the topic.",
            "Look at the keys: a very frequent key, null keys with a custom partitioner, or a producer that sets the "
            "partition itself. Make the key more specific, or leave partitioner.class at its default.",
            ("partitioner.class", "the records' keys"),
            ("hot_bytes_min", "hot_partition_times", "hot_partition_batches"),
            "bytes of Produce requests by partition; of Fetch answers for topics without Produce requests",
            "skew",
        ),
        Kind(
            "hot_broker",
            "A hot broker",
            "{share} of all bytes, {times_even} times an even share of {brokers} brokers",
            "Its network, disks and threads are busy while other brokers idle.",
            "Move leaders: kafka-leader-election --election-type preferred, then kafka-reassign-partitions; "
            "auto.leader.rebalance.enable=true keeps preferred leaders.",
            ("auto.leader.rebalance.enable",),
            ("hot_broker_times", "broker_requests_min"),
            "bytes of client requests and answers by broker",
            "talkers",
            True,
        ),
        Kind(
            "slow_broker",
            "A slow broker",
            "Produce takes {p99_ns} at p99, {others_p99_ns} on the other brokers",
            "Every partition that it leads is slow; partitions that it follows wait for it with acks=all.",
            "Look at its disks, its page cache and garbage collection, and at followers that lag "
            "(num.replica.fetchers, replica.lag.time.max.ms).",
            ("num.replica.fetchers", "num.io.threads"),
            ("produces_min", "slow_broker_times", "slow_produce_ms", "very_slow_produce_ms", "slow_produces_min"),
            "latency of Produce by broker, without waiting in the connection's queue and throttling",
            "latency",
            True,
            "Produce takes {p99_ns} at p99 ({produces} requests)",
        ),
        Kind(
            "connection_churn",
            "Connections that come and go",
            "{connections} connections, {per_minute} a minute, half of them open for less than {life_p50_ns}",
            "Each connection costs a TLS handshake or login, and Metadata; brokers limit their rate "
            "(max.connection.creation.rate).",
            "Keep one producer or consumer for the life of the process instead of one per message or per request; "
            "look for a client that crashes, or a health check.",
            ("connections.max.idle.ms", "max.connection.creation.rate"),
            ("connections_min", "connections_per_minute", "short_connection_s"),
            "connections that begin in the capture, by client; live: open and new connections",
            "connections",
            True,
            "{connections} connections, {per_minute} a minute, open for {life_mean_ns} on average",
        ),
        Kind(
            "rebalance_storm",
            "A group that rebalances again and again",
            "{rebalances:rebalance} in {span_ns}, {rebalancing_ns} spent rebalancing, most often: {cause}; "
            "{of_client} caused by members of client {client}",
            "During a rebalance some or all members stop consuming; afterwards uncommitted records are read again.",
            "Give members a group.instance.id, use CooperativeStickyAssignor (partition.assignment.strategy) or "
            "group.protocol=consumer (KIP-848).",
            ("session.timeout.ms", "max.poll.interval.ms", "group.instance.id", "partition.assignment.strategy"),
            ("rebalances_min", "rebalances_per_hour", "rebalancing_share"),
            "the table rebalances, by group; gaps of more than 5 minutes without traffic do not count",
            "rebalances",
            True,
            "{rebalances:rebalance} in {span_ns}, {rebalancing_ns} spent rebalancing, most often: {cause}",
        ),
        Kind(
            "straggler",
            "A member that the others wait for",
            "all other members waited {waited_ns} for it in {rebalances:rebalance}, {longest_ns} at most",
            "A rebalance ends when the last member has joined again, which it does in its next poll().",
            "Shorten the time between two polls: lower max.poll.records, or process records in another thread; lower "
            "max.poll.interval.ms so that the group removes a slow member earlier.",
            ("max.poll.records", "max.poll.interval.ms"),
            ("straggler_wait_s", "felt_stood_still_s"),
            "the table rebalances: the last member to join, and how long all others had waited",
            "rebalances",
            says_each="the others waited {waited_ns} in {rebalances:rebalance}",
        ),
        Kind(
            "members_gone",
            "A rebalance that waited for members that were gone",
            "in {rebalances:rebalance} the members waited {waited_ns} for {members} that did not come back, "
            "{longest_ns} at most; these were of {clients}",
            "The coordinator keeps a member until session.timeout.ms after its last heartbeat, and a rebalance waits "
            "for it. A client that was killed, or that gave its session up and joined as a new member, leaves its old "
            "member id behind; nobody consumes meanwhile.",
            "Close consumers, so that they leave, before they stop. Set group.instance.id: a member that comes back "
            "then takes its old place. A lower session.timeout.ms shortens the wait; it must exceed the brokers' "
            "pauses, since librdkafka ends its session by itself after that time without a heartbeat response.",
            ("session.timeout.ms", "group.instance.id"),
            ("straggler_wait_s", "felt_stood_still_s"),
            "the tables rebalances and group_events: expired members, and the time from the last JoinGroup request to "
            "the end of the join",
            "rebalances",
        ),
        Kind(
            "session_expired",
            "A member whose session expired",
            "{members:member} sent nothing for {silent_ns}, and the coordinator gave {members:its|their} partitions to "
            "others",
            "Nobody reads its partitions from its last request until the coordinator gives it up, session.timeout.ms "
            "later; what it had not committed is read again.",
            "If its process stood still: look at its garbage collection, CPU limit and host, and set "
            "session.timeout.ms above its pauses. If it was killed: close consumers on SIGTERM, so that they leave, "
            "and look for the out-of-memory killer; a lower session.timeout.ms shortens the wait.",
            ("session.timeout.ms", "heartbeat.interval.ms"),
            ("felt_stood_still_s", "unread_s"),
            "the table rebalances: expired sessions, and the requests of these members on their connections; live: "
            "rebalances by cause",
            "rebalances",
            True,
            "sessions of members expired in {rebalances:rebalance}, and coordinators gave their partitions to others",
        ),
        Kind(
            "commit_storm",
            "Commits for every record",
            "{commits} commits, {rate_per_s} a second on each connection",
            "Each commit is a write to __consumer_offsets with acks=all, and a round trip for the consumer.",
            "Commit once per poll or per second: enable.auto.commit with auto.commit.interval.ms=5000, or "
            "commitAsync() after the loop over the records of a poll.",
            ("auto.commit.interval.ms", "enable.auto.commit"),
            ("commits_min", "commit_rate"),
            "OffsetCommit requests by group",
            "offsets",
        ),
        Kind(
            "stopped_fetching",
            "A consumer that no longer fetches",
            "fetches until {last_fetch_ns}, commits no further offset since {last_progress_ns}; "
            "{heartbeats:heartbeat} in the {silent_ns} without a Fetch",
            "Its poll loop hangs, waits or is paused. Heartbeats come from another thread: the member keeps its "
            "partitions until max.poll.interval.ms has passed, and nobody reads them.",
            "Take a thread dump to see where the consumer waits between two polls: more members do not help. For long "
            "processing call pause(), or lower max.poll.records.",
            ("max.poll.interval.ms", "max.poll.records"),
            ("stopped_fetching_s",),
            "heartbeats of a member after its last Fetch, without a SyncGroup or commits of further offsets meanwhile; "
            "it begins with the last of these, since a client that prefetches fetches on",
            "groups",
            says_live="fetches until {last_fetch_ns}, and commits no offset; {heartbeats:heartbeat} in the "
            "{silent_ns} without a Fetch",
        ),
        Kind(
            "growing_lag",
            "Lag that grows",
            "lag grew from {first_lag_records} to {compared_lag_records} records in {span_ns}",
            "The consumer is slower than the producers: it falls behind until retention deletes unread records.",
            "Add members up to the number of partitions, or partitions; raise max.poll.records, "
            "max.partition.fetch.bytes and fetch.min.bytes; measure how long the consumer processes a record.",
            ("max.poll.records", "max.partition.fetch.bytes", "retention.ms"),
            ("lag_records_min", "lag_growth", "lag_growth_per_s", "lag_span_s"),
            "lag of each client and topic by its fetches, of each group and topic by its commits: size and growth, at "
            "the group's last request, or at the end if its members fell silent a minute before without leaving; "
            "growth is that of partitions whose lag was known at both moments; a "
            "group that is less than 10 s behind is left out: two commits may be that far apart",
            "lag",
            True,
            says_each="lag grew from {first_lag_records} to {compared_lag_records} records in {span_ns}",
        ),
        Kind(
            "open_transaction",
            "A transaction left open",
            "open for {open_ns} {lasted}; transaction.timeout.ms is {timeout_ms}",
            "In every partition that it wrote to, consumers with isolation.level=read_committed get no records after "
            "it, and compaction stops.",
            "The coordinator aborts it when the producer's transaction.timeout.ms has passed. `kproxy analyze "
            "transactions` lists that timeout, the partitions and their start offsets. To end it now: "
            "kafka-transactions.sh abort --topic TOPIC --partition N --start-offset OFFSET, for each partition. Then "
            "find out what the producer does between send and commit.",
            ("transaction.timeout.ms", "isolation.level"),
            ("open_transaction_s", "hung_transaction_s"),
            "requests of a transactional id without a later EndTxn",
            "transactions",
        ),
        Kind(
            "stuck_stable_offset",
            "Consumers of committed records stand still",
            "the last stable offset stood at {last_stable_offset} for {stuck_ns} while the log grew by {records}",
            "A transaction is open in this partition: consumers with read_committed get no records after it.",
            "kafka-transactions.sh find-hanging lists its producer; abort ends it. Lower transaction.timeout.ms.",
            ("transaction.timeout.ms", "isolation.level"),
            ("open_transaction_s", "hung_transaction_s", "lag_records_min", "felt_behind_records"),
            "last stable offset and high watermark of Fetch answers, by partition",
            "lag",
            says_each="stood at {last_stable_offset} for {stuck_ns} while the log grew by {records}",
        ),
        Kind(
            "retransmissions",
            "The network loses segments",
            "{retransmissions:segment} retransmitted, {segment_share} of all",
            "Each lost segment stops its connection for 200 ms or more, and halves its throughput.",
            "Look at interfaces, duplex, MTU and saturated links between the two; larger buffers reduce the effect "
            "(socket.send.buffer.bytes, socket.receive.buffer.bytes).",
            ("socket.send.buffer.bytes", "socket.receive.buffer.bytes"),
            ("retransmissions_min", "retransmission_share"),
            "TCP of the capture: retransmitted segments, by client host and broker",
            "connections",
        ),
        Kind(
            "zero_windows",
            "A receiver that reads too slowly",
            "a receive window was closed {zero_windows:time}; connections: {connections}",
            "Client or broker does not read its socket: its peer cannot send meanwhile.",
            "If it is a consumer: its process lacks CPU, or pauses (garbage collection, swap); raise "
            "receive.buffer.bytes. If it is a broker: raise socket.receive.buffer.bytes and num.network.threads.",
            ("receive.buffer.bytes", "socket.receive.buffer.bytes"),
            ("zero_windows_min",),
            "TCP of the capture: windows of 0, by client host and broker",
            "connections",
        ),
        Kind(
            "core_full",
            "Bytes wait for kproxy",
            "bytes wait {loop_lag_ns} for kproxy at p99; its process uses {core_share} of a core",
            "Clients measure kproxy's own delay as latency of the brokers: its core is full or, if its process uses "
            "much less than a core, other processes or a CPU limit slow it down.",
            "If the core is full: start more processes with --workers, or set detail to headers. Otherwise: raise the "
            "container's CPU limit, or move other processes off the machine.",
            ("workers", "detail"),
            ("loop_lag_ms", "core_share"),
            "the running process: kproxy_loop_lag_seconds and its CPU time",
            None,
            True,
        ),
    )
}
