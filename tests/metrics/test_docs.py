"""docs/metrics.md lists every metric with its type, labels and HELP."""

import re
from itertools import chain
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kproxy.errors import DIAL_CAUSES
from kproxy.metrics import Metrics
from kproxy.metrics.counters.bounds import DURATION_NS, quantile
from kproxy.metrics.counters.passive import ENDS, PassiveCells
from kproxy.metrics.counters.zookeeper import ZooKeeperCells
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from kproxy.metrics.scrape.known import DISCONNECT_CAUSES, FAULTS
from kproxy.protocol.apis import HEARTBEAT
from kproxy.wire.events import BROKER, CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.session import Session
from kproxy.zookeeper.session import ANSWERED, Operation
from tests.metrics.test_metrics import MS, busy_metrics, info
from tests.wire.playbook import request, response

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
SECTION = re.compile(r"^### `(\w+)`\n\n(\w+) · (.*)\n\n(.*)$", re.MULTILINE)


def test_the_page_describes_every_metric_as_it_is_exposed():
    described = {
        name: (type_, set(re.findall(r"`(\w+)`", labels)), text) for name, type_, labels, text in SECTION.findall(PAGE)
    }
    exposed = {}
    passive = Metrics()
    passive.passive = PassiveCells("eth0", ["gap"])
    passive.passive.copies["default"] = 1
    relaying = busy_metrics()
    relaying.zookeeper["old"] = ZooKeeperCells(["zk1:2181"])
    relaying.zookeeper["old"].count(Operation("getData", 1, 0, 0, outcome=ANSWERED, error=-101))
    relaying.cluster("default").takes_pushes({"PushTelemetry": ("NONE",)})
    relaying.cluster("default").asks_for_lag(("ListOffsets",))
    relaying.otlp_pushes["success"] = 1
    relaying.flight_dumps["asked"] = {"written": 1}
    pages = [render(registry_of(metrics))[0].decode() for metrics in (passive, relaying)]
    for family in chain.from_iterable(map(text_string_to_metric_families, pages)):
        if family.name.startswith("kproxy_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = set().union(*(sample.labels for sample in family.samples)) - {"le"}
            exposed[name] = (family.type, labels, family.documentation)
    assert described.keys() == exposed.keys()
    for name, found in exposed.items():
        assert described[name] == found, name
    assert len(SECTION.findall(PAGE)) == len(re.findall("^### ", PAGE, re.MULTILINE))


def test_the_page_names_every_cause_and_every_kind():
    for value in (*DISCONNECT_CAUSES, *ENDS, *DIAL_CAUSES, *(kind for _, kind in FAULTS)):
        assert f"`{value}`" in PAGE, value


def test_the_page_says_how_far_answers_that_come_together_flatten_quantiles():
    """A broker takes 5 ms for each of the requests in flight; its answers are read one by one, or all at once."""

    def measured(depth, together):
        metrics = Metrics()
        talk = Session(Interest())
        connection = metrics.connection(info(), "main", "1", talk.pending)
        now_ns = 0
        for _ in range(200):
            talk.receive(CLIENT, memoryview(b"".join(request(HEARTBEAT, 4, number) for number in range(depth))), now_ns)
            while talk.backlog[CLIENT] is not None:  # the first one compiles its plan, which is all the work of a call
                talk.resume(CLIENT, now_ns)
            answers = [response(HEARTBEAT, 4, number) for number in range(depth)]
            for some in [b"".join(answers)] if together else answers:
                now_ns += 5 * MS * (depth if together else 1)
                talk.receive(BROKER, memoryview(some), now_ns)
            connection.events(talk.events)
            talk.events.clear()
        (cells,) = metrics.cluster("default").brokers["1"].apis.values()
        p50, p99 = (quantile(DURATION_NS, cells.duration, q) / MS for q in (0.5, 0.99))
        return p50, p99, cells.duration_ns / sum(cells.duration) / MS

    for depth in (2, 4, 8, 16):
        p50, p99, mean = measured(depth, together=False)
        flat, high, also_mean = measured(depth, together=True)
        row = f"| {depth} | {p50:.2f} ms, {p99:.2f} ms | {flat:.2f} ms, {high:.1f} ms | {mean:.1f} ms |"
        assert row in PAGE
        assert mean == also_mean
