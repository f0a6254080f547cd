"""Metrics pushed by clients become series: bounded in every dimension, and removed with the client."""

import asyncio
import random
from uuid import UUID

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kproxy.errors import Malformed
from kproxy.metrics import Metrics
from kproxy.metrics.processes.published import Published
from kproxy.metrics.processes.shared import Shared
from kproxy.metrics.pushed.telemetry import (
    CHARACTERS,
    GAUGE,
    MAX_ITEMS,
    MAX_LABEL,
    MAX_LABELS,
    MAX_NAME,
    MAX_OTHER,
    OWN_LABELS,
    PER_SLICE,
    Pushes,
    PushingClient,
    Series,
    parse,
)
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from tests.pushed import DELTA, counter, gauge, pushed

A, B, C = (UUID(int=number) for number in (0xA0, 0xB0, 0xC0))
SOFTWARE = ("apache-kafka-java", "4.1.0")
LIFE_NS = 180 * 10**9
ERRORS = {"PushTelemetry": ("NONE",)}


class Taken:
    """The pushes to one cluster of a kproxy."""

    def __init__(self, max_clients: int = 2, max_series: int = 5) -> None:
        self.metrics = Metrics()
        self.answers, self.pushes = self.metrics.cluster("east").takes_pushes(ERRORS)
        self.pushes.limit(max_clients, max_series)
        self.now_ns = self.metrics.now_ns()

    def take(self, instance: UUID, *points, client_id: str = "app") -> bool:
        """Push points; return whether the client has its own series."""
        owns = self.pushes.admit(instance, client_id, SOFTWARE, self.now_ns, LIFE_NS)
        for _ in self.pushes.take(instance, parse(pushed(*points)), self.now_ns, self.answers.left_out):
            pass
        return owns

    def series(self, metrics: Metrics | None = None) -> dict[str, tuple[str, dict[tuple[str, ...], float]]]:
        """The type of each pushed family, and its samples by the texts of their labels."""
        text = render(registry_of(metrics or self.metrics), "application/openmetrics-text")[0].decode()
        return {
            family.name.removeprefix("kproxy_client_telemetry_"): (
                family.type,
                {_texts(sample.labels): sample.value for sample in family.samples},
            )
            for family in text_string_to_metric_families(text)
            if family.name.startswith("kproxy_client_telemetry_")
        }


def _texts(labels: dict[str, str]) -> tuple[str, ...]:
    """Return the label values, those of OWN_LABELS first."""
    more = sorted(labels.keys() - set(OWN_LABELS))
    return tuple(labels[name] for name in (*OWN_LABELS, *more))


def own(instance_text: str, *values: str, client_id: str = "app") -> tuple[str, ...]:
    return ("east", client_id, instance_text, *SOFTWARE, *values)


A_TEXT, B_TEXT = "AAAAAAAAAAAAAAAAAAAAoA", "AAAAAAAAAAAAAAAAAAAAsA"


def test_names_types_labels_and_values_are_those_of_the_client():
    taken = Taken()
    assert taken.take(
        A,
        counter("org.apache.kafka.producer.connection.creation.total", 7),
        gauge("org.apache.kafka.producer.node.request.latency.avg", 1.5, node_id="1"),
        gauge("com.example.queue-depth", 3, **{"client_id": "mine", "0 odd": "x"}),
    )
    assert taken.series() == {
        "producer_connection_creation": ("counter", {own(A_TEXT): 7.0}),
        "producer_node_request_latency_avg": ("gauge", {own(A_TEXT, "1"): 1.5}),
        "com_example_queue_depth": ("gauge", {own(A_TEXT, "x", "mine"): 3.0}),
    }
    text = render(registry_of(taken.metrics))[0].decode()
    assert 'label_0_odd="x"' in text and 'pushed_client_id="mine"' in text


def test_the_latest_push_counts_and_deltas_add_up():
    taken = Taken()
    for value in (5, 3):
        taken.take(
            A, counter("total", value), counter("more.total", value, DELTA), gauge("g", value, topic=f"t{value}")
        )
    assert taken.series() == {
        "unnamed": ("counter", {own(A_TEXT): 3.0}),
        "more": ("counter", {own(A_TEXT): 8.0}),
        "g": ("gauge", {own(A_TEXT, "t3"): 3.0}),
    }


def test_series_of_a_client_that_left_expire_and_free_its_place():
    taken = Taken(max_clients=1)
    assert taken.take(A, gauge("g", 1))
    assert not taken.take(B, gauge("g", 1))
    taken.metrics.clock_offset_ns += LIFE_NS + 1
    assert taken.series() == {}
    taken.now_ns = taken.metrics.now_ns()
    assert taken.take(B, counter("g", 2))  # the name may also have another type now
    assert taken.series() == {"g": ("counter", {own(B_TEXT): 2.0})}


