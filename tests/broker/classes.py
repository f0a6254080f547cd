"""`python -m tests.broker.classes`: archive the classes that a broker loads, so that the tests' brokers start faster.

./dev runs it once per combination of Kafka's jars and Java; kproxy/spark/classes.py explains such archives. A JVM that
the archive does not fit, such as one with other jars, silently ignores it.
"""

import tempfile
from pathlib import Path

from tests.broker.cluster import SETTINGS, Broker, Cluster
from tests.broker.jvm import ARCHIVE, tool


def main() -> None:
    ARCHIVE.unlink(missing_ok=True)
    draft = ARCHIVE.with_suffix(".new")
    alone = {name: "1" for name in SETTINGS if name.endswith("replication.factor")}
    with tempfile.TemporaryDirectory(prefix="kproxy-") as folder:
        cluster = Cluster(Path(folder), settings=alone)
        broker: Broker = cluster.brokers[0]
        broker.format(cluster.id, cluster.voters.partition(",")[0], cluster.settings)
        broker.start(options=(f"-XX:ArchiveClassesAtExit={draft}", "-Xlog:disable"))
        broker.wait_until_started()
        topic = ("--bootstrap-server", broker.address, "--topic", "some")
        tool("org.apache.kafka.tools.TopicCommand", "--create", *topic)
        tool("org.apache.kafka.tools.ConsoleProducer", *topic, stdin=b"a\n")
        consumed = tool(
            "org.apache.kafka.tools.consumer.ConsoleConsumer", *topic, "--from-beginning", "--max-messages=1"
        )
        assert consumed == "a\n"
        broker.stop()
    draft.replace(ARCHIVE)


if __name__ == "__main__":
    main()
