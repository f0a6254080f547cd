"""Kafka's own command line tools, as the tests use them."""

import itertools
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.broker.asking import Asking
from tests.broker.cluster import wait_for
from tests.broker.jvm import java, tool

PRODUCER = "org.apache.kafka.tools.ConsoleProducer"
CONSUMER = "org.apache.kafka.tools.consumer.ConsoleConsumer"
SHARE_CONSUMER = "org.apache.kafka.tools.consumer.ConsoleShareConsumer"
TOPICS = "org.apache.kafka.tools.TopicCommand"
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
SHARE_GROUPS = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
VERIFIABLE_PRODUCER = "org.apache.kafka.tools.VerifiableProducer"
CONFIGS = "kafka.admin.ConfigCommand"
CLUSTER = "org.apache.kafka.tools.ClusterTool"
ELECTION = "org.apache.kafka.tools.LeaderElectionCommand"

_numbers = itertools.count(1)


def as_root() -> list[str]:
    """The prefix of a command that captures packets. CI runs as root; users who are not root and have no sudo skip the
    test."""
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    ):
        return ["sudo", "-n"]
    pytest.skip("capturing packets needs root, or a sudo that asks for no password")


@contextmanager
def tcpdump(path: Path, *wanted: str) -> Iterator[None]:
    """Capture loopback into `path` while the context lasts, from its beginning. wanted: tcpdump's filter."""
    program = shutil.which("tcpdump") or "/usr/sbin/tcpdump"
    command = [*as_root(), program, "-i", "lo", "--immediate-mode", "-U", "-B", "65536", "-w", str(path), *wanted]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b"listening on" not in process.stderr.readline():
            assert process.poll() is None
        yield
    finally:
        process.terminate()
        process.communicate(timeout=30)


def user() -> str:
    """The user who runs the tests."""
    return pwd.getpwuid(os.geteuid()).pw_name


def create_topic(bootstrap: str, partitions: int = 3, *, on: int | None = None) -> str:
    """Create a topic with a unique name, on three brokers or with one partition on one; returns once all running
    brokers know it.

    If the response is late, the tool repeats the request, though the first one has created the topic.
    """
    topic = f"topic-{next(_numbers)}"
    shape = ["--partitions", str(partitions), "--replication-factor", "3"]
    if on is not None:
        shape = ["--replica-assignment", str(on)]
    tool(TOPICS, "--bootstrap-server", bootstrap, "--create", "--if-not-exists", "--topic", topic, *shape)
    wait_for(f"every broker to know {topic}", lambda: _all_know(bootstrap, topic))
    return topic


def _all_know(bootstrap: str, topic: str) -> bool:
    """Whether each broker names a leader for each partition.

    The controller responds once it has the topic itself. A broker learns of it a moment later, or much later on a busy
    machine, and until then responds UNKNOWN_TOPIC_OR_PARTITION, which librdkafka reports to its consumer.
    """
    body = {"topics": [{"name": topic}], "allowAutoTopicCreation": False}
    for address in bootstrap.split(","):
        with suppress(ConnectionError), Asking(address) as asking:
            brokers = asking.ask("Metadata", 8, body)["brokers"]
            break
    else:
        return False
    for broker in brokers:
        try:
            with Asking(f"{broker['host']}:{broker['port']}") as asking:
                (told,) = asking.ask("Metadata", 8, body)["topics"]
        except ConnectionError:
            continue  # it has stopped, and learns of the topic before it serves again
        if told["errorCode"] or any(each["errorCode"] for each in told["partitions"]):
            return False
    return True


def delete_topic(bootstrap: str, topic: str) -> None:
    tool(TOPICS, "--bootstrap-server", bootstrap, "--delete", "--topic", topic)


def unregister(bootstrap: str, node_id: int) -> None:
    """Make the cluster forget a broker that has stopped."""
    tool(CLUSTER, "unregister", "--bootstrap-server", bootstrap, "--id", str(node_id))


def create_share_group(bootstrap: str) -> str:
    """Create a share group with a unique name that starts at the oldest records."""
    group = f"share-{next(_numbers)}"
    tool(
        *(CONFIGS, "--bootstrap-server", bootstrap, "--alter", "--entity-type", "groups", "--entity-name", group),
        *("--add-config", "share.auto.offset.reset=earliest"),
    )
    return group


def endpoints(bootstrap: str) -> dict[int, str]:
    """Node id -> address, as this client receives it (DescribeCluster)."""
    text = tool(CLUSTER, "list-endpoints", "--bootstrap-server", bootstrap)
    rows = [line.split() for line in text.splitlines()[1:] if line]
    return {int(row[0]): f"{row[1]}:{row[2]}" for row in rows}


def leaders(bootstrap: str, topic: str) -> list[int]:
    """Node ids of the leaders, by partition."""
    text = tool(TOPICS, "--bootstrap-server", bootstrap, "--describe", "--topic", topic)
    fields = [line.split() for line in text.splitlines() if "Partition:" in line]
    return [int(line[line.index("Leader:") + 1]) for line in fields]


def elect_preferred_leaders(bootstrap: str) -> None:
    """Elect the first replica of every partition, while its current leader is alive."""
    tool(ELECTION, "--bootstrap-server", bootstrap, "--election-type", "preferred", "--all-topic-partitions")


def members(bootstrap: str, group: str) -> dict[str, int]:
    """The number of partitions that each member of a group owns."""
    text = tool(GROUPS, "--bootstrap-server", bootstrap, "--describe", "--group", group, "--members")
    rows = [line.split() for line in text.splitlines() if line.startswith(group)]
    return {row[1]: int(row[4]) for row in rows}


class Running:
    """A tool that runs until it is stopped, with its output in a file."""

    def __init__(self, output: Path, main: str, *arguments: str) -> None:
        self.output = output
        with output.open("wb") as stdout, output.with_suffix(".err").open("wb") as stderr:
            self._process = subprocess.Popen(
                java(main, *arguments, options=("-Xmx256m",)), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
            )

    def lines(self) -> list[str]:
        """The complete lines so far."""
        return self.output.read_text().split("\n")[:-1]

    def stop(self) -> list[str]:
        """Ask it to end, as Ctrl-C would; returns all its lines."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"{self.output.name} did not end within 30 s: {self.errors()}") from None
        return self.lines()

    def wait(self, timeout_s: float = 120) -> list[str]:
        """Wait until it ends by itself; returns all its lines."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"{self.output.name} was still running after {timeout_s} s: {self.errors()}") from None
        assert status == 0, f"{self.output.name} exited {status}: {self.errors()}"
        return self.lines()

    def errors(self) -> str:
        return self.output.with_suffix(".err").read_text()[-2000:]

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
