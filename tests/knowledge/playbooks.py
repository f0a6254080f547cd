"""What happens in a run: members of every client and strategy that come, go, die, are slow or fenced; brokers that die;
leaders that move; topics that grow. Each playbook lasts at most a few minutes, and looks at what brokers know whenever
something has settled.
"""

import json
import signal
import time
from collections.abc import Callable

from tests.broker.cluster import wait_for
from tests.knowledge.rig import ELECTION, FEATURES, REASSIGN, SHARE_GROUPS, STREAMS_GROUPS, TOPICS, Rig

RD, PY = "confluent-kafka", "kafka-python"
RANGE = "org.apache.kafka.clients.consumer.RangeAssignor"
ROUND_ROBIN = "org.apache.kafka.clients.consumer.RoundRobinAssignor"
STICKY = "org.apache.kafka.clients.consumer.StickyAssignor"
COOPERATIVE = "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"


def members(rig: Rig) -> None:
    """Classic groups, each of several clients: range, round robin, sticky, cooperative, static; and wrong leaders."""
    rig.topics(orders=7, clicks=4)
    rig.loaded("orders", "clicks")
    both = ["orders", "clicks"]

    rig.java("range-java", "range-g", ["orders"], partition_assignment_strategy=RANGE, max_poll_interval_ms=7000)
    rig.java("rr-java", "rr-g", both, partition_assignment_strategy=ROUND_ROBIN)
    rig.java("sticky-1", "sticky-g", both, partition_assignment_strategy=STICKY)
    rig.java("coop-java", "coop-g", ["orders"], partition_assignment_strategy=COOPERATIVE)
    rig.java("static-1", "static-g", ["orders"], partition_assignment_strategy=RANGE, group_instance_id="one")
    rig.java("moved-1", "moved-g", ["orders"], partition_assignment_strategy="Members$Moved")
    rig.java("twice-1", "twice-g", ["orders"], partition_assignment_strategy="Members$Twice")
    for group in ("range-g", "rr-g", "sticky-g", "coop-g", "static-g", "moved-g", "twice-g"):
        rig.settled(group, 1)
    rig.java("sticky-2", "sticky-g", both, partition_assignment_strategy=STICKY)
    rig.java("moved-2", "moved-g", ["orders"], partition_assignment_strategy="Members$Moved")
    rig.java("twice-2", "twice-g", ["orders"], partition_assignment_strategy="Members$Twice")
    rig.python(RD, "range-rd", "range-g", ["orders"], partition_assignment_strategy="range")
    rig.python(PY, "range-py", "range-g", ["orders"], partition_assignment_strategy="range")
    rig.python(RD, "rr-rd", "rr-g", both, partition_assignment_strategy="roundrobin")
    rig.python(PY, "rr-py", "rr-g", ["orders"], partition_assignment_strategy="roundrobin")
    rig.python(RD, "coop-rd", "coop-g", ["orders"], partition_assignment_strategy="cooperative-sticky")
    static = {"partition_assignment_strategy": "range", "group_instance_id": "two"}
    rig.python(RD, "static-2", "static-g", ["orders"], **static)
    for group, count in {"range-g": 3, "rr-g": 3, "sticky-g": 2, "coop-g": 2, "static-g": 2}.items():
        rig.settled(group, count)
    rig.describe()

    # The same instance again: the older one is fenced. Then one that comes back under its instance's name.
    rig.python(RD, "static-2b", "static-g", ["orders"], **static)
    wait_for("the older member to be fenced", lambda: bool(rig.saw("static-2", "error")), 40)
    rig.kill("static-2")
    # Dead, slow, gone.
    rig.kill("range-rd")
    rig.close_members("rr-py")
    rig.settled("rr-g", 2)
    rig.settled("range-g", 2)
    rig.tell("range-java", "slow", ms=10000)  # it leaves by itself, and comes back
    rig.tell("sticky-1", "topics", topics=["clicks"])
    wait_for("the slow member to lose its partitions", lambda: bool(rig.saw("range-java", "lost")), 30)
    rig.settled("range-g", 2)
    rig.settled("sticky-g", 2)
    rig.python(RD, "coop-rd2", "coop-g", ["orders"], partition_assignment_strategy="cooperative-sticky")
    rig.settled("coop-g", 3)
    rig.describe()

    # A topic grows: leaders of the groups see it in Metadata and rejoin.
    rig.operate("grow", TOPICS, "--alter", "--topic", "orders", "--partitions", "9")
    wait_for("a rebalance for the new partitions", lambda: owned(rig, "coop-g", "orders") == 9, 40)
    frozen(rig, "range-py", "range-g", 2)
    for group, count in {"rr-g": 2, "coop-g": 3, "static-g": 2}.items():
        rig.settled(group, count)
    rig.describe()
    rig.close_members("coop-java", "rr-java", "rr-rd", "range-java")
    for group, count in {"rr-g": 0, "coop-g": 2, "range-g": 1}.items():
        rig.settled(group, count)
    rig.describe()


