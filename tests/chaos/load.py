"""Clients that know what they were promised: producers, a transactional producer, groups; and what the log must hold.

Every record carries its number and bytes that follow from it, so that a damaged one is seen. A load that makes no
progress is found by `progress`, a number that only grows.
"""

import random
import subprocess
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.broker.jvm import java

PARTITIONS = 6
_LIBRDKAFKA = {"reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 500, "log_level": 0, "socket.timeout.ms": 20_000}
_SIZES = (0, 10, 100, 500, 2000, 2000, 500, 100, 40_000)
_IN_FLIGHT = 2000  # records that are sent and not acknowledged: then a producer waits
_FLUSH_S = 120


def value(number: int) -> bytes:
    """The number, and as many bytes after it as it wants."""
    pattern = blake2b(b"%d" % number, digest_size=16).digest()
    return b"%d:" % number + pattern * (_SIZES[number % len(_SIZES)] // 16)


def _key(number: int) -> bytes:
    return b"%d" % (number % 100)


def number_of(data: bytes) -> int:
    """The inverse of `value`; ValueError if any byte is not as it was sent."""
    number = int(data.split(b":", 1)[0])
    if data != value(number):
        raise ValueError(f"record {number} is damaged")
    return number


class Load:
    """A thread that goes on until stopped."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.progress = 0
        self.faults: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name=name)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.faults.append(f"{self.name} did not end within {timeout_s:.0f} s")

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as fault:
            self.faults.append(f"{self.name} ended: {fault!r}")

    def _run(self) -> None:
        raise NotImplementedError


class Producing(Load):
    """acks=all, retries without end; idempotent or not. Subclasses know the client."""

    def __init__(self, topic: str, *, idempotent: bool, per_s: int) -> None:
        super().__init__(f"producer of {topic}")
        self.topic = topic
        self.idempotent = idempotent
        self.acknowledged: set[int] = set()
        self.sent = 0
        self._pause_s = 1 / per_s

    def _acknowledged(self, number: int) -> None:
        self.acknowledged.add(number)
        self.progress += 1

    def _given_up(self, fault: object) -> None:
        self.faults.append(f"{self.name}: a record was given up: {fault}")

    def _send(self, number: int) -> None:
        raise NotImplementedError

    def _wait(self) -> None:
        """Give the client time for about one record."""
        time.sleep(self._pause_s)

    def _flush(self, timeout_s: float) -> None:
        """Wait for all that was sent, then end the client's connections."""
        raise NotImplementedError

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self.sent - self.progress < _IN_FLIGHT:
                self._send(self.sent)
                self.sent += 1
            self._wait()
        self._flush(_FLUSH_S)
        if left := self.sent - len(self.acknowledged):
            self.faults.append(f"{self.name}: {left} records neither acknowledged nor refused after {_FLUSH_S} s")


class LibrdkafkaProducing(Producing):
    def __init__(self, settings: dict[str, Any], topic: str, *, idempotent: bool, per_s: int) -> None:
        super().__init__(topic, idempotent=idempotent, per_s=per_s)
        self._producer = Producer(
            {
                **settings,
                **_LIBRDKAFKA,
                "acks": "all",
                "enable.idempotence": idempotent,
                "linger.ms": 5,
                "message.timeout.ms": 0,
                "compression.type": "lz4" if idempotent else "none",
                "error_cb": self._error,
            }
        )

    def _error(self, fault: KafkaError) -> None:
        if fault.fatal():
            self.faults.append(f"{self.name}: {fault}")

    def _delivered(self, fault: KafkaError | None, message: Message) -> None:
        if fault is not None:
            self._given_up(fault)
        else:
            self._acknowledged(number_of(message.value()))

    def _send(self, number: int) -> None:
        self._producer.produce(self.topic, value(number), _key(number), on_delivery=self._delivered)

    def _wait(self) -> None:
        self._producer.poll(self._pause_s)
        time.sleep(self._pause_s / 2)

    def _flush(self, timeout_s: float) -> None:
        self._producer.flush(timeout_s)
        del self._producer  # which ends its connections


class PythonProducing(Producing):
    """kafka-python, idempotent."""

    def __init__(self, settings: dict[str, Any], topic: str, *, per_s: int) -> None:
        super().__init__(topic, idempotent=True, per_s=per_s)
        self._settings = settings

    def _run(self) -> None:
        from kafka import KafkaProducer  # type: ignore[import-untyped]

        self._producer = KafkaProducer(
            **self._settings,
            acks="all",
            enable_idempotence=True,
            retries=1 << 30,
            delivery_timeout_ms=1 << 30,
            linger_ms=5,
            max_block_ms=_FLUSH_S * 1000,
            reconnect_backoff_ms=50,
            reconnect_backoff_max_ms=500,
        )
        super()._run()

    def _send(self, number: int) -> None:
        sent = self._producer.send(self.topic, value(number), _key(number))
        sent.add_callback(lambda _, number=number: self._acknowledged(number))
        sent.add_errback(self._given_up)

    def _flush(self, timeout_s: float) -> None:
        with suppress(Exception):  # what is left is counted
            self._producer.flush(timeout_s)
        self._producer.close(5)


class JavaProducing(Producing):
    """Kafka's own client in a process of its own (Producing.java), idempotent."""

    def __init__(self, settings: Mapping[str, str], topic: str, folder: Path, *, per_s: int) -> None:
        super().__init__(topic, idempotent=True, per_s=per_s)
        self._errors = folder / "java-producer.log"
        own = {
            "acks": "all",
            "enable.idempotence": "true",
            "linger.ms": "5",
            "delivery.timeout.ms": str((1 << 31) - 1),
            "max.block.ms": str(_FLUSH_S * 1000),
            "reconnect.backoff.max.ms": "500",
            "request.timeout.ms": "20000",
        }
        file = folder / "java-producer.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in {**settings, **own}.items()))
        source = str(Path(__file__).with_name("Producing.java"))  # which Java compiles as it starts
        self._command = [*java(source, str(file), topic)]

    def _run(self) -> None:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        reading = threading.Thread(target=self._read)
        reading.start()
        try:
            super()._run()
        finally:
            self._process.kill()
            self._process.wait()
            reading.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.strip().partition(" ")
            if word == "ack":
                self._acknowledged(int(rest))
            else:
                self._given_up(line)

    def _send(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number} {b64encode(value(number)).decode()}\n")
        self._process.stdin.flush()

    def _flush(self, timeout_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        time.sleep(0.5)  # for its last lines to be read


class Transactions(Load):
    """Transactions of one producer, each of some records, one in five aborted."""

    def __init__(self, settings: dict[str, Any], topic: str, seed: int) -> None:
        super().__init__(f"transactions of {topic}")
        self.topic = topic
        self.sizes: dict[int, int] = {}
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.uncertain: set[int] = set()
        self.producers = 0
        self._settings = {
            **settings,
            **_LIBRDKAFKA,
            "transactional.id": f"chaos-{topic}",
            "transaction.timeout.ms": 60_000,
            "linger.ms": 5,
        }
        self._random = random.Random(seed)

    def _run(self) -> None:
        number = 0
        producer = self._new()
        while not self._stopping.is_set():
            number += 1
            try:
                self._transaction(producer, number)
            except KafkaException as fault:
                if not fault.args[0].fatal():
                    raise
                self.uncertain.add(number)  # the next producer's start ends it, one way or the other
                producer = self._new()
            self.progress += 1
            time.sleep(0.02)

    def _new(self) -> Producer:
        self.producers += 1
        producer = Producer(self._settings)
        self._retried(lambda: producer.init_transactions(30))
        return producer

    def _retried(self, call: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 300
        while True:
            try:
                call()
                return
            except KafkaException as fault:
                if not fault.args[0].retriable() or time.monotonic() > deadline:
                    raise

    def _transaction(self, producer: Producer, number: int) -> None:
        size = self.sizes[number] = self._random.randrange(1, 20)
        producer.begin_transaction()
        for place in range(size):
            producer.produce(self.topic, value(number * 100 + place), partition=place % PARTITIONS)
        if self._random.random() < 0.2:
            self._retried(lambda: producer.abort_transaction(60))
            self.aborted.add(number)
            return
        try:
            self._retried(lambda: producer.commit_transaction(60))
            self.committed.add(number)
        except KafkaException as fault:
            if not fault.args[0].txn_requires_abort():
                raise
            self._retried(lambda: producer.abort_transaction(60))
            self.aborted.add(number)


class Group(Load):
    """A member of a group that reads a topic; what it received counts once it was committed or not: at least once."""

    def __init__(self, settings: dict[str, Any], topic: str, received: Counter[int], *, name: str, **own: Any) -> None:
        super().__init__(name)
        self.topic = topic
        self.received = received  # of all members of the group
        self._consumer = Consumer(
            {
                **settings,
                **_LIBRDKAFKA,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 1000,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 200,
                **own,
            }
        )

    def _run(self) -> None:
        self._consumer.subscribe([self.topic])
        while not self._stopping.is_set():
            for message in self._consumer.consume(500, timeout=0.5):
                if message.error() is None:
                    self.received[number_of(message.value())] += 1
                    self.progress += 1
        self._consumer.close()


def dump(settings: dict[str, Any], topic: str, *, committed: bool) -> list[list[int]]:
    """All numbers in a topic, by partition and in the log's order, as the brokers themselves tell."""
    consumer = Consumer(
        {
            **settings,
            "group.id": "dump",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
    found: list[list[int]] = [[] for _ in range(PARTITIONS)]
    ended: set[int] = set()
    deadline = time.monotonic() + 300
    while len(ended) < PARTITIONS:
        if time.monotonic() > deadline:
            raise AssertionError(f"{topic} could not be read to its end within 300 s")
        for message in consumer.consume(1000, timeout=1):
            fault = message.error()
            if fault is None:
                found[message.partition()].append(number_of(message.value()))
            elif fault.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    with suppress(KafkaException):
        consumer.close()
    return found


def producer_violations(load: Producing, log: list[list[int]]) -> Iterable[str]:
    """What contradicts the promises to a producer."""
    counts = Counter(number for partition in log for number in partition)
    if lost := load.acknowledged - counts.keys():
        yield f"{load.topic}: {len(lost)} acknowledged records are not in the log, {sorted(lost)[:5]} among them"
    if strangers := [number for number in counts if number >= load.sent]:
        yield f"{load.topic}: {len(strangers)} records in the log were never sent"
    if not load.idempotent:
        return
    if twice := [number for number, count in counts.items() if count > 1]:
        yield f"{load.topic}: {len(twice)} records are more than once in the log of an idempotent producer, {twice[:5]}"
    for partition, numbers in enumerate(log):
        if numbers != sorted(numbers):
            yield f"{load.topic}: partition {partition} is out of the order in which an idempotent producer sent"


def transaction_violations(load: Transactions, log: list[list[int]]) -> Iterable[str]:
    """What contradicts the promises to a transactional producer, of a log that was read committed."""
    counts = Counter(number for partition in log for number in partition)
    if twice := [number for number, count in counts.items() if count > 1]:
        yield f"{load.topic}: {len(twice)} records of transactions are there more than once"
    seen = Counter(number // 100 for number in counts)
    for number, size in load.sizes.items():
        there = seen.get(number, 0)
        if there not in (0, size):
            yield f"{load.topic}: of transaction {number} only {there} of {size} records are there"
        elif number in load.committed and not there:
            yield f"{load.topic}: transaction {number} was committed and is not there"
        elif number in load.aborted and there:
            yield f"{load.topic}: transaction {number} was aborted and is there"


def group_violations(name: str, received: Counter[int], log: list[list[int]]) -> Iterable[str]:
    """What a group that read to the end should have received."""
    there = {number for partition in log for number in partition}
    if missed := there - received.keys():
        yield f"{name}: {len(missed)} records of the log were not received, {sorted(missed)[:5]} among them"
    if strangers := received.keys() - there:
        yield f"{name}: {len(strangers)} records were received that the log has not"
