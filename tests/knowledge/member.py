"""A member of a group as a process of its own, by librdkafka or kafka-python: what it does follows from lines of its
input (JSON: slow, topics, close), what it sees are lines of its output, as those of java/Members.java.

    python -m tests.knowledge.member '{"library": "confluent-kafka", "name": "a", "topics": ["t"], "settings": {...}}'
"""

import json
import select
import sys
import time
from typing import Any

MOST_FAILURES = 300


def say(name: str, what: str, detail: Any = None) -> None:
    print(json.dumps({"time_ns": time.time_ns(), "name": name, "what": what, "detail": detail}), flush=True)


def commands() -> list[dict[str, Any]]:
    """Those that have come; the end of the input is a close."""
    found = []
    while select.select([sys.stdin], [], [], 0)[0]:
        line = sys.stdin.readline()
        found.append(json.loads(line) if line else {"do": "close"})
        if not line:
            break
    return found


class Librdkafka:
    def __init__(self, name: str, topics: list[str], settings: dict[str, Any]) -> None:
        from confluent_kafka import Consumer

        self.name = name
        self.consumer = Consumer({**settings, "error_cb": self._failed})
        self.subscribe(topics)

    def subscribe(self, topics: list[str]) -> None:
        self.consumer.subscribe(
            topics, on_assign=self._saw("assigned"), on_revoke=self._saw("revoked"), on_lost=self._saw("lost")
        )

    def poll(self) -> None:
        message = self.consumer.poll(0.1)
        if message is not None and message.error():
            self._failed(message.error())

    def close(self) -> None:
        self.consumer.close()

    def _failed(self, error: Any) -> None:
        say(self.name, "error", error.name())

    def _saw(self, what: str) -> Any:
        def saw(consumer: Any, partitions: Any) -> None:
            say(self.name, what, sorted(f"{each.topic}-{each.partition}" for each in partitions))

        return saw


class Python:
    def __init__(self, name: str, topics: list[str], settings: dict[str, Any]) -> None:
        from kafka import KafkaConsumer
        from kafka.coordinator.assignors.range import RangePartitionAssignor
        from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor

        assignors = {"range": RangePartitionAssignor, "roundrobin": RoundRobinPartitionAssignor}
        chosen = assignors[settings.pop("partition.assignment.strategy", "range")]
        known = {key.replace(".", "_"): value for key, value in settings.items()}
        self.name = name
        self.failures = 0  # of poll(), one after the other
        self.consumer = KafkaConsumer(**known, partition_assignment_strategy=[chosen])
        self.subscribe(topics)

    def subscribe(self, topics: list[str]) -> None:
        from kafka import ConsumerRebalanceListener

        name = self.name

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]
            def on_partitions_assigned(self, assigned: Any) -> None:
                say(name, "assigned", sorted(f"{each.topic}-{each.partition}" for each in assigned))

            def on_partitions_revoked(self, revoked: Any) -> None:
                say(name, "revoked", sorted(f"{each.topic}-{each.partition}" for each in revoked))

        self.consumer.subscribe(topics, listener=Listener())

    def poll(self) -> None:
        """A fault that may pass is said, and poll() is called again: some come out of it when a broker dies."""
        from kafka.errors import KafkaError

        try:
            self.consumer.poll(timeout_ms=100)
            self.failures = 0
        except KafkaError as fault:
            self.failures += 1
            if not fault.retriable or self.failures > MOST_FAILURES:
                raise
            say(self.name, "error", f"{type(fault).__name__}: {fault}")
            time.sleep(0.1)

    def close(self) -> None:
        self.consumer.close()


def main() -> None:
    job = json.loads(sys.argv[1])
    library = {"confluent-kafka": Librdkafka, "kafka-python": Python}[job["library"]]
    member = library(job["name"], job["topics"], job["settings"])
    try:
        while True:
            for command in commands():
                if command["do"] == "close":
                    member.close()
                    say(job["name"], "closed")
                    return
                if command["do"] == "slow":
                    time.sleep(command["ms"] / 1000)
                elif command["do"] == "topics":
                    member.subscribe(command["topics"])
            member.poll()
    except Exception as fault:
        say(job["name"], "failed", f"{type(fault).__name__}: {fault}")
        raise


if __name__ == "__main__":
    main()