def owned(rig: Rig, group: str, topic: str) -> int:
    """How many partitions of a topic members of a group own, as they said themselves: for those of cooperative ones."""
    last: set[str] = set()
    for name, lines in list(rig.seen.items()):
        if name.startswith(group.removesuffix("-g")):
            mine: set[str] = set()
            for line in list(lines):
                if line["what"] == "assigned":
                    mine |= set(line["detail"])
                elif line["what"] in ("revoked", "lost"):
                    mine -= set(line["detail"])
            last |= {each for each in mine if each.rpartition("-")[0] == topic}
    return len(last)


def frozen(rig: Rig, name: str, group: str, members: int) -> None:
    """A member is stopped past its session, and goes on."""
    rig.signal(name, signal.SIGSTOP)
    rig.settled(group, members - 1)
    rig.signal(name, signal.SIGCONT)
    rig.settled(group, members)


def epochs(rig: Rig) -> None:
    """KIP-848, share groups, Kafka Streams by both protocols, transactions with offsets."""
    rig.topics(orders=6, clicks=3, paid=2)
    rig.loaded("orders", "clicks")
    new = {"group_protocol": "consumer"}
    rig.java("new-1", "new-g", ["orders"], **new)
    rig.settled("new-g", 1)
    rig.java("share-1", "share-g", ["clicks"], kind="share")
    state = str(rig.folder / "streams")
    streams = {"state_dir": f"{state}-1", "commit_interval_ms": 2000}
    rig.java("streams-1", "streams-g", ["orders"], kind="streams", **streams)
    rig.java("tx-1", "tx-g", ["orders"], kind="transactions", transactional_id="tx-1", output="paid")
    rig.python(RD, "new-2", "new-g", ["orders"], **new)
    rig.settled("new-g", 2)
    rig.settled("tx-g", 1)
    rig.settled("streams-g", 1)
    more = streams | {"state_dir": f"{state}-2"}
    rig.java("streams-2", "streams-g", ["orders"], kind="streams", **more)
    rig.java("share-2", "share-g", ["clicks"], kind="share", jvm="killed")
    rig.java("new-3", "new-g", ["orders", "clicks"], jvm="killed", **new)
    rig.settled("new-g", 3)
    rig.settled("streams-g", 2)
    rig.settled("share-g", 2, kind="share")
    describe_with_shares(rig)

    rig.java("tx-2", "tx-g", ["orders"], kind="transactions", transactional_id="tx-2", output="paid")
    rig.settled("tx-g", 2)
    rig.kill("new-3")  # and share-2 with it
    rig.settled("new-g", 2)
    rig.operate("grow", TOPICS, "--alter", "--topic", "orders", "--partitions", "8")
    rig.tell("new-1", "topics", topics=["orders", "clicks"])
    wait_for("the new partitions to be assigned", lambda: owned(rig, "new-g", "orders") == 8, 40)
    rig.settled("new-g", 2)
    rig.settled("share-g", 1, kind="share")
    describe_with_shares(rig)
    rig.close_members("new-2")
    rig.settled("new-g", 1)
    static = new | {"group_instance_id": "one"}
    rig.python(RD, "new-4", "new-g", ["orders"], **static)
    rig.settled("new-g", 2)
    rig.close_members("tx-1", "streams-2", "share-1")
    rig.settled("tx-g", 1)
    rig.describe()
    rig.close_members("new-1", "new-4", "tx-2", "streams-1")


def describe_with_shares(rig: Rig) -> None:
    """Share groups too, which a tool of their own asks for."""
    rig.describe()
    for how in ("--state", "--members"):
        rig.ask(f"share{how}", SHARE_GROUPS, "--describe", "--all-groups", how, "--verbose")


