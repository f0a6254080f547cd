"""The driver of confluent-kafka, kafka-python, aiokafka and kcat: see README.md beside this folder."""

import asyncio
import json
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

GIVE_UP_S = 45


class Output:
    """The file of what was consumed."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._file = Path(job["output"]).open("w")  # noqa: SIM115, as long as the process
        self._job = job
        self._deadline = time.monotonic() + GIVE_UP_S
        self.count = 0

    def write(self, part: int, partition: int, offset: int, key: bytes | None, value: bytes, headers: Any) -> None:
        line = {
            "part": part,
            "partition": partition,
            "offset": offset,
            "key": None if key is None else key.hex(),
            "value": value.hex(),
            "headers": [[name, data.hex()] for name, data in headers or ()],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self.count += 1

    def wants(self, part: int) -> bool:
        """Whether this member of the group has to go on."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{self.count} of {len(self._job['records'])} records after {GIVE_UP_S} s")
        return self.count < (self._job["first"] if part == 1 else len(self._job["records"]))


def batches(job: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The records, codec by codec."""
    for codec, records in groupby(job["records"], key=lambda record: record["codec"]):
        yield codec, list(records)


def key_of(record: dict[str, Any]) -> bytes | None:
    return None if record["key"] is None else bytes.fromhex(record["key"])


def headers_of(record: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [(name, bytes.fromhex(value)) for name, value in record["headers"]]


def librdkafka(job: dict[str, Any]) -> dict[str, Any]:
    security = job["security"]
    settings = {"bootstrap.servers": job["bootstrap"], "security.protocol": security["protocol"]}
    names = {"ca": "ssl.ca", "certificate": "ssl.certificate", "key": "ssl.key"}
    settings |= {f"{name}.location": security[key] for key, name in names.items() if key in security}
    if "mechanism" in security:
        settings["sasl.mechanism"] = security["mechanism"]
        if security["mechanism"] != "OAUTHBEARER":
            settings |= {"sasl.username": security["user"], "sasl.password": security["password"]}
    return settings


def confluent(job: dict[str, Any], output: Output) -> None:
    from confluent_kafka import Consumer, Producer

    settings: dict[str, Any] = librdkafka(job)
    if job["security"].get("mechanism") == "OAUTHBEARER":
        settings["oauth_cb"] = lambda _: (job["security"]["token"], time.time() + 3600)
    faults = []
    for codec, records in batches(job):
        producer = Producer(settings | {"compression.type": codec, "linger.ms": 5, "message.max.bytes": 2_000_000})
        for record in records:
            producer.produce(
                job["topic"],
                bytes.fromhex(record["value"]),
                key_of(record),
                record["partition"],
                headers=headers_of(record),
                on_delivery=lambda fault, _: fault and faults.append(fault),
            )
        left = producer.flush(GIVE_UP_S)
        if left or faults:
            raise RuntimeError(f"{left} records not acknowledged, {faults[:1]}")
    for part in (1, 2):
        consumer = Consumer(
            settings | {"group.id": job["group"], "auto.offset.reset": "earliest", "enable.auto.commit": False}
        )
        consumer.subscribe([job["topic"]])
        while output.wants(part):
            for message in consumer.consume(10, timeout=1):
                if message.error():
                    raise RuntimeError(message.error())
                output.write(
                    *(part, message.partition(), message.offset(), message.key(), message.value(), message.headers())
                )
        consumer.commit(asynchronous=False)
        consumer.close()


def kafka_python(job: dict[str, Any], output: Output) -> None:
    import kafka
    from kafka.net.sasl.oauth import AbstractTokenProvider  # type: ignore[import-not-found, unused-ignore]

    security = job["security"]

    class Token(AbstractTokenProvider):  # type: ignore[misc, unused-ignore]
        def token(self) -> str:
            text: str = security["token"]
            return text

    settings: dict[str, Any] = {"bootstrap_servers": job["bootstrap"], "security_protocol": security["protocol"]}
    names = {"ca": "ssl_cafile", "certificate": "ssl_certfile", "key": "ssl_keyfile"}
    settings |= {name: security[key] for key, name in names.items() if key in security}
    if "mechanism" in security:
        settings["sasl_mechanism"] = security["mechanism"]
        if security["mechanism"] == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = Token()
        else:
            settings |= {"sasl_plain_username": security["user"], "sasl_plain_password": security["password"]}
    for codec, records in batches(job):
        producer = kafka.KafkaProducer(
            **settings, acks="all", compression_type=None if codec == "none" else codec, max_request_size=2_000_000
        )
        sent = [
            producer.send(
                job["topic"],
                bytes.fromhex(record["value"]),
                key_of(record),
                headers_of(record) or None,
                partition=record["partition"],
            )
            for record in records
        ]
        for future in sent:
            future.get(GIVE_UP_S)
        producer.close()
    for part in (1, 2):
        consumer = kafka.KafkaConsumer(
            job["topic"],
            **settings,
            group_id=job["group"],
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_poll_records=10,
        )
        while output.wants(part):
            for messages in consumer.poll(1000).values():
                for message in messages:
                    output.write(
                        *(part, message.partition, message.offset, message.key, message.value, message.headers)
                    )
        consumer.commit()
        consumer.close()


def aiokafka(job: dict[str, Any], output: Output) -> None:
    asyncio.run(_aiokafka(job, output))


async def _aiokafka(job: dict[str, Any], output: Output) -> None:
    import aiokafka
    from aiokafka.abc import AbstractTokenProvider

    security = job["security"]

    class Token(AbstractTokenProvider):  # type: ignore[misc, unused-ignore]
        async def token(self) -> str:
            text: str = security["token"]
            return text

    settings: dict[str, Any] = {"bootstrap_servers": job["bootstrap"], "security_protocol": security["protocol"]}
    if "ca" in security:
        context = ssl.create_default_context(cafile=security["ca"])
        if "certificate" in security:
            context.load_cert_chain(security["certificate"], security["key"])
        settings["ssl_context"] = context
    if "mechanism" in security:
        settings["sasl_mechanism"] = security["mechanism"]
        if security["mechanism"] == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = Token()
        else:
            settings |= {"sasl_plain_username": security["user"], "sasl_plain_password": security["password"]}
    for codec, records in batches(job):
        producer = aiokafka.AIOKafkaProducer(
            **settings, acks="all", compression_type=None if codec == "none" else codec, max_request_size=2_000_000
        )
        await producer.start()
        try:
            for future in [
                await producer.send(
                    job["topic"],
                    bytes.fromhex(record["value"]),
                    key_of(record),
                    record["partition"],
                    headers=headers_of(record) or None,
                )
                for record in records
            ]:
                await asyncio.wait_for(future, GIVE_UP_S)
        finally:
            await producer.stop()
    for part in (1, 2):
        consumer = aiokafka.AIOKafkaConsumer(
            job["topic"], **settings, group_id=job["group"], auto_offset_reset="earliest", enable_auto_commit=False
        )
        await consumer.start()
        try:
            while output.wants(part):
                for messages in (await consumer.getmany(timeout_ms=1000, max_records=10)).values():
                    for message in messages:
                        output.write(
                            *(part, message.partition, message.offset, message.key, message.value, message.headers)
                        )
            await consumer.commit()
        finally:
            await consumer.stop()


def kcat(job: dict[str, Any], output: Output) -> None:
    """A process for all records of a partition that share codec, key and headers, each record in a file of its own."""
    settings = librdkafka(job)
    if job["security"].get("mechanism") == "OAUTHBEARER":  # kcat takes no token: it can only make one, unsigned
        settings["enable.sasl.oauthbearer.unsecure.jwt"] = "true"
        settings["sasl.oauthbearer.config"] = f"principal={job['security']['user']}"
    options = [option for name, value in settings.items() for option in ("-X", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        files = 0
        for (partition, codec, key, headers), records in groupby(
            sorted(job["records"], key=lambda record: record["partition"]),
            key=lambda record: (
                record["partition"],
                record["codec"],
                record["key"],
                tuple(map(tuple, record["headers"])),
            ),
        ):
            command = ["kcat", "-P", "-t", job["topic"], "-p", str(partition), "-z", codec, *options]
            if key is not None:
                command += ["-k", bytes.fromhex(key).decode()]
            for name, value in headers:
                command += ["-H", f"{name}={bytes.fromhex(value).decode()}"]
            for record in records:
                path = Path(folder) / str(files)
                path.write_bytes(bytes.fromhex(record["value"]))
                command.append(str(path))
                files += 1
            _run(command, b"")
        for part in (1, 2):
            count = job["first"] if part == 1 else len(job["records"]) - output.count
            # %K and %R are sizes, binary and big-endian; %h is name=value, with commas between
            form = "%p %o %K %S %h\n%k%s"
            command = ["kcat", "-q", "-c", str(count), "-f", form, *options]
            command += ["-X", "auto.offset.reset=earliest", "-G", job["group"], job["topic"]]
            _parse(part, _run(command, b""), output)


def _run(command: list[str], data: bytes) -> bytes:
    done = subprocess.run(command, input=data, capture_output=True, timeout=GIVE_UP_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace")[-1000:])
    return done.stdout


def _parse(part: int, data: bytes, output: Output) -> None:
    while data:
        head, _, data = data.partition(b"\n")
        partition, offset, key_size, value_size, headers = head.split(b" ", 4)
        size = max(int(key_size), 0)
        key, value = data[:size], data[size : size + int(value_size)]
        data = data[size + int(value_size) :]
        pairs = [pair.split(b"=", 1) for pair in headers.split(b",") if pair]
        output.write(
            *(part, int(partition), int(offset), None if int(key_size) < 0 else key, value),
            [(name.decode(), content) for name, content in pairs],
        )


CLIENTS = {"confluent-kafka": confluent, "kafka-python": kafka_python, "aiokafka": aiokafka, "kcat": kcat}

if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    CLIENTS[job["client"]](job, Output(job))
