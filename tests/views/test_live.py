"""The screen: what it shows, and that it fits."""

import io
import re

import pytest
from rich.console import Console

from kproxy.metrics import Metrics
from kproxy.metrics.summary import summarise
from kproxy.views.live import View
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import ANSWERED, Exchange
from kproxy.wire.interest import ApiPlan

S = 1_000_000_000


def busy(apis):
    """A view after half a minute: each second 100 exchanges of 3 ms of each API, of which one has an error."""
    metrics = Metrics()
    view = View("demo", (("metrics", "http://127.0.0.1:1/metrics"),))
    connections = [
        metrics.connection(ConnectionInfo("demo", "live:demo", "c", 1, "b", 2, 1, 0), "demo", broker)
        for broker in ("1", "2", "3", "bootstrap")
    ]
    plans = [ApiPlan(number, 1, name, True) for number, name in enumerate(apis)]
    view.add(summarise(metrics, 0))
    for second in range(1, 31):
        for plan in plans:
            for number in range(100):
                exchange = Exchange(plan, number, number, 0, 2000, 0)
                exchange.request_end, exchange.response_start, exchange.response_end = 0, 3_000_000, 3_000_000
                exchange.response_bytes, exchange.outcome = 500, ANSWERED
                exchange.queue_ns = exchange.muted_ns = 0
                exchange.errors = (6,) if number == 0 else ()
                exchange.throttle_ms = 40 if number == 1 else 0
                connections[number % 4].events([exchange])
        view.add(summarise(metrics, second * S))
    return view


def drawn(view, width, height):
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True)
    console.print(view.screen(width, height))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("count", [1, 6, 40])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (80, 20), (200, 60)])
def test_the_screen_fits(width, height, count):
    lines = drawn(busy([f"Api{number}" for number in range(count)]), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert any(line.startswith(" metrics http://127.0.0.1:1/metrics") for line in lines[-2:])


def test_rates_and_times_are_those_of_the_last_seconds():
    lines = drawn(busy(["Produce"]), 80, 24)
    (row,) = [line for line in lines if line.startswith(" Produce")]
    # A second has 100 requests of 2000 bytes, answers of 500, and an error; 3 ms lie in the bucket from 2.5 to 5 ms.
    assert " ".join(row.split()) == "Produce 100 3.75 ms 4.97 ms 200 kB/s 50.0 kB/s 40.0 ms 10"
    assert any("NOT_LEADER_OR_FOLLOWER Produce ×10" in line for line in lines)


def test_a_line_says_the_same():
    line = busy(["Produce"]).line()
    assert "100 requests/s  to brokers 200 kB/s  to clients 50.0 kB/s  throttled 10  errors 10" in line
    assert "Produce 100/s p50 3.75 ms p99 4.97 ms" in line


def test_before_anything_happened_there_is_a_screen_too():
    view = View("demo", ())
    view.add(summarise(Metrics(), 0))
    assert any("errors  none" in line for line in drawn(view, 80, 24))
    assert "0 requests/s" in view.line()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_figures_stand_beside_their_names(width):
    """Of both tables in the same columns, and no further away in a wide terminal."""
    rows = [line for line in drawn(busy(["Produce", "Fetch"]), width, 40) if re.match(r" (Produce|Fetch|1|2|3) ", line)]
    places = {line.index("ms") for line in rows}
    assert len(rows) == 5 and len(places) == 1 and max(places) < 40