def test_a_thousand_clients_have_a_bounded_number_of_series_and_the_rest_add_up_in_other():
    taken = Taken(max_clients=10)
    for number in range(1000):
        taken.take(
            UUID(int=1000 + number), counter("sent.total", 2, DELTA), gauge("latency", number), client_id="other"
        )
    found = taken.series()
    assert len(found["sent"][1]) == 11 and len(found["latency"][1]) == 10
    assert found["sent"][1]["east", "other", "other", "other", "other"] == 2.0 * 990
    assert {key[1] for key in found["latency"][1]} == {"=other"}  # a client with this name is not the shared series
    assert taken.answers.left_out == {"clients": 990, "series": 0, "kind": 0}


def test_series_and_label_lengths_of_a_client_are_limited():
    taken = Taken(max_series=5)
    taken.take(A, *(gauge("g", number, topic=f"{number}" + "x" * 5000) for number in range(100)))
    ((_, samples),) = taken.series().values()
    assert len(samples) == 5 and max(len(text) for labels in samples for text in labels) == MAX_LABEL
    assert taken.answers.left_out["series"] == 95
    taken.take(A, gauge("n" * 10_000, 1, **{f"l{number}": "v" for number in range(50)}))
    ((name, (_, samples)),) = taken.series().items()
    assert len(name) == MAX_NAME and len(next(iter(samples))) == 5 + MAX_LABELS
    taken.take(B, gauge("b", 1))
    for number in range(2 * MAX_OTHER):
        assert not taken.take(C, counter(f"c{number}.total", 1, DELTA))
    assert len(taken.pushes.other) == MAX_OTHER


def test_long_names_and_labels_are_fewer_series_and_short_ones_have_room_beside_them():
    taken = Taken(max_series=40)
    labels = {f"{number}{'k' * 150}": "v" * 256 for number in range(MAX_LABELS)}
    long = [gauge(f"g{number}", number, **labels) for number in range(80)]
    short = [*(counter(f"c{number}", 1, DELTA) for number in range(10)), *(gauge(f"s{n}", 1) for n in range(5))]
    for _ in range(2):
        taken.take(A, *long, *short)
    (client,) = taken.pushes.clients.values()
    assert len(client.values) + len(client.sums) < 25 and len(client.sums) == 10
    assert {f"s{number}" for number in range(5)} < {series.name for series in client.values}
    assert sum(map(client.characters, (*client.values, *client.sums))) <= 40 * CHARACTERS


def test_sums_of_earlier_pushes_leave_less_room_for_long_names_and_labels():
    taken = Taken(max_series=40)
    labels = {f"{number}{'k' * 150}": "v" * 256 for number in range(MAX_LABELS)}
    taken.take(A, *(counter(f"c{number}", 1, DELTA, **labels) for number in range(80)))
    (client,) = taken.pushes.clients.values()
    sums = set(client.sums)
    assert 2 < len(sums) < 25
    taken.take(A, *(gauge(f"g{number}", number, **labels) for number in range(80)))
    assert set(client.sums) == sums and not client.values
    taken.take(A, gauge("short", 1))
    assert len(client.values) == 1


def test_the_characters_of_a_series_include_all_that_its_client_chose():
    client = PushingClient("shop", ("librdkafka", "2.6.1"), 0)
    series = Series("name", GAUGE, (("key", "value"), ("k", "")))
    assert client.characters(series) == len("shoplibrdkafka2.6.1namekeyvaluek")
    cut = PushingClient("c" * 1000, ("s" * 1000, "v" * 1000), 0)
    assert cut.characters(Series("n", GAUGE, ())) == 3 * MAX_LABEL + 1


def test_the_first_push_of_a_name_decides_whether_it_is_a_counter_or_a_gauge():
    taken = Taken()
    taken.take(A, counter("x.total", 1), gauge("y_total", 2), gauge("z", 1))
    taken.take(B, gauge("x", 5), gauge("z", 2))
    found = taken.series()
    assert found["x"] == ("counter", {own(A_TEXT): 1.0}) and found["y_total_value"][0] == "gauge"
    assert found["z"][1] == {own(A_TEXT): 1.0, own(B_TEXT): 2.0}
    assert taken.answers.left_out["kind"] == 1


def test_no_two_series_are_alike_however_counters_are_called_and_pushed():
    taken = Taken()
    names = ("a", "a.total", "a_total.total", "total", "total.total", "a.total_", "b__total")
    taken.take(A, *(counter(name, 1) for name in names), counter("d", 1), counter("d", 2, DELTA), counter("b", 1))
    taken.take(A, counter("d", 1, DELTA), counter("e", 2, DELTA))
    taken.take(A, counter("d", 3), counter("e", 4))
    text = render(registry_of(taken.metrics))[0].decode()
    lines = [line.partition(" ")[0] for line in text.splitlines() if line.startswith("kproxy_client_telemetry_")]
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(lines) == len(set(lines)) and len(types) == len(set(types))
    taken.take(A, *(counter(name, 1) for name in names), counter("b", 1))
    text = render(registry_of(taken.metrics))[0].decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert taken.answers.left_out["kind"] > 0