def brokers(rig: Rig) -> None:
    """The coordinator's broker dies, comes back; leaders are moved; topics are made, grown and deleted."""
    rig.topics(orders=6, clicks=3)
    rig.loaded("orders", "clicks")
    rig.python(RD, "range-rd", "range-g", ["orders"], partition_assignment_strategy="range")
    rig.java("range-java", "range-g", ["orders"], partition_assignment_strategy=RANGE)
    rig.python(RD, "coop-rd", "coop-g", ["clicks"], partition_assignment_strategy="cooperative-sticky")
    rig.java("coop-java", "coop-g", ["clicks"], partition_assignment_strategy=COOPERATIVE)
    rig.java("new-1", "new-g", ["orders"], group_protocol="consumer")
    for group, count in {"range-g": 2, "coop-g": 2, "new-g": 1}.items():
        rig.settled(group, count)
    rig.describe()

    number = rig.coordinator("range-g")
    broker = rig.cluster.brokers[number - 1]
    rig.note("broker_kill", broker=number)
    broker.stop(kill=True)
    for group, count in {"range-g": 2, "coop-g": 2, "new-g": 1}.items():
        rig.settled(group, count)
    rig.python(RD, "range-rd2", "range-g", ["orders"], partition_assignment_strategy="range")
    rig.settled("range-g", 3)
    rig.describe()
    rig.note("broker_start", broker=number)
    broker.start()
    broker.wait_until_started()
    wait_for("the broker to be in sync again", lambda: in_sync(rig), 60, pause_s=1)
    rig.operate("elect", ELECTION, "--election-type", "preferred", "--all-topic-partitions")
    for group, count in {"range-g": 3, "coop-g": 2, "new-g": 1}.items():
        rig.settled(group, count)
    rig.describe()

    plan = {"version": 1, "partitions": [{"topic": "clicks", "partition": 0, "replicas": [3, 1]}]}
    file = rig.folder / "plan.json"
    file.write_text(json.dumps(plan))
    rig.operate("reassign", REASSIGN, "--reassignment-json-file", str(file), "--execute")
    rig.operate("grow", TOPICS, "--alter", "--topic", "clicks", "--partitions", "5")
    rig.topics(brief=2)
    rig.operate("delete", TOPICS, "--delete", "--topic", "brief")
    wait_for("the new partitions to be assigned", lambda: owned(rig, "coop-g", "clicks") == 5, 40)
    for group, count in {"range-g": 3, "coop-g": 2}.items():
        rig.settled(group, count)
    time.sleep(4)  # a refresh of Metadata, by which the wire says what was moved
    rig.describe()


def in_sync(rig: Rig) -> bool:
    topics = rig.admin.list_topics(timeout=10).topics.values()
    return all(len(each.isrs) == len(each.replicas) for topic in topics for each in topic.partitions.values())


def short(rig: Rig) -> None:
    """Some of all that, in a minute: every client in one group, a wrong leader, a newer group, a broker that dies."""
    rig.topics(orders=5)
    stop = rig.loaded("orders")
    rig.java("range-java", "range-g", ["orders"], partition_assignment_strategy=RANGE)
    rig.java("moved-1", "moved-g", ["orders"], partition_assignment_strategy="Members$Moved")
    rig.java("new-1", "new-g", ["orders"], group_protocol="consumer")
    rig.settled("range-g", 1)
    rig.settled("moved-g", 1)
    rig.settled("new-g", 1)
    rig.java("moved-2", "moved-g", ["orders"], partition_assignment_strategy="Members$Moved")
    rig.python(RD, "range-rd", "range-g", ["orders"], partition_assignment_strategy="range")
    rig.python(PY, "range-py", "range-g", ["orders"], partition_assignment_strategy="range")
    rig.python(RD, "new-2", "new-g", ["orders"], group_protocol="consumer")
    rig.python(RD, "coop-rd", "coop-g", ["orders"], partition_assignment_strategy="cooperative-sticky")
    rig.java("coop-java", "coop-g", ["orders"], partition_assignment_strategy=COOPERATIVE)
    for group, count in {"range-g": 3, "moved-g": 2, "new-g": 2, "coop-g": 2}.items():
        rig.settled(group, count)
    rig.describe()
    rig.kill("range-rd")
    rig.operate("grow", TOPICS, "--alter", "--topic", "orders", "--partitions", "7")
    wait_for("the new partitions to be assigned", lambda: owned(rig, "coop-g", "orders") == 7, 40)
    for group, count in {"range-g": 2, "moved-g": 2, "new-g": 2, "coop-g": 2}.items():
        rig.settled(group, count)
    rig.describe()
    number = rig.coordinator("range-g")
    rig.note("broker_kill", broker=number)
    rig.cluster.brokers[number - 1].stop(kill=True)
    for group, count in {"range-g": 2, "moved-g": 2, "new-g": 2, "coop-g": 2}.items():
        rig.settled(group, count)
    rig.close_members("range-java", "range-py")
    rig.settled("range-g", 0)
    time.sleep(4)  # it falls behind; and a refresh of Metadata, by which the wire says who leads now
    stop()
    rig.committed()
    rig.note("quiet")
    rig.describe()


