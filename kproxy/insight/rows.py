"""What insight says, as rows: each field is a column of the table of that name. Times are nanoseconds since the epoch.

Refuses to know how a row comes about.
"""

from typing import NamedTuple


class GroupEvent(NamedTuple):
    """One thing that happened in a group, at the end of the message that says so.

    coordinator_found, coordinator_not_found, coordinator_moved; join, join_answered, sync, sync_answered; assigned,
    revoked (partitions, by their names in `reason`), tasks_assigned (of Streams, and what Connect adds);
    assignment_differs; heartbeat_failed, commit_failed,
    offset_fetch_failed; offsets_committed, offsets_aborted (of a transaction that ended); leave; member_replaced;
    described, deleted; of the coordinator's log, where it is fetched: stored, removed (by its clock); and what is only
    inferred: expired, never_joined.
    """

    time_ns: int
    cluster: str
    group_id: str
    protocol: str  # classic, consumer, share, streams; unknown, as long as no member was seen
    event: str
    member_id: str | None = None
    group_instance_id: str | None = None
    client_id: str | None = None
    client_address: str | None = None
    generation: int | None = None  # the epoch, for the newer protocols
    coordinator_id: int | None = None
    error: str | None = None
    reason: str | None = None
    connection: int | None = None
    number: int | None = None
    group_type: str | None = None  # consumer, connect, streams, share, or what else members call themselves


class Rebalance(NamedTuple):
    """A generation of a group, from what set it off to its last member's assignment."""

    cluster: str
    group_id: str
    protocol: str
    strategy: str | None
    generation: int
    cause: str
    cause_member: str | None
    reason: str
    started_ns: int  # what set it off was said, or the first member joined
    joined_ns: int  # the coordinator answered: all had joined, or it waited no longer
    ended_ns: int | None  # the last member got its assignment; None: not all did
    members_before: int
    members_after: int
    rejoined: int  # members of before that had to join again: the herd
    last_to_join: str | None
    coordinator_id: int | None
    waited_ns: int | None = None  # that all others waited for the last one to join
    group_type: str | None = None


class Assignment(NamedTuple):
    """A partition that a member was given; of Connect a task, or (-1) the connector itself, as its topic."""

    time_ns: int
    cluster: str
    group_id: str
    generation: int
    member_id: str
    client_id: str | None
    topic: str
    partition: int
    strategy: str | None
    # With what the strategy computes; of sticky ones, that they hold: each partition once, at one who wants it. None:
    # it cannot be computed.
    agrees: bool | None
    group_type: str | None = None


class CommittedOffset(NamedTuple):
    """An offset of a group, as its coordinator wrote it to __consumer_offsets, where that is fetched."""

    time_ns: int  # of the commit, or of what else changed it, by the coordinator's clock
    cluster: str
    group_id: str
    topic: str
    partition: int
    offset: int | None  # the next one to read; None: there is none any more
    leader_epoch: int | None
    metadata: str | None
    # committed; pending, in a transaction; aborted, with it; removed: expired, deleted, or the group is
    change: str
    producer_id: int | None  # of the transaction
    expires_ns: int | None  # as brokers before 2.1 wrote it
    log_partition: int  # of __consumer_offsets
    log_offset: int
    connection: int | None = None  # that first showed it
    number: int | None = None


class Transaction(NamedTuple):
    """A transactional id, as its coordinator said: in __transaction_state, where that is fetched, or to who asked."""

    time_ns: int  # of the change, by the coordinator's clock; of an answer, when it came
    cluster: str
    transactional_id: str
    state: str  # as Kafka's tools call it; Dead: there is none any more
    producer_id: int | None
    producer_epoch: int | None
    timeout_ms: int | None
    started_ns: int | None
    partitions: str | None  # "orders-0, orders-1"
    partition_count: int
    coordinator_id: int | None  # the broker that was asked
    log_partition: int | None  # of __transaction_state; None: an answer to InitProducerId or DescribeTransactions
    log_offset: int | None
    connection: int | None = None  # that first showed it
    number: int | None = None


class RegistryRow(NamedTuple):
    """One operation on ZooKeeper's tree, or a watch that fired; of a transaction one for each of its parts."""

    time_ns: int  # the answer's last byte
    cluster: str
    session: str | None  # in hexadecimal, as ZooKeeper's log writes it; None: its begin was not seen
    client_address: str | None
    client_port: int | None
    xid: int
    op: str
    path: str | None
    version: int | None  # that was asked for, or that the node has now
    zxid: int | None
    ephemeral: bool | None  # of a create
    error: str | None
    latency_ns: int | None
    value: str | None  # that was written, or read
    kind: str
    watch: bool | None  # set by a read
    server_address: str | None = None
    server_port: int | None = None
    connection: int | None = None
    number: int | None = None  # of the operation on its connection


class Leadership(NamedTuple):
    """A partition whose leader or replicas are others than were known, and what said so."""

    time_ns: int
    cluster: str
    api: str
    controller_id: int | None  # who decided; None: it is not in that message
    controller_epoch: int | None
    topic: str
    partition: int
    leader: int | None  # None: it has none, or the partition is gone
    leader_epoch: int | None
    isr: tuple[int, ...] | None
    replicas: tuple[int, ...] | None
    change: str  # created, elected, isr_shrunk, isr_grown, offline, moved, deleted


class Topology(NamedTuple):
    """A broker, controller, topic or partition that is new, other than before, or gone, and what said so."""

    time_ns: int
    cluster: str
    kind: str  # broker, controller, topic, partition
    broker_id: int | None = None  # the node, of controllers too
    host: str | None = None
    port: int | None = None
    rack: str | None = None
    topic: str | None = None
    partition: int | None = None
    leader: int | None = None
    isr: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    # appeared, changed, gone; of brokers also registered, fenced, unfenced, shutting_down; of controllers active; of
    # topics grown, recreated, and unknown, invalid_name, unauthorized to a client that asked; of partitions as in
    # leadership
    change: str | None = None
    api: str | None = None  # what said so
    topic_id: str | None = None
    partitions: int | None = None  # how many a topic has


class Change(NamedTuple):
    """An administrative request about one resource, and its outcome; no secrets."""

    time_ns: int  # of the answer, or of the request that got none
    cluster: str
    api: str
    resource_type: str  # as Kafka calls them, in lower case: topic, group, user, broker, client_quota, ...
    resource_name: str | None  # None: all of them, or it has no name
    client_id: str | None = None
    client_address: str | None = None
    principal: str | None = None
    error: str | None = None  # None: it was done, if it was answered
    detail: str | None = None  # JSON: what was asked, and what the answer adds
    connection: int | None = None
    number: int | None = None
    answered: bool = True


Row = GroupEvent | Rebalance | Assignment | Leadership | Topology | Change | RegistryRow | CommittedOffset | Transaction

# The table that the rows of a kind are in.
TABLES: dict[type, str] = {
    GroupEvent: "group_events",
    Rebalance: "rebalances",
    Assignment: "assignments",
    Leadership: "leadership",
    Topology: "topology",
    Change: "changes",
    RegistryRow: "registry",
    CommittedOffset: "committed_offsets",
    Transaction: "transactions",
}
