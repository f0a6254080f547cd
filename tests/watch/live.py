"""`kproxy watch` in a network namespace with a miniature cluster and its clients. It needs root and iproute2."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.namespaces import Namespace

KPROXY = Path(sys.executable).with_name("kproxy")
BROKER_PORT = 19092

CLUSTER = """
import asyncio, sys
from kproxy.demo.cluster import Cluster
async def main():
    cluster = Cluster(count=3, topics={"orders": 6})
    for node_id, broker in cluster.brokers.items():
        broker.host, broker.port = sys.argv[1].format(node_id), int(sys.argv[2])
    await cluster.start()
    print("started", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""

# Produces `count` records, and consumes them.
CLIENT = """
import os, sys
from confluent_kafka import Producer, Consumer, TopicPartition, OFFSET_BEGINNING
bootstrap, count = sys.argv[1], int(sys.argv[2])
failed = []
producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 20000, "batch.num.messages": 20,
                     "client.id": "shop"})
for number in range(count):
    delivered = lambda fault, _: fault and failed.append(str(fault))
    producer.produce("orders", b"x" * (number % 2000), partition=number % 6, on_delivery=delivered)
    producer.poll(0)
producer.flush(30)
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "client.id": "till"})
consumer.assign([TopicPartition("orders", number, OFFSET_BEGINNING) for number in range(6)])
got = 0
for _ in range(400):
    got += len(consumer.consume(500, 0.1))
    if got >= count:
        break
assert not failed and got >= count, (failed, got)
consumer.pause([TopicPartition("orders", number) for number in range(6)])
consumer.poll(1.5)  # the last Fetch is answered
os._exit(0)  # closing a consumer would wait for a coordinator, which the miniature cluster lacks
"""


def why_not() -> str | None:
    """Why packets cannot be captured here; None: they can."""
    if os.geteuid() != 0:
        return "capturing packets needs root"
    return None if shutil.which("ip") else "needs ip: apt-get install iproute2"


def until(what: str, condition: Callable[[], object], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what}"
        time.sleep(0.05)


@contextmanager
def machine(name: str = "watched") -> Iterator[Namespace]:
    """A network namespace with loopback only."""
    namespace = Namespace(name)
    try:
        namespace.make()
        yield namespace
    finally:
        namespace.remove()


def start_cluster(where: Namespace, host: str = "127.0.1.{}", port: int = BROKER_PORT) -> None:
    """Three brokers of the miniature cluster; returns when they listen."""
    process = where.start(sys.executable, "-c", CLUSTER, host, str(port), stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "started\n"


class Kproxy:
    """A command of kproxy in a namespace, with an admin port."""

    def __init__(
        self, where: Namespace, folder: Path, port: int, *arguments: str, prefix: tuple[str, ...] = ()
    ) -> None:
        self.where = where
        self.port = port
        folder.mkdir(exist_ok=True)
        self.log = folder / f"kproxy-{port}.log"
        with self.log.open("w") as log:
            command = (*prefix, KPROXY, *arguments, "--admin", f"127.0.0.1:{port}")
            self.process = where.start(*command, stderr=log)
        until("kproxy to start", lambda: "admin at" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()

    def get(self, path: str) -> str:
        return self.where.run("curl", "-sS", "--max-time", "20", f"http://127.0.0.1:{self.port}{path}").stdout

    def api(self, name: str) -> Any:
        return json.loads(self.get(f"/api/{name}"))

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """The values of all series, by name and labels."""
        families = text_string_to_metric_families(self.get("/metrics"))
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}

    def total(self, name: str, *by: str, **where: str) -> dict[Any, float]:
        """A metric's values, added up by some of its labels, of series with certain labels; without those of 0."""
        found: dict[Any, float] = {}
        for (sample, labels), value in self.samples().items():
            of = dict(labels)
            if sample == name and value and all(of.get(key) == each for key, each in where.items()):
                key = tuple(of[label] for label in by)
                found[key] = found.get(key, 0) + value
        return found

    def end(self) -> str:
        """Stop it as a service manager does; returns its log."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log.read_text()
        return self.log.read_text()
