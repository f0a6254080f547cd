"""Memory that peers can make a process use: the docs follow from the accounts; each is filled, bounded and emptied.

Bytes of clients and brokers go over sockets, through a whole kproxy.
"""

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from kproxy.protocol.apis import DESCRIBE_GROUPS, HEARTBEAT, PRODUCE
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.process.accounts import ACCOUNTS, held, table
from kproxy.proxy.relay import pressure
from kproxy.wire.decisions.own_answers import MAX_OWN_BYTES
from kproxy.wire.pairing import LIMIT
from tests.project import ROOT
from tests.proxy.live import Live, Wire, kproxy, live
from tests.wire.playbook import request

SECRETS = [f"secret-{number}".ljust(30_000, "x") for number in range(300)]

# Accounts that a whole kproxy fills only slowly, or in another process: the tests that fill and empty them.
ELSEWHERE = {
    "parts": ("tests.proxy.relay.test_compiled",),
    "slow_work": ("tests.proxy.relay.test_slow_lanes", "tests.proxy.filters.policy.test_authorizer"),
    "frames": ("tests.wire.observing.test_kept", "tests.proxy.filters.test_feed"),
    "logins": ("tests.proxy.admission.test_logins",),
    "headers": ("tests.proxy.sockets.test_proxy_header",),
    "policy": ("tests.proxy.filters.policy.test_authorizer", "tests.proxy.filters.policy.test_globs"),
    "audit": ("tests.proxy.filters.policy.test_audit", "tests.proxy.test_log_lines"),
    "telemetry": ("tests.proxy.filters.test_telemetry",),
    "metrics": ("tests.metrics.counters.test_named", "tests.metrics.consumers.test_lag"),
    "zookeeper": ("tests.proxy.relay.test_zookeeper",),
    "addresses": ("tests.proxy.admission.test_limits",),
    "admin": ("tests.admin.test_server",),
}


def test_the_table_of_the_docs_follows_from_the_accounts() -> None:
    assert table() in Path(ROOT, "docs/limits.md").read_text()


def test_each_account_is_filled_by_a_test() -> None:
    assert {account.key for account in ACCOUNTS} == FILLS.keys() | ELSEWHERE.keys()
    for modules in ELSEWHERE.values():
        for module in modules:
            assert any(name.startswith("test_") for name in vars(import_module(module)))


def heartbeats(count: int) -> bytes:
    return b"".join(request(HEARTBEAT, 4, number, {"groupId": "g"}) for number in range(count))


def whole_produce(size: int) -> bytes:
    data = [{"name": "t", "partitionData": [{"index": 0, "records": bytes(size)}]}]
    return request(PRODUCE, 9, 1, {"acks": 1, "timeoutMs": 1, "topicData": data})


async def _pending_requests(here: Live, client: Wire) -> None:
    await client.send(heartbeats(200))
    await here.until(lambda: now(here)["pending_requests"])
    assert now(here)["pending_requests"] <= LIMIT


async def _said(here: Live, client: Wire) -> None:
    """A body of which a part came is copied; once it is whole, what it names counts until the answer."""
    data = [{"name": "n" * 30_000, "partitionData": []}]
    whole = request(PRODUCE, 9, 1, {"acks": 1, "timeoutMs": 1, "topicData": data})
    await client.send(whole[:20_000])
    await here.until(lambda: now(here)["said"] >= 19_000)
    await client.send(whole[20_000:])
    await here.until(lambda: now(here)["said"] > len(whole))


async def _kept(here: Live, client: Wire) -> None:
    sending = asyncio.create_task(client.send(whole_produce(32 << 20)))  # its broker reads nothing
    await here.until(lambda: now(here)["kept"])
    await asyncio.sleep(0.1)
    assert now(here)["kept"] <= 512 * 1024 and now(here)["large"] == 0
    sending.cancel()


async def _large(here: Live, client: Wire) -> None:
    await client.send(request(DESCRIBE_GROUPS, 4, 1, {"groups": SECRETS}))
    await here.until(lambda: now(here)["large"])
    assert now(here)["large"] == now(here)["kept"] < 10 << 20 and now(here)["held"] == 0


async def _held(here: Live, client: Wire) -> None:
    await client.send(request(DESCRIBE_GROUPS, 4, 1, {"groups": SECRETS})[:1_000_000])
    await here.until(lambda: now(here)["held"] == 1_000_000)


async def _own_answers(here: Live, client: Wire) -> None:
    few = SECRETS[:20]
    await client.send(heartbeats(1) + request(DESCRIBE_GROUPS, 4, 2, {"groups": few}))
    await here.until(lambda: now(here)["own_answers"] > 600_000)
    sending = asyncio.create_task(client.send(b"".join([request(DESCRIBE_GROUPS, 4, 3, {"groups": few})] * 8)))
    await here.until(lambda: here.limits.get("own_answers"))
    assert MAX_OWN_BYTES < now(here)["own_answers"] < 2 * MAX_OWN_BYTES
    sending.cancel()


async def _ended(here: Live, client: Wire) -> None:
    await client.send(heartbeats(LIMIT))
    await here.until(lambda: len(here.server.relays.worker.relays) and now(here)["pending_requests"])  # type: ignore[union-attr]
    await here.until(lambda: next(iter(here.server.relays.worker.relays.values()))._in_flight_state == 2)  # type: ignore[union-attr]
    client.end()
    await here.until(lambda: now(here)["ended"] == 1)


async def _traces(here: Live, client: Wire) -> None:
    worker = here.server.relays.worker
    assert worker is not None
    worker.traces.start("trace", worker.relays.values(), next(iter(worker.relays)), None)
    await client.send(heartbeats(10))
    await here.until(lambda: now(here)["traces"])
    worker.traces.stop("trace")


FILLS = {
    "pending_requests": _pending_requests,
    "said": _said,
    "kept": _kept,
    "large": _large,
    "held": _held,
    "own_answers": _own_answers,
    "ended": _ended,
    "traces": _traces,
}

DECIDED = ("large", "held", "own_answers")  # by a policy


def now(here: Live) -> dict[str, int]:
    return {key: count for key, count in held(here.server.relays.worker).items() if key not in ELSEWHERE}


@pytest.mark.parametrize("key", FILLS)
def test_held_memory_has_its_bound_and_is_released(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset of both sides, whatever was under way, every account of the process is empty again."""
    monkeypatch.setattr(pressure, "MOST_REQUESTS", LIMIT - pressure.FREE_REQUESTS)
    rules = (Rule(action="deny", group="secret-*"),) if key in DECIDED else ()

    async def test() -> None:
        async with kproxy(cluster={"policy": rules}, detail="topics") as here:
            limits = {account.key: account.limit for account in ACCOUNTS}
            assert not any(now(here).values())
            client, broker = await here.connect()
            await FILLS[key](here, client)
            assert all(count <= limits[what] for what, count in now(here).items())
            client.reset()
            broker.reset()
            await here.until(lambda: not here.relays)
            assert not any(now(here).values())

    live(test(), 25)
