"""The clients of an incident: four libraries, well and badly behaved, each under a client id of its own.

Duty: what each client does until the incident ends, and a line of truth for what its library reported to it: records
refused, requests that failed, logins refused. Refuses to know brokers' processes and captures.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Producer
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError

QUIET = {"log_level": 0, "reconnect.backoff.ms": 50, "reconnect.backoff.max.ms": 1000}


class Clients:
    """Where clients bootstrap, until when they run, and what they reported: `reported[client id][what]`."""

    def __init__(self, bootstrap: str, sasl_bootstrap: str, rate: int) -> None:
        self.bootstrap = bootstrap
        self.sasl_bootstrap = sasl_bootstrap
        self.over = threading.Event()
        self.rate = rate  # records a second of each healthy producer
        self.reported: dict[str, Counter[str]] = {}

    def goes_on(self) -> bool:
        return not self.over.is_set()

    def note(self, client_id: str, what: str, count: int = 1) -> None:
        self.reported.setdefault(client_id, Counter())[what] += count

    def reads(self, prefix: str) -> bool:
        """Whether one of them has read something."""
        return any(counts["read"] for name, counts in list(self.reported.items()) if name.startswith(prefix))

    # --- healthy ------------------------------------------------------------------------------------------------------

    def rdkafka_producer(self, client_id: str, topic: str, size: int = 500, **settings: Any) -> None:
        """Steady; reports records that were not acknowledged."""
        given = {"bootstrap.servers": self.bootstrap, "client.id": client_id, "linger.ms": 20, **QUIET}
        given |= {"enable.idempotence": True, "compression.type": "lz4"}
        producer = Producer(given | {name.replace("_", "."): value for name, value in settings.items()})

        def delivered(error: Any, _: Any) -> None:
            self.note(client_id, "acknowledged" if error is None else f"failed {error.name()}")

        value = b'{"user": "somebody", "state": "shipped"}' * (size // 40 + 1)
        for number in self._paced(self.rate):
            with suppress(BufferError):
                producer.produce(topic, value[:size], b"%d" % (number % 1000), on_delivery=delivered)
            producer.poll(0)
        producer.flush(10)

    def _paced(self, rate: int) -> Iterator[int]:
        """Numbers, so many a second, until the incident ends."""
        began, number = time.monotonic(), 0
        while self.goes_on():
            yield number
            number += 1
            ahead_s = number / rate - (time.monotonic() - began)
            if ahead_s > 0.005:
                time.sleep(min(ahead_s, 0.5))

    def rdkafka_consumer(self, client_id: str, group: str, topic: str, rate: int | None = None, **more: Any) -> None:
        """Reads, so many records a second where a rate is given: its library fetches ahead of it meanwhile."""
        given = {"bootstrap.servers": self.bootstrap, "client.id": client_id, "group.id": group, **QUIET}
        given |= {"auto.commit.interval.ms": 1000, "auto.offset.reset": "earliest", "session.timeout.ms": 10000}
        consumer = Consumer(given | {name.replace("_", "."): value for name, value in more.items()})
        consumer.subscribe([topic])
        while self.goes_on():
            read = consumer.consume(100 if rate is None else max(1, rate // 10), 0.2)
            self.note(client_id, "read", sum(message.error() is None for message in read))
            if rate is not None:
                time.sleep(0.1)
        consumer.close()

    def python_producer(self, client_id: str, topic: str) -> None:
        """kafka-python without idempotence: it sends again what was not answered."""
        settings = {"acks": "all", "enable_idempotence": False, "linger_ms": 20, "retries": 50, "retry_backoff_ms": 100}
        settings |= {"request_timeout_ms": 20000, "delivery_timeout_ms": 60000}
        producer = KafkaProducer(bootstrap_servers=self.bootstrap.split(","), client_id=client_id, **settings)
        sent = []
        for number in self._paced(self.rate):
            with suppress(KafkaError):
                sent.append(producer.send(topic, b"%d " % number + b"payment " * 20))
        with suppress(KafkaError):
            producer.flush(10)
        self.note(client_id, "acknowledged", sum(each.succeeded() for each in sent))
        self.note(client_id, "failed", sum(each.failed() for each in sent))
        producer.close(5)

    def python_consumer(self, client_id: str, group: str, topic: str) -> None:
        settings = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 1000, "session_timeout_ms": 10000}
        consumer = KafkaConsumer(
            topic, bootstrap_servers=self.bootstrap.split(","), client_id=client_id, group_id=group, **settings
        )
        while self.goes_on():
            with suppress(KafkaError):
                self.note(client_id, "read", sum(map(len, consumer.poll(200).values())))
        consumer.close()

    def aio(self, topic: str, members: int = 2) -> None:
        """aiokafka: a producer and members of one group, in one loop."""

        async def write() -> None:
            producer = AIOKafkaProducer(
                bootstrap_servers=self.bootstrap, client_id="aio-writer", linger_ms=20, request_timeout_ms=20000
            )
            await producer.start()
            while self.goes_on():
                try:
                    waiting = [await producer.send(topic, b"event %d" % number) for number in range(self.rate // 10)]
                    await asyncio.wait(waiting, timeout=20)
                    done = sum(each.done() and each.exception() is None for each in waiting)
                    self.note("aio-writer", "acknowledged", done)
                    self.note("aio-writer", "failed", len(waiting) - done)
                except Exception as fault:
                    self.note("aio-writer", f"failed {type(fault).__name__}")
                await asyncio.sleep(0.1)
            with suppress(Exception):
                await asyncio.wait_for(producer.stop(), 10)

        async def read(number: int) -> None:
            client_id = f"aio-reader-{number}"
            consumer = AIOKafkaConsumer(
                topic, bootstrap_servers=self.bootstrap, client_id=client_id, group_id="aio", session_timeout_ms=10000
            )
            await consumer.start()
            while self.goes_on():
                with suppress(Exception):
                    got = await consumer.getmany(timeout_ms=200)
                    self.note(client_id, "read", sum(map(len, got.values())))
            with suppress(Exception):
                await asyncio.wait_for(consumer.stop(), 10)

        async def both() -> None:
            await asyncio.gather(write(), *(read(number) for number in range(members)))

        asyncio.run(both())

    # --- ill ----------------------------------------------------------------------------------------------------------

    def stuck(self, client_id: str, group: str, topic: str) -> None:
        """Reads a while, then never again, while its library goes on with heartbeats."""
        given = {"bootstrap.servers": self.bootstrap, "client.id": client_id, "group.id": group, **QUIET}
        consumer = Consumer(given | {"auto.offset.reset": "earliest", "auto.commit.interval.ms": 1000})
        consumer.subscribe([topic])
        began = time.monotonic()
        while time.monotonic() < began + 8 and self.goes_on():
            consumer.consume(100, 0.2)
        while self.goes_on():
            time.sleep(0.5)
        consumer.close()

    def flapping(self, client_id: str, group: str, topic: str) -> None:
        """A member that comes and goes."""
        while self.goes_on():
            given = {"bootstrap.servers": self.bootstrap, "client.id": client_id, "group.id": group, **QUIET}
            consumer = Consumer(given | {"auto.offset.reset": "earliest"})
            consumer.subscribe([topic])
            began = time.monotonic()
            while time.monotonic() < began + 2.5 and self.goes_on():
                consumer.consume(100, 0.2)
            consumer.close()
            self.note(client_id, "left")
            time.sleep(1.5)

    def forgetful(self, client_id: str, topic: str) -> None:
        """Begins a transaction and never ends it."""
        given = {"bootstrap.servers": self.bootstrap, "client.id": client_id, **QUIET}
        producer = Producer(given | {"transactional.id": f"{client_id}-tx", "transaction.timeout.ms": 600000})
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, b"x", partition=0)
        producer.flush(20)
        self.note(client_id, "began a transaction")
        while self.goes_on():
            time.sleep(0.5)

    def refused(self, client_id: str, topic: str, count: int, size: int = 100, **settings: Any) -> None:
        """Produces what is refused, one record at a time."""
        given = {
            "bootstrap.servers": self.bootstrap,
            "client.id": client_id,
            "linger.ms": 0,
            "message.timeout.ms": 8000,
        }
        given |= {"compression.type": "none", "message.max.bytes": 10_000_000, **QUIET}
        producer = Producer(given | {name.replace("__", "."): value for name, value in settings.items()})

        def delivered(error: Any, _: Any) -> None:
            self.note(client_id, "acknowledged" if error is None else f"failed {error.name()}")

        for _ in range(count):
            with suppress(KafkaException, BufferError):
                producer.produce(topic, b"v" * size, on_delivery=delivered)
            producer.flush(10)
            if not self.goes_on():
                break
            time.sleep(0.3)
        producer.flush(10)

    def login(self, client_id: str, user: str, password: str, count: int) -> None:
        """Logs in with a password that may be wrong, a new client each time."""
        for _ in range(count):
            if not self.goes_on():
                break
            given = {"bootstrap.servers": self.sasl_bootstrap, "client.id": client_id, "log_level": 0}
            given |= {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
            producer = Producer(given | {"sasl.username": user, "sasl.password": password})
            with suppress(KafkaException):
                producer.list_topics(timeout=1.5)
            self.note(client_id, "tried to log in")

    def greedy(self, client_id: str, topic: str) -> None:
        """More than its quota allows."""
        self.rdkafka_producer(client_id, topic, 20_000, compression_type="none", batch_size=200_000)


def healthy(clients: Clients) -> dict[str, Callable[[], None]]:
    """Who works as it should, by name."""
    made: dict[str, Callable[[], None]] = {}
    for number in range(3):
        made[f"orders-{number}"] = partial(clients.rdkafka_producer, f"orders-{number}", "orders")
        made[f"billing-{number}"] = partial(clients.rdkafka_consumer, f"billing-{number}", "billing", "orders")
    for number in range(2):
        made[f"pay-reader-{number}"] = partial(clients.python_consumer, f"pay-reader-{number}", "payments", "payments")
    made["pay-writer"] = partial(clients.python_producer, "pay-writer", "payments")
    made["aio"] = partial(clients.aio, "events")
    made["mail-reader"] = partial(clients.rdkafka_consumer, "mail-reader", "mailer", "events")
    return made


def ill(clients: Clients) -> dict[str, Callable[[], None]]:
    """Who does not, or is refused."""
    made: dict[str, Callable[[], None]] = {}
    slow = max(10, clients.rate // 3)
    made["slow-reader"] = partial(clients.rdkafka_consumer, "slow-reader", "reports", "orders", slow)
    made["stuck-reader"] = partial(clients.stuck, "stuck-reader", "audit", "orders")
    made["flapper"] = partial(clients.flapping, "flapper", "mailer", "events")
    made["forgetful"] = partial(clients.forgetful, "forgetful", "ledger")
    made["ledger-writer"] = partial(clients.rdkafka_producer, "ledger-writer", "ledger")
    committed = {"isolation_level": "read_committed"}
    made["ledger-reader"] = partial(clients.rdkafka_consumer, "ledger-reader", "ledger", "ledger", **committed)
    made["greedy"] = partial(clients.greedy, "greedy", "bulk")
    made["bulky"] = partial(clients.refused, "bulky", "bulk", 12, 2_000_000)
    made["typo"] = partial(clients.refused, "typo", "ordres", 6)
    at_once = {"enable_idempotence": False, "request_timeout_ms": 2000}  # what waits for a replica is refused soon
    made["strict"] = partial(clients.rdkafka_producer, "strict", "strict", **at_once)
    made["lone"] = partial(clients.rdkafka_producer, "lone", "lone", message_timeout_ms=5000)
    made["mallory"] = partial(clients.login, "mallory", "mallory", "guess", 8)
    sasl = {"bootstrap__servers": clients.sasl_bootstrap, "security__protocol": "SASL_PLAINTEXT"}
    sasl |= {"sasl__mechanism": "PLAIN", "sasl__username": "alice", "sasl__password": "secret"}
    made["nosy"] = partial(clients.refused, "nosy", "secret", 20, **sasl)
    return made
