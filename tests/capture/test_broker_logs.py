"""Exchanges compared, request by request, with the brokers' own request logs, which an independent decoder wrote.

Kafka 2.7 and later log a line of JSON for each response sent. Every entry on one side alone must have a reason.
"""

import csv
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from kproxy.protocol.apis import OFFSET_DELETE
from kproxy.tables.partitions import APIS, topic_id
from kproxy.wire.bodies import BATCHES
from kproxy.wire.events import ANSWERED, UNANSWERED
from tests import captures
from tests.capture.connections.test_flows import Seen

LINE = re.compile(r"b\d \S+ \S+ Completed request:(.*)")

# Requests that a broker never logs: those that its SASL layer handles before authentication; those whose connection
# closed before the response; a failed Produce without acks. It logs a forwarded request instead of its Envelope.
NEVER_LOGGED = {
    "k41_java_cluster": {("Envelope", ANSWERED): 20},
    "k41_kip848_share": {("Fetch", UNANSWERED): 2},
    "k41_librdkafka": {("Fetch", UNANSWERED): 2},
    "k41_kafkajs": {("Produce", "no_answer_expected"): 9, ("Fetch", UNANSWERED): 1},
    "k41_sasl_plain": {
        ("ApiVersions", ANSWERED): 35,
        ("SaslHandshake", ANSWERED): 56,
        ("SaslAuthenticate", ANSWERED): 56,
    },
    "k41_quota": {},
    "k39_zk_cluster": {("StopReplica", UNANSWERED): 1, ("Fetch", UNANSWERED): 1},
}
# Requests sent before the capture began and answered within it, without forwarded ones.
ASKED_EARLIER = {
    "k41_java_cluster": 2,
    "k41_kip848_share": 4,
    "k41_librdkafka": 6,
    "k41_kafkajs": 10,
    "k41_sasl_plain": 0,
    "k41_quota": 0,
    "k39_zk_cluster": 0,
}


def logged(name):
    """The broker's log entries, by client port, broker port, correlation id, key and version."""
    lines = defaultdict(list)
    for line in (captures.folder("brokerlogs") / f"{name}.brokerlog").open():
        found = LINE.match(line)
        assert found, line
        entry = json.loads(found[1])
        header = entry["requestHeader"]
        broker, client = (end.rsplit(":", 1)[1] for end in entry["connection"].split("-")[:2])
        key = (int(client), int(broker), header["correlationId"], header["requestApiKey"], header["requestApiVersion"])
        lines[key].append(entry)
    return lines


def error_codes(body):
    """Every error code other than 0, at any depth."""
    if isinstance(body, dict):
        for name, value in body.items():
            if name.lower().endswith("errorcode"):
                if value:
                    yield value
            else:
                yield from error_codes(value)
    elif isinstance(body, list):
        for value in body:
            yield from error_codes(value)


# The names of one field in Kafka and in kproxy.
OFFSETS = {"fetchOffset": "offset", "committedOffset": "offset", "baseOffset": "offset", "offset": "offset"}
FIELDS = OFFSETS | {
    "errorCode": "error_code",
    "highWatermark": "high_watermark",
    "lastStableOffset": "last_stable_offset",
    "logStartOffset": "log_start_offset",
    "recordsSizeInBytes": "bytes",
}


def partitions_of(body, topic=None):
    """(topic or its id, partition, other fields) of everything in a body that names partitions."""
    if isinstance(body, list):
        for value in body:
            yield from partitions_of(value, topic)
    elif isinstance(body, dict):
        topic = body.get("topic") or body.get("name") or body.get("topicId") or topic
        for name in ("partition", "partitionIndex", "index"):
            if topic is not None and isinstance(body.get(name), int):
                yield topic, body[name], {ours: body[theirs] for theirs, ours in FIELDS.items() if theirs in body}
                return
        for value in body.values():
            yield from partitions_of(value, topic)


@pytest.mark.parametrize("name", NEVER_LOGGED)
def test_every_topic_partition_equals_its_brokers_log(name):
    lines = logged(name)
    compared = Counter()
    for info, exchange in Seen(captures.capture(name), detail=BATCHES).exchanges:
        plan = exchange.plan
        key = (info.client_port, info.broker_port, exchange.correlation_id, plan.api_key, plan.api_version)
        if plan.api_key not in APIS or not lines[key]:
            continue
        entry = lines[key].pop(0)
        if plan.api_key == OFFSET_DELETE:  # only its response is read: it has the deleted offsets
            deleted = {part[:2] for part in partitions_of(entry["response"]) if not part[2]["error_code"]}
            assert set(exchange.response_body.deleted) == deleted
            continue
        for direction, found in (("request", exchange.request_body), ("response", exchange.response_body)):
            if found is None:  # unanswered at the end of the capture, or for ever
                assert direction == "response" and exchange.outcome is not ANSWERED
                continue
            ours = sorted(found.partitions, key=lambda p: (p.topic or topic_id(p.topic_id), p.partition))
            theirs = sorted(partitions_of(entry[direction]), key=lambda part: part[:2])
            assert [(p.topic or topic_id(p.topic_id), p.partition) for p in ours] == [part[:2] for part in theirs]
            for partition, (_, _, fields) in zip(ours, theirs, strict=True):
                assert {field: getattr(partition, field) for field in fields} == fields
                compared[plan.api, direction] += 1
    assert compared["Fetch", "request"] and compared["Fetch", "response"] and compared["Produce", "request"]