def test_kinds_that_have_no_series_are_counted():
    data = MetricsData()
    metric = data.resource_metrics.add().scope_metrics.add().metrics.add(name="h")
    metric.histogram.data_points.add(count=3)
    taken = Taken()
    taken.pushes.admit(A, "a", SOFTWARE, taken.now_ns, LIFE_NS)
    assert list(taken.pushes.take(A, data, taken.now_ns, taken.answers.left_out)) == []
    assert taken.answers.left_out["kind"] == 1 and taken.series() == {}


@pytest.mark.parametrize("data", [b"\x0a\x00" * 300_000, b"\x0a\x02\x12\x00" * 150_000])
def test_a_push_of_nothing_but_empty_parts_is_read_in_slices_and_not_to_its_end(data):
    pushes = Pushes()
    left_out = {"clients": 0, "series": 0, "kind": 0}
    slices = sum(1 for _ in pushes.take(A, parse(data), 1, left_out))
    assert MAX_ITEMS // PER_SLICE <= slices < 2 * MAX_ITEMS // PER_SLICE and left_out["series"] == 1


@pytest.mark.parametrize("count", [0, 1, PER_SLICE - 1, PER_SLICE, PER_SLICE + 1, 2 * PER_SLICE - 1, 2 * PER_SLICE])
def test_parts_are_taken_so_many_in_a_slice(count):
    left_out = {"clients": 0, "series": 0, "kind": 0}
    resources = b"\x0a\x00" * count
    assert sum(1 for _ in Pushes().take(A, parse(resources), 1, left_out)) == count // PER_SLICE
    assert not any(left_out.values())


@pytest.mark.parametrize("data", [b"\xff" * 100, b"garbage", b"\x0a\x05ab", b"\x0b" * 5000])
def test_what_is_no_otlp_is_refused(data):
    with pytest.raises(Malformed, match="no metrics of OTLP"):
        parse(data)


async def _published(taken: Taken, shared: Shared, worker: int, published: Published) -> None:
    async for changes in published.changes(False):
        shared.take(worker, changes)


def test_workers_add_up_and_the_latest_push_of_a_client_counts_wherever_it_went():
    one, two = Taken(max_clients=1), Taken(max_clients=1)
    parent = Metrics()
    parent.cluster("east").takes_pushes(ERRORS)
    shared = Shared(parent)
    publishing = [(1, one, Published(one.metrics)), (2, two, Published(two.metrics))]

    def publish() -> Metrics:
        for number, taken, published in publishing:
            asyncio.run(_published(taken, shared, number, published))
        return shared.merged()

    one.take(A, counter("sent.total", 4))
    two.now_ns += 1_000_000
    two.take(A, counter("sent.total", 9))
    for taken in (one, two):
        taken.take(B, counter("sent.total", 5, DELTA))
        taken.answers.answers["PushTelemetry", "NONE"] += 2
    found = one.series(publish())
    assert found == {"sent": ("counter", {own(A_TEXT): 9.0, ("east", *["other"] * 4): 10.0})}
    assert shared.merged().cluster("east").telemetry.answers == {("PushTelemetry", "NONE"): 4}
    two.now_ns += 1_000_000
    two.take(A, counter("sent.total", 11))
    assert one.series(publish())["sent"][1][own(A_TEXT)] == 11.0
    shared.gone(2)
    assert one.series(shared.merged())["sent"][1] == {own(A_TEXT): 4.0, ("east", *["other"] * 4): 10.0}


def test_whatever_is_pushed_is_read_or_refused_and_a_scrape_can_be_parsed():
    """Two thousand pushes with some bytes changed."""
    chance = random.Random(7)
    sound = bytearray(pushed(*(counter(f"c{n}.total", n, topic="t") for n in range(9)), gauge("g", 1.5, a="b", c="d")))
    taken = Taken(max_clients=20, max_series=50)
    refused = 0
    for number in range(2000):
        data = bytearray(sound)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        instance = UUID(int=1000 + number % 40)
        taken.pushes.admit(instance, "a", SOFTWARE, taken.now_ns, LIFE_NS)
        try:
            parsed = parse(bytes(data))
        except Malformed:
            refused += 1
            continue
        for _ in taken.pushes.take(instance, parsed, taken.now_ns, taken.answers.left_out):
            pass
    assert 100 < refused < 1900 and taken.series()
    assert sum(len(client.values) + len(client.sums) for client in taken.pushes.clients.values()) <= 20 * 50