def foreign(rig: Rig) -> None:
    """Workers of Kafka Connect, and Kafka Streams by the classic protocol and by its own (KIP-1071)."""
    rig.topics(orders=4, clicks=2)
    rig.loaded("orders", "clicks")
    rig.operate("feature", FEATURES, "upgrade", "--feature", "streams.version=1")
    state = {"commit_interval_ms": 2000, "state_dir": str(rig.folder / "streams-1"), "num_standby_replicas": 1}
    rig.java("streams-1", "streams-g", ["orders"], kind="streams", **state)
    rig.settled("streams-g", 1)
    beat = {"state_dir": str(rig.folder / "new-1"), "group_protocol": "streams", "commit_interval_ms": 2000}
    rig.java("tasks-1", "tasks-g", ["orders"], kind="streams", **beat)
    rig.settled("tasks-g", 1, kind="streams")
    state |= {"state_dir": str(rig.folder / "streams-2")}
    rig.java("streams-2", "streams-g", ["orders"], kind="streams", **state)
    rig.java(
        "tasks-2", "tasks-g", ["orders"], kind="streams", jvm="killed", **beat | {"state_dir": f"{rig.folder}/new-2"}
    )
    rig.worker("worker-1", "connect-g")
    rig.connect("worker-1", "/connectors/numbers/config", {"connector.class": "Numbers", "tasks.max": 4})
    workers(rig, 1, "connect-g", "worker-1")
    rig.worker("worker-2", "connect-g")
    workers(rig, 2, "connect-g", "worker-1")
    rig.settled("streams-g", 2)
    rig.settled("tasks-g", 2, kind="streams")
    time.sleep(2)
    describe_foreign(rig, "worker-1")
    rig.kill("worker-2")
    rig.kill("tasks-2")
    workers(rig, 1, "connect-g", "worker-1")
    rig.settled("tasks-g", 1, kind="streams")
    time.sleep(2)
    describe_foreign(rig, "worker-1")
    rig.worker("worker-0", "eager-g", "eager")
    rig.connect("worker-0", "/connectors/numbers/config", {"connector.class": "Numbers", "tasks.max": 2})
    workers(rig, 1, "eager-g", "worker-0", tasks=2)
    describe_foreign(rig, "worker-0")
    rig.close_members("streams-1", "streams-2", "tasks-1")


def workers(rig: Rig, count: int, group: str, one: str, tasks: int = 4) -> None:
    """Waits until so many workers run the connector and all of its tasks."""
    rig.settled(group, count, kind="classic")

    def shared() -> bool:
        found = rig.running(one, "numbers")
        return len(found) == count and sum(map(len, found.values())) == tasks + 1

    wait_for(f"{count} workers to run all tasks", shared, 60, pause_s=0.3)


def describe_foreign(rig: Rig, worker: str) -> None:
    """Beside what `describe` asks: who runs which task, by Connect itself, and the groups of Streams' own protocol."""
    rig.describe()
    for how in ("--state", "--members"):
        rig.ask(f"streams{how}", STREAMS_GROUPS, "--describe", "--group", "tasks-g", how, "--verbose")
    begin = time.time_ns()
    running = rig.running(worker, "numbers")
    line = {"from_ns": begin, "to_ns": time.time_ns(), "what": "connect", "text": json.dumps(running)}
    rig.write("asked", line)


PLAYBOOKS: dict[str, Callable[[Rig], None]] = {
    each.__name__: each for each in (short, members, epochs, brokers, foreign)
}
