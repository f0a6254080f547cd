"""Chaos in short, and whether its verdicts are worth anything. `./dev chaos` goes on for as long as wanted."""

import socket
import threading
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.chaos import load
from tests.chaos.faults import FAULTS, schedule
from tests.chaos.links import Links
from tests.chaos.run import run
from tests.ports import free_ports

SECONDS = 60
SEED = 11


@pytest.mark.ring2
@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_torn_or_stuck(tmp_path: Path) -> None:
    tally = run(tmp_path, seconds=SECONDS, seed=SEED)
    print(tally.json())
    assert not tally.violations, f"again: ./dev chaos --seed {SEED} --minutes {SECONDS / 60:g}\n{tally.json()}"
    assert sum(tally.faults.values()) >= 2
    assert min(tally.acknowledged.values()) > 100 and tally.transactions["committed"] > 10
    assert min(tally.received.values()) > 100


def test_the_schedule_follows_from_the_seed() -> None:
    def first(seed: int) -> list[tuple[str, float]]:
        return [(name, chance.random()) for name, _, chance in islice(schedule(seed, FAULTS), 40)]

    assert first(1) == first(1) != first(2)
    assert {name for name, _ in first(1)[: len(FAULTS)]} == set(FAULTS)


class Promised:
    """What the verdicts ask of a load."""

    topic = "topic"
    idempotent = True
    sent = 6
    acknowledged = frozenset(range(6))


GOOD = [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([[0, 2, 4], [1, 3]], id="lost"),
        pytest.param([[0, 2, 4], [1, 3, 5, 5]], id="doubled"),
        pytest.param([[0, 4, 2], [1, 3, 5]], id="order"),
        pytest.param([[0, 2, 4, 99], [1, 3, 5]], id="never sent"),
    ],
)
def test_a_broken_promise_to_a_producer_is_seen(log: list[list[int]]) -> None:
    assert not list(load.producer_violations(Promised(), GOOD))  # type: ignore[arg-type]
    assert list(load.producer_violations(Promised(), log))  # type: ignore[arg-type]
    received = Counter(number for partition in GOOD for number in partition)
    assert not list(load.group_violations("group", received, GOOD))
    del received[5]
    assert list(load.group_violations("group", received, GOOD))


class Transacted:
    topic = "topic"
    sizes = {1: 2, 2: 1, 3: 2}  # noqa: RUF012
    committed = frozenset({1})
    aborted = frozenset({2})
    uncertain = frozenset({3})


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([[100]], id="torn"),
        pytest.param([[]], id="committed and lost"),
        pytest.param([[100, 101, 200]], id="aborted and there"),
        pytest.param([[100, 101, 101]], id="doubled"),
        pytest.param([[100, 101, 300]], id="uncertain and torn"),
    ],
)
def test_a_transaction_that_is_not_atomic_is_seen(log: list[list[int]]) -> None:
    for good in ([[100], [101]], [[100, 300], [101, 301]]):
        assert not list(load.transaction_violations(Transacted(), good))  # type: ignore[arg-type]
    assert list(load.transaction_violations(Transacted(), log))  # type: ignore[arg-type]


def test_a_damaged_record_is_seen() -> None:
    data = load.value(12345)
    assert load.number_of(data) == 12345
    with pytest.raises(ValueError, match="damaged"):
        load.number_of(data[:-1] + bytes([data[-1] ^ 1]))


def test_links_pass_stall_and_cut() -> None:
    port = free_ports(2)
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        Links({f"127.0.0.1:{port + 1}": f"127.0.0.1:{port}"}) as links,
    ):
        client = socket.create_connection(("127.0.0.1", port + 1), timeout=20)
        other, _ = server.accept()
        client.sendall(b"there")
        assert other.recv(100) == b"there"
        other.sendall(b"back")
        assert client.recv(100) == b"back"
        stall = threading.Thread(target=lambda: links.do(do="stall", seconds=1))
        start = time.monotonic()
        stall.start()
        time.sleep(0.3)
        client.sendall(b"late")
        assert other.recv(100) == b"late" and time.monotonic() - start > 0.9
        stall.join()
        links.do(do="cut", share=1, seed=1)
        count = 0
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"x" * 100)
                count += 100
                time.sleep(0.001)
        assert 0 < count < 50_000
        other.close()
        client.close()
