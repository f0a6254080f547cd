"""`python -m tests.protocol.librdkafka FILE...`: reads record batches as a consumer of librdkafka does.

A line of JSON for each file, each with one batch: the values of its records in base64, or a string, why it cannot be
read. A process of its own, since some batches end librdkafka's (a failed assertion). The broker is the miniature
cluster, which has each batch in a topic of its own.
"""

import asyncio
import base64
import json
import os
import sys
import threading
import time
from pathlib import Path

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from kproxy.demo.cluster import Cluster

PATIENCE_S = 5  # without anything new


def read(batches: list[bytes]) -> list[list[bytes] | str]:
    cluster = Cluster(count=1)
    topics = [f"t{number}" for number in range(len(batches))]
    for topic, data in zip(topics, batches, strict=True):
        cluster.create_topic(topic, 1).partitions[0].log.append(data, 0)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(cluster.start(), loop).result(30)
    host, port = cluster.bootstrap[0]
    consumer = Consumer({"bootstrap.servers": f"{host}:{port}", "group.id": "g", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING) for topic in topics])
    found: dict[str, list[bytes] | str] = {}
    values: dict[str, list[bytes]] = {topic: [] for topic in topics}
    known, until = -1, 0.0
    while len(found) < len(topics):
        if known != (known := len(found) + sum(map(len, values.values()))):
            until = time.monotonic() + PATIENCE_S
        elif time.monotonic() > until:
            break
        for message in consumer.consume(1000, timeout=0.5):
            topic, error = message.topic(), message.error()
            assert topic is not None, error
            if error is None:
                values[topic].append(message.value())
            elif error.code() == KafkaError._PARTITION_EOF:
                found.setdefault(topic, values[topic])
            else:
                found.setdefault(topic, error.str())
    return [found.get(topic, "nothing came") for topic in topics]


if __name__ == "__main__":
    for told in read([Path(path).read_bytes() for path in sys.argv[1:]]):
        print(json.dumps(told if isinstance(told, str) else [base64.b64encode(value).decode() for value in told]))
    sys.stdout.flush()
    os._exit(0)  # closing a consumer of unreadable batches takes long