@pytest.mark.parametrize("name", NEVER_LOGGED)
def test_every_request_equals_its_brokers_log(name):
    lines = logged(name)
    unlogged = Counter()
    for info, exchange in Seen(captures.capture(name)).exchanges:
        plan = exchange.plan
        key = (info.client_port, info.broker_port, exchange.correlation_id, plan.api_key, plan.api_version)
        if not lines[key]:
            if exchange.number >= 0:
                unlogged[plan.api, exchange.outcome] += 1
            continue
        entry = lines[key].pop(0)
        request, response = entry["request"], entry["response"]
        assert exchange.client_id == entry["requestHeader"]["clientId"]
        for field, ours in (
            ("acks", exchange.acks),
            ("maxWaitMs", exchange.max_wait_ms),
            ("groupId", exchange.group_id),
            ("transactionalId", exchange.transactional_id),
        ):
            assert field not in request or request[field] == ours
        if exchange.outcome is ANSWERED:
            assert exchange.throttle_ms == response.get("throttleTimeMs", -1)
            assert sorted(exchange.errors) == sorted(error_codes(response))
            assert exchange.error_code == response.get("errorCode", exchange.error_code)
    assert unlogged == NEVER_LOGGED[name]
    left = [entry for entries in lines.values() for entry in entries]
    assert sum(not entry["isForwarded"] for entry in left) == ASKED_EARLIER[name]


STEPS_MS = (-100, -10, -3, -1, 0, 1, 3, 10, 100)
QUANTILES = {"least": 0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1}


def latency_differences(name):
    """Latency on the wire minus the broker's own total time, in milliseconds: unadjusted, and for the same span."""
    lines = logged(name)
    plainly, alike = [], []
    for info, exchange in Seen(captures.capture(name)).exchanges:
        plan = exchange.plan
        key = (info.client_port, info.broker_port, exchange.correlation_id, plan.api_key, plan.api_version)
        if lines[key]:
            entry = lines[key].pop(0)
            if exchange.outcome is ANSWERED:
                total_ns = exchange.response_end - exchange.request_start
                plainly.append(total_ns / 1e6 - entry["totalTimeMs"])
                served_ns = total_ns - exchange.queue_ns - exchange.muted_ns
                alike.append(served_ns / 1e6 - (entry["totalTimeMs"] - entry["sendTimeMs"]))
    return {"total_ns - totalTimeMs": plainly, "total_ns - queue_ns - muted_ns - (totalTimeMs - sendTimeMs)": alike}


def test_latency_differs_from_the_brokers_times_as_listed():
    """total_times.csv has the distribution of the difference: its quantiles, and a histogram.

    The broker's clock starts when it has read a request. It does not include the time in the socket: behind an earlier
    request (`queue_ns`), or while the connection was muted (`muted_ns`). The clock stops when the broker's thread notes
    that the response was sent, after its last byte was on the wire (`sendTimeMs`). Without these parts the latency on
    the wire is never the smaller one.
    """
    bounds = [f"< {STEPS_MS[0]}", *(f"{a} to {b}" for a, b in pairwise(STEPS_MS)), f">= {STEPS_MS[-1]}"]
    titles = [f"{title} ms" for title in (*QUANTILES, *bounds)]
    shown = [["capture", "difference", "answers", *titles]]
    for name in NEVER_LOGGED:
        for difference, waits in latency_differences(name).items():
            waits.sort()
            quantiles = [waits[round(part * (len(waits) - 1))] for part in QUANTILES.values()]
            between = Counter(bisect_right(STEPS_MS, wait) for wait in waits)
            counts = [between[step] for step in range(len(STEPS_MS) + 1)]
            shown.append([name, difference, len(waits), *(f"{quantile:.3f}" for quantile in quantiles), *counts])
        # the log has throttle times in whole milliseconds
        assert sum(wait < 0 for wait in waits) == 4 * (name == "k41_quota")
        assert quantiles[3] < 0.5
    with Path(__file__).with_name("total_times.csv").open(newline="") as file:
        assert [list(map(str, row)) for row in shown] == list(csv.reader(file))
