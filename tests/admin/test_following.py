"""How a trace begins, what it yields of several processes, and each reason for its end, to the frame and the byte."""

import asyncio

import pytest

from kproxy.admin import following
from kproxy.admin.following import follow
from kproxy.wire.events import CLIENT


def frame(time_ns, size=100):
    return (time_ns, 7, "10.0.0.1:40000", CLIENT, size, None, None, "")


class Processes:
    """Two processes. takes: what each of them has at each turn, as (frames, left out, connections traced now)."""

    def __init__(self, takes, watched=(1, 0)):
        self._takes, self._watched = iter(takes), watched
        self.calls = []

    async def operate(self, operation, *arguments):
        self.calls.append((operation, arguments))
        if operation == "trace_start":
            return list(self._watched)
        return next(self._takes) if operation == "trace_take" else [None, None]


@pytest.fixture
def traced(monkeypatch):
    """traced(query, takes): the lines of a trace, on a clock that goes on by a second at each look."""
    now_s = 0.0

    def monotonic():
        nonlocal now_s
        now_s += 1
        return now_s

    monkeypatch.setattr(following, "_POLL_S", 0)
    monkeypatch.setattr(following, "monotonic", monotonic)

    def traced(query, takes, watched=(1, 0)):
        processes = Processes(takes, watched)

        async def lines():
            return [line async for line in follow({"seconds": "100", **query}, processes.operate)]

        found = asyncio.run(lines())
        started, *taken, stopped = processes.calls
        assert (started[0], stopped[0]) == ("trace_start", "trace_stop")
        assert {arguments[:1] for _, arguments in processes.calls} == {started[1][:1]}  # all of one trace
        assert {operation for operation, _ in taken} == {"trace_take"}
        return found

    return traced


def times(lines):
    return [line["time_ns"] if line and "time_ns" in line else line for line in lines]


def test_frames_of_all_processes_are_in_the_order_of_their_times(traced):
    takes = [
        [([frame(3), frame(8)], 0, 1), ([frame(5)], 0, 1)],
        [([], 1, 1), ([], 0, 1)],
        [([frame(9)], 1, 0), ([], 2, 0)],
    ]
    assert times(traced({"connection": "7"}, takes)) == [
        {"tracing": 7, "connections": 1},
        *(3, 5, 8, None, 9),
        {"ended": "the connection has ended", "left_out": 3},
    ]


def test_the_trace_of_a_client_goes_on_without_connections_until_its_time_is_over(traced):
    nothing = [([], 0, 0), ([], 0, 0)]
    lines = traced({"client": "10.0.0.1", "seconds": "3"}, [nothing] * 5, watched=(0, 0))
    assert lines == [
        {"tracing": "10.0.0.1", "connections": 0},
        *(None, None),
        {"ended": "its time is over", "left_out": 0},
    ]


@pytest.mark.parametrize(
    ("query", "shown", "why"),
    [
        ({"frames": "1"}, 1, "its number of frames is reached"),
        ({"frames": "33"}, 33, "its number of frames is reached"),
        ({"frames": "70"}, 70, "its number of frames is reached"),
        ({"frames": "71"}, 70, "the connection has ended"),
        ({"bytes": "100"}, 1, "its bytes are reached"),
        ({"bytes": "101"}, 2, "its bytes are reached"),
        ({"bytes": "200", "frames": "2"}, 2, "its number of frames is reached"),
        ({}, 70, "the connection has ended"),
    ],
)
def test_a_trace_ends_after_so_many_frames_or_bytes(traced, query, shown, why):
    """70 frames of 100 bytes come at once, which are decoded in pieces."""
    lines = traced({"connection": "7", **query}, [[([frame(n) for n in range(70)], 0, 0), ([], 0, 0)]])
    assert [line["time_ns"] for line in lines[1:-1]] == list(range(shown))
    assert lines[-1] == {"ended": why, "left_out": 0}


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"connection": "7", "client": "10.0.0.1"},
        {"connection": "7", "speed": "9"},
        {"connection": "x"},
        {"connection": "7", "seconds": "3601"},
        {"connection": "7", "frames": "1000001"},
        {"connection": "7", "bytes": str((1 << 30) + 1)},
    ],
)
def test_other_parameters_start_nothing(query):
    processes = Processes([])
    with pytest.raises(ValueError):
        asyncio.run(anext(follow(query, processes.operate)))
    assert not processes.calls


def test_a_connection_that_is_not_open_is_said_to_be_none_and_its_trace_stops():
    processes = Processes([], watched=(0, 0))
    with pytest.raises(ValueError, match="connection=7 is not open"):
        asyncio.run(anext(follow({"connection": "7"}, processes.operate)))
    assert [operation for operation, _ in processes.calls] == ["trace_start", "trace_stop"]
