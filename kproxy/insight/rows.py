"""Rows of insight: each class is a table, each field a column. Times are nanoseconds since the Unix epoch.

Refuses to know how a row comes about.
"""

from typing import NamedTuple


class GroupEvent(NamedTuple):
    """An event of a group, at the end of the message that shows it.

    coordinator_found, coordinator_not_found, coordinator_moved; join, join_answered, sync, sync_answered; assigned,
    revoked (`reason` names the partitions), tasks_assigned (Streams tasks, and remarks of Connect); assignment_differs;
    heartbeat_failed, commit_failed, offset_fetch_failed; offsets_committed, offsets_aborted (at the end of a
    transaction); leave; member_replaced; described, deleted; stored, removed (records of the coordinator's log, if it
    is fetched, by the coordinator's clock); expired, never_joined (inferred: no message shows them).
    """

    time_ns: int
    cluster: str
    group_id: str
    protocol: str  # classic, consumer, share, streams; unknown: no member was seen so far
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
    group_type: str | None = None  # consumer, connect, streams, share, or another type that its members name


class Rebalance(NamedTuple):
    """A generation of a group, from its cause to the assignment of its last member."""

    cluster: str
    group_id: str
    protocol: str
    strategy: str | None
    generation: int
    cause: str
    cause_member: str | None
    reason: str
    started_ns: int  # the request that caused it, or the first JoinGroup
    joined_ns: int  # the coordinator's response: all members had joined, or it waited no longer
    ended_ns: int | None  # the last member got its assignment; None: not all did
    members_before: int
    members_after: int
    rejoined: int  # members of the previous generation that had to rejoin: the herd
    last_to_join: str | None
    coordinator_id: int | None
    waited_ns: int | None = None  # how long all others waited for the last member to join
    group_type: str | None = None


class Assignment(NamedTuple):
    """A partition assigned to a member. Connect: `topic` is the connector, `partition` a task or -1 (the connector)."""

    time_ns: int
    cluster: str
    group_id: str
    generation: int
    member_id: str
    client_id: str | None
    topic: str
    partition: int
    strategy: str | None
    # Whether the assignment equals the result of the strategy; with a sticky strategy, whether each partition has one
    # owner, which subscribes to its topic. None: it cannot be computed.
    agrees: bool | None
    group_type: str | None = None


class CommittedOffset(NamedTuple):
    """An offset of a group, as its coordinator wrote it to __consumer_offsets, if a client fetches that log."""

    time_ns: int  # the commit, or another change of the offset, by the coordinator's clock
    cluster: str
    group_id: str
    topic: str
    partition: int
    offset: int | None  # the next offset to read; None: the offset was removed
    leader_epoch: int | None
    metadata: str | None
    # committed; pending: in a transaction; aborted: with it; removed: expired, deleted, or deleted with its group
    change: str
    producer_id: int | None  # of the transaction
    expires_ns: int | None  # as brokers before 2.1 wrote it
    log_partition: int  # of __consumer_offsets
    log_offset: int
    connection: int | None = None  # the first connection that showed it
    number: int | None = None


class Transaction(NamedTuple):
    """The state of a transactional id, from __transaction_state, if it is fetched, or from a coordinator's response."""

    time_ns: int  # time of the change, by the coordinator's clock; from a response: time of its arrival
    cluster: str
    transactional_id: str
    state: str  # as Kafka's tools name it; Dead: it was removed
    producer_id: int | None
    producer_epoch: int | None
    timeout_ms: int | None
    started_ns: int | None
    partitions: str | None  # "orders-0, orders-1"
    partition_count: int
    coordinator_id: int | None  # the broker that returned it
    log_partition: int | None  # of __transaction_state; None: an InitProducerId or DescribeTransactions response
    log_offset: int | None
    connection: int | None = None  # the first connection that showed it
    number: int | None = None


class RegistryRow(NamedTuple):
    """One operation on ZooKeeper's tree, or a watch that fired; a transaction has one row for each of its parts."""

    time_ns: int  # the response's last byte
    cluster: str
    session: str | None  # hexadecimal, as in ZooKeeper's log; None: its start was not seen
    client_address: str | None
    client_port: int | None
    xid: int
    op: str
    path: str | None
    version: int | None  # the requested version, or the node's version now
    zxid: int | None
    ephemeral: bool | None  # for a create
    error: str | None
    latency_ns: int | None
    value: str | None  # the value written or read
    kind: str
    watch: bool | None  # set by a read
    server_address: str | None = None
    server_port: int | None = None
    connection: int | None = None
    number: int | None = None  # the operation's number on its connection


class Leadership(NamedTuple):
    """A partition whose leader or replicas changed, and the API that showed it."""

    time_ns: int
    cluster: str
    api: str
    controller_id: int | None  # the controller that decided; None: the message does not name it
    controller_epoch: int | None
    topic: str
    partition: int
    leader: int | None  # None: it has none, or the partition was deleted
    leader_epoch: int | None
    isr: tuple[int, ...] | None
    replicas: tuple[int, ...] | None
    change: str  # created, elected, isr_shrunk, isr_grown, offline, moved, deleted


class Topology(NamedTuple):
    """A broker, controller, topic or partition that appeared, changed or disappeared, and the API that showed it."""

    time_ns: int
    cluster: str
    kind: str  # broker, controller, topic, partition
    broker_id: int | None = None  # the node id, also of a controller
    host: str | None = None
    port: int | None = None
    rack: str | None = None
    topic: str | None = None
    partition: int | None = None
    leader: int | None = None
    isr: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    # appeared, changed, gone; brokers also listener, registered, fenced, unfenced, shutting_down; controllers active;
    # topics grown, recreated, and for a client that was refused unknown, invalid_name, unauthorized; partitions as in
    # leadership
    change: str | None = None
    api: str | None = None  # the API that showed it
    topic_id: str | None = None
    partitions: int | None = None  # how many a topic has


class Change(NamedTuple):
    """An administrative request about one resource, and its outcome; no secrets."""

    time_ns: int  # the response, or the request if it was not answered
    cluster: str
    api: str
    resource_type: str  # Kafka's name in lower case: topic, group, user, broker, client_quota, ...
    resource_name: str | None  # None: all of them, or it has no name
    client_id: str | None = None
    client_address: str | None = None
    principal: str | None = None
    error: str | None = None  # None: it succeeded, if it was answered
    detail: str | None = None  # JSON: fields of the request, and fields only in the response
    connection: int | None = None
    number: int | None = None
    answered: bool = True


Row = GroupEvent | Rebalance | Assignment | Leadership | Topology | Change | RegistryRow | CommittedOffset | Transaction

# Names of tables by the class of their rows.
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
