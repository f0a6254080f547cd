"""The compiled core and the Python session relay the same bytes and count the same."""

import asyncio
import gc
import random
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic_ns
from typing import Any
from uuid import UUID

import pytest

from kproxy import core
from kproxy.protocol.apis import FETCH, FIND_COORDINATOR, HEARTBEAT, LIST_OFFSETS, METADATA, OFFSET_COMMIT, PRODUCE
from kproxy.protocol.records import Record, write_batch
from kproxy.proxy.config.lag import Lag
from kproxy.proxy.config.limits import Limits
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.config.telemetry import Telemetry
from kproxy.proxy.connection.operating import connection_row
from kproxy.proxy.relay import compiled
from kproxy.proxy.relay.compiled import Core, Lending
from kproxy.proxy.relay.relay import Relay
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import CLIENT
from kproxy.wire.interest import Interest
from kproxy.wire.state import MAX_CUT_ID
from tests.native import lend_at_once, needs_core
from tests.ports import free_ports
from tests.proxy.live import HOST, Broker, Live, Secured, Wire, kproxy, live
from tests.wire.playbook import foreign_request, request, response, sized
from tests.wire.produces import records

pytestmark = needs_core

ACKS = {"acks": -1}

Exchange = tuple[bytes, bytes | None]  # a request, and its response if there is one


def exchanges(chance: random.Random, broker_port: int) -> Iterator[Exchange]:
    """Requests and responses of a conversation: mostly common ones, and all kinds that the core leaves to Python."""
    for number in range(chance.randint(20, 120)):
        kind = chance.choices(
            (
                "produce",
                "produce 13",
                "fetch",
                "heartbeat",
                "offsets",
                "no answer",
                "metadata",
                "coordinator",
                "foreign",
            ),
            (30, 10, 20, 20, 5, 3, 2, 2, 1),
        )[0]
        size = chance.choice((10, 100, 1000, 1000, 40_000, 200_000))
        client = chance.choice(("c", "c", "another", "Zoë", None))
        error = chance.choices((0, 6, 29), (30, 1, 1))[0]
        throttle_ms = chance.choices((0, 1), (40, 1))[0]
        if kind in ("produce", "no answer", "produce 13"):
            version = 13 if kind == "produce 13" else 8
            acks = 0 if kind == "no answer" else chance.choice((1, -1))
            data, answers = [], []
            for topic in chance.choice(((1,), (1,), (1, 2), (2,))):
                of = {"topicId": UUID(int=topic)} if version == 13 else {"name": f"topic {topic}"}
                indexes = chance.sample(range(20), chance.choices((1, 3, 18), (20, 3, 1))[0])
                data.append(of | {"partitionData": [{"index": each, "records": records(chance)} for each in indexes]})
                chance.shuffle(indexes)
                offsets = [{"index": each, "errorCode": error, "baseOffset": number} for each in indexes]
                answers.append(of | {"partitionResponses": offsets})
            asked = request(PRODUCE, version, number, {"acks": acks, "topicData": data}, client)
            body = {"responses": answers[::-1], "throttleTimeMs": throttle_ms}
            if version == 13 and error == 6:
                body["nodeEndpoints"] = [{"nodeId": 1, "host": HOST, "port": broker_port}]
            yield asked, response(PRODUCE, version, number, body) if acks else None
        elif kind == "fetch":
            asked = request(FETCH, 12, number, {"maxWaitMs": chance.choice((0, 500))}, client)
            partitions = [{"partitionIndex": 0, "errorCode": error, "records": bytes(size)}]
            body = {"responses": [{"topic": "t", "partitions": partitions}], "throttleTimeMs": throttle_ms}
            yield asked, response(FETCH, 12, number, body)
        elif kind == "heartbeat":
            asked = request(HEARTBEAT, 4, number, {"groupId": "g", "memberId": "m"}, client)
            yield asked, response(HEARTBEAT, 4, number, {"errorCode": 27 if error else 0})
        elif kind == "offsets":
            asked = request(LIST_OFFSETS, 5, number, {}, client)
            damaged = sized(response(LIST_OFFSETS, 5, number)[4:-1])
            yield asked, damaged if error else response(LIST_OFFSETS, 5, number)
        elif kind == "metadata":
            brokers = [{"nodeId": 1, "host": HOST, "port": broker_port}]
            yield request(METADATA, 9, number, {}, client), response(METADATA, 9, number, {"brokers": brokers})
        elif kind == "coordinator":
            asked = request(FIND_COORDINATOR, 3, number, {"key": "g"}, client)
            yield asked, response(FIND_COORDINATOR, 3, number, {"nodeId": 1, "host": HOST, "port": broker_port})
        else:
            yield foreign_request(999, 0, number, bytes(8)), sized(number.to_bytes(4) + bytes(size))


def cut(chance: random.Random, stream: bytes) -> Iterator[bytes]:
    while stream:
        size = chance.choice((1, 3, 11, 12, 13, 100, 5000, 100_000, 1 << 20))
        yield stream[:size]
        stream = stream[size:]


async def played(here: Live, seed: int) -> tuple[bytes, bytes]:
    """Play a conversation; return the bytes that reached the broker, and those that reached the client."""
    chance = random.Random(seed)
    talk = list(exchanges(chance, here.broker.port))
    client, broker = await here.connect()
    window = asyncio.Semaphore(chance.choice((1, 2, 8, 30)))

    async def asks() -> None:
        pace = random.Random(seed + 1)
        for asked, answer in talk:
            if answer is not None:
                await window.acquire()
            for part in cut(pace, asked) if pace.random() < 0.3 else (asked,):
                await client.send(part)
                if len(part) < len(asked):
                    await asyncio.sleep(0)

    async def answers() -> bytes:
        pace = random.Random(seed + 2)
        received = bytearray()
        waiting = b""
        for _, answer in talk:
            received += await broker.frame()
            if answer is None:
                continue
            waiting += answer
            if pace.random() < 0.7:  # otherwise several responses leave together
                for part in cut(pace, waiting) if pace.random() < 0.3 else (waiting,):
                    await broker.send(part)
                waiting = b""
            elif window.locked():
                await broker.send(waiting)
                waiting = b""
        await broker.send(waiting)
        return bytes(received)

    async def hears() -> bytes:
        received = bytearray()
        for _, answer in talk:
            if answer is not None:
                received += await client.frame()
                window.release()
        return bytes(received)

    _, at_broker, at_client = await asyncio.gather(asks(), answers(), hears())
    client.close()
    broker.close()
    assert at_broker == b"".join(asked for asked, _ in talk)
    await here.until(lambda: not here.relays)
    return at_broker, at_client


def counted(here: Live) -> Counter[tuple[str, ...]]:
    """All counts that do not depend on time."""
    (cluster,) = here.server.metrics.clusters.values()
    found: Counter[tuple[str, ...]] = Counter()
    for broker in cluster.brokers.values():
        for (api, version), cells in broker.apis.items():
            found[api, version, "requests"] += cells.requests
            found[api, version, "request bytes"] += cells.request_bytes
            found[api, version, "response bytes"] += cells.response_bytes
            for name in ("request_size", "response_size"):
                for bucket, count in enumerate(getattr(cells, name)):
                    found[api, version, name, str(bucket)] += count
            for name in ("duration", "waits", "excess_wait", "throttle"):
                found[api, version, name] += sum(getattr(cells, name))
            for code, count in cells.errors.items():
                found[api, version, "error", str(code)] += count
    for kind, count in cluster.faults.items():
        found["fault", *kind] += count
    if cluster.topics is not None and cluster.lags is not None:
        for topic, cell in cluster.topics.top.cells.items():
            found["topic", str(topic), "bytes"] += cell.request.bytes
            found["topic", str(topic), "records"] += cell.request.records
            for codecs, count in cell.request.batches.items():
                found["topic", str(topic), "batches", str(codecs)] += count
        for (topic, partition), log in cluster.lags.logs.items():
            found["end", str(topic), str(partition)] = log.high_watermark
    for direction, cells in here.server.metrics.directions.items():
        found["frames", direction] += sum(cells.counts)
    return +found


async def _all(
    seeds: range, port: int, broker_port: int, detail: str
) -> tuple[list[tuple[bytes, bytes]], Counter[tuple[str, ...]]]:
    async with kproxy(
        Broker(port=broker_port), port=port, detail=detail, cluster={"lag": Lag(ask_interval_s=0)}
    ) as here:
        found = [await played(here, seed) for seed in seeds]
        core = here.server.relays.worker.core
        assert core is None or core.part_bytes == 0
        return found, counted(here)


@contextmanager
def frames_of_the_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lend connections to the core at once; yield a list that receives the number of frames relayed by each loan."""
    counts: list[int] = []
    take_back = Lending.take_back

    def counting(lending: Lending) -> None:
        was_lent = lending.is_lent
        take_back(lending)
        if was_lent:
            counts.append(sum(lending._relay._session.completed) - lending._since)

    with monkeypatch.context() as patch:
        lend_at_once(patch)
        patch.setattr(Lending, "take_back", counting)
        yield counts


@pytest.mark.sampled(2)
@pytest.mark.parametrize("detail", ["headers", "topics"])
@pytest.mark.parametrize("seeds", [range(8), range(8, 40)], ids=["few", "many"])
def test_the_core_and_python_relay_and_count_alike(seeds: range, detail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port, broker_port = free_ports(6), free_ports(1)
    results = []

    async def test() -> None:
        results.append(await _all(seeds, port, broker_port, detail))

    live(test())
    with frames_of_the_core(monkeypatch) as by_core:
        live(test())
    (python, in_python), (native, in_native) = results
    assert python == native
    assert in_python == in_native
    frames = sum(count for key, count in in_native.items() if key[0] == "frames")
    assert sum(by_core) > frames * (0.5 if detail == "headers" else 0.1)  # Python relays fetches and heartbeats
    assert detail == "headers" or in_native["topic", "topic 1", "records"] > 25 * len(seeds)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ends", [("clients", "brokers"), ("clients",), ("brokers",)], ids="+".join)
def test_the_core_relays_frames_that_python_decrypts(
    ends: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = range(6)
    port, broker_port = free_ports(6), free_ports(1)
    results = []
    secured = Secured.make(tmp_path, clients="clients" in ends, brokers="brokers" in ends)
    monkeypatch.setattr("tests.proxy.live.secured", secured)

    async def test() -> None:
        results.append(await _all(seeds, port, broker_port, "topics"))

    live(test())
    with frames_of_the_core(monkeypatch) as by_core:
        live(test())
    (python, in_python), (native, in_native) = results
    assert python == native
    assert in_python == in_native
    assert sum(by_core) > sum(count for key, count in in_native.items() if key[0] == "frames") * 0.1


RULES = (Rule(action="deny", topic="secret"), Rule(action="deny", client_id="another", group="g2"))


def decided_requests(chance: random.Random) -> Iterator[bytes]:
    """Requests that a policy decides by topics, groups and client ids."""
    for number in range(chance.randint(50, 150)):
        client = chance.choices(("c", "another", None), (8, 3, 1))[0]
        kind = chance.choices((PRODUCE, HEARTBEAT, OFFSET_COMMIT, FETCH, LIST_OFFSETS), (10, 5, 3, 1, 1))[0]
        topics = chance.choices(("a", "b", "secret"), (20, 5, 1), k=chance.choice((1, 1, 2)))
        group = chance.choice(("g1", "g1", "g2"))
        if kind == PRODUCE:
            records = bytes(chance.choice((10, 1000, 1000, 100_000)))
            data = [{"name": name, "partitionData": [{"index": 1, "records": records}]} for name in topics]
            yield request(PRODUCE, chance.choice((7, 9)), number, {"acks": 1, "topicData": data}, client)
        elif kind == HEARTBEAT:
            yield request(HEARTBEAT, 4, number, {"groupId": group, "memberId": str(number)}, client)
        elif kind == OFFSET_COMMIT:
            named = [{"name": name, "partitions": [{"committedOffset": number}]} for name in topics]
            yield request(OFFSET_COMMIT, 8, number, {"groupId": group, "topics": named}, client)
        elif kind == FETCH:
            yield request(
                FETCH,
                12,
                number,
                {"replicaId": -1, "topics": [{"topic": name, "partitions": [{}]} for name in topics]},
                client,
            )
        else:
            yield request(
                LIST_OFFSETS,
                5,
                number,
                {"replicaId": -1, "topics": [{"name": name, "partitions": [{}]} for name in topics]},
                client,
            )


async def refused(here: Live, seed: int) -> tuple[bytes, bytes]:
    """Send requests that a policy decides; return the bytes at the broker, and those at the client."""
    chance = random.Random(seed)
    asked = list(decided_requests(chance))
    client, broker = await here.connect()
    window = asyncio.Semaphore(chance.choice((1, 4)))
    at_broker, at_client = bytearray(), bytearray()

    async def asks() -> None:
        pace = random.Random(seed + 1)
        for each in asked:
            await window.acquire()
            for part in cut(pace, each) if pace.random() < 0.3 else (each,):
                await client.send(part)

    async def answers() -> None:
        while frame := await broker.frame():
            at_broker.extend(frame)
            key, version, number = struct.unpack_from(">hhi", frame, 4)
            await broker.send(response(key, version, number))

    answering = asyncio.create_task(answers())
    asking = asyncio.create_task(asks())
    for _ in asked:
        at_client.extend(await client.frame())
        window.release()
    await asking
    client.close()
    await answering
    broker.close()
    await here.until(lambda: not here.relays)
    return bytes(at_broker), bytes(at_client)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seeds", [range(5), range(5, 20)], ids=["few", "many"])
def test_the_core_relays_requests_that_a_policy_allows(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    port, broker_port = free_ports(6), free_ports(1)
    results = []

    async def test() -> None:
        async with kproxy(Broker(port=broker_port), port=port, cluster={"policy": RULES}) as here:
            found = [await refused(here, seed) for seed in seeds]
            (cells,) = here.server.metrics.clusters.values()
            results.append((found, counted(here), dict(cells.refusals)))

    live(test())
    with frames_of_the_core(monkeypatch) as by_core:
        live(test())
    (python, in_python, refusals), (native, in_native, by_native) = results
    assert python == native
    assert in_python == in_native
    assert refusals == by_native
    assert sum(refusals.values()) > 4 * len(seeds)
    assert sum(by_core) > 25 * len(seeds)


def test_an_exception_closes_only_its_own_connection(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    lend_at_once(monkeypatch)
    learn = Lending.learn

    def fails(lending: Lending, part: bytes) -> object:
        if b"doomed" in part:
            raise RuntimeError("a defect")
        return learn(lending, part)

    monkeypatch.setattr(Lending, "learn", fails)

    async def test() -> None:
        async with kproxy() as here:
            ends = [await here.connect() for _ in range(3)]
            for number in range(3):
                for client, broker in ends:
                    await client.send(request(PRODUCE, 8, number, ACKS))
                    await broker.frame()
                    await broker.send(response(PRODUCE, 8, number))
                    await client.frame()
            doomed, others = ends[0], ends[1:]
            await doomed[0].send(request(PRODUCE, 8, 9, ACKS, "doomed"))
            with pytest.raises(ConnectionResetError):
                await doomed[0].rest()
            for client, broker in others:
                await client.send(request(PRODUCE, 8, 9, ACKS))
                await broker.frame()
                await broker.send(response(PRODUCE, 8, 9))
                await client.frame()
            assert here.counted.disconnects == {"defect": 1}
            for wire in (wire for pair in ends for wire in pair):
                wire.close()

    live(test())
    assert "a defect of kproxy closed the connection" in caplog.text


def test_a_request_starts_after_the_end_of_a_connection_was_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)
    came_back = Lending.came_back
    done_ns: list[int] = []

    def timed(lending: Lending, *state: Any) -> None:
        came_back(lending, *state)
        done_ns.append(monotonic_ns())

    async def test() -> None:
        async with kproxy() as here:
            ends = [await here.connect() for _ in range(2)]
            for client, broker in ends:
                await produces(client, broker)
            (first, first_broker), (second, second_broker) = ends
            relay = list(here.server.relays.worker.relays.values())[1]
            monkeypatch.setattr(Lending, "came_back", timed)
            first.close()  # both are ready in one turn of the loop
            second.sock.send(request(PRODUCE, 8, 9, ACKS))
            await second_broker.frame()
            assert lending_of(relay).is_lent
            (pending,) = relay.session.pending
            assert pending.request_start - here.server.metrics.clock_offset_ns >= done_ns[0]
            for wire in (second, first_broker, second_broker):
                wire.close()

    live(test())


def test_counters_of_a_removed_cluster_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)

    async def test() -> None:
        async with kproxy() as here:
            client, broker = await here.connect()
            for number in range(3):
                await client.send(request(HEARTBEAT, 4, number))
                await broker.frame()
                await broker.send(response(HEARTBEAT, 4, number))
                await client.frame()
            client.close()
            broker.close()
            await here.until(lambda: not here.relays)
            (cells,) = (
                broker
                for cluster in here.server.metrics.clusters.values()
                for broker in cluster.brokers.values()
                if broker.tallies
            )
            (tally,) = cells.tallies.values()
            assert gc.is_tracked(tally)
            assert cells in gc.get_referents(tally)  # so the collector sees the cycle

    live(test())


def lending_of(relay: Relay) -> Lending:
    assert isinstance(relay._lending, Lending)
    return relay._lending


def core_of(here: Live) -> Core:
    core = here.server.relays.worker.core
    assert core is not None
    return core


async def produces(client: Wire, broker: Wire, count: int = 4, name: str | None = "c") -> None:
    """Exchange requests until the core relays them."""
    for number in range(count):
        await client.send(request(PRODUCE, 8, number, ACKS, name))
        await broker.frame()
        await broker.send(response(PRODUCE, 8, number))
        await client.frame()


def test_reading_the_state_of_a_connection_leaves_it_in_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)

    async def test() -> None:
        async with kproxy(cluster={"limits": Limits(idle_timeout_s=600)}) as here:
            client, broker = await here.connect()
            await produces(client, broker)
            await client.send(request(PRODUCE, 8, 9, ACKS, "another"))
            await broker.frame()
            (relay,) = here.server.relays.worker.relays.values()
            (watched,) = [one for batch in here.server.relays.worker.ageing._wheel.values() for one in batch]
            row = connection_row(relay)
            here.server.relays.worker.ageing._look(watched, relay, watched.idle_since + 599)
            assert lending_of(relay).is_lent
            assert watched.received == row["bytes_in"], "the wheel did not read it"
            assert (row["requests"], row["requests_pending"], row["client_id"]) == (5, 1, "another")
            assert relay.session.requests == 5
            assert not lending_of(relay).is_lent
            assert connection_row(relay) == row
            client.close()
            broker.close()

    live(test())


DENIED = Rule(action="deny", topic=("secret",))


@pytest.mark.parametrize(
    ("settings", "cluster", "is_lent"),
    [
        ({}, {}, True),
        ({"read_only": True}, {}, True),
        ({}, {"policy": (DENIED,)}, True),
        ({}, {"policy": (Rule(action="deny", group="secret"),)}, True),
        ({}, {"policy": (Rule(action="deny", group="g"),)}, False),
        ({}, {"policy": (Rule(action="deny", client_id="c", group="g"),)}, False),
        ({}, {"policy_default": "deny", "policy": (Rule(action="allow", api=("Produce",)),)}, False),
        ({"audit": "audit.jsonl"}, {}, True),
        ({}, {"telemetry": Telemetry()}, True),
        ({"detail": "topics"}, {}, False),
        ({"record": "tables"}, {}, False),
        ({"flight": "dumps"}, {}, False),
    ],
    ids=str,
)
def test_the_core_relays_heartbeats_unless_a_rule_or_a_reader_needs_them(
    settings: dict[str, Any],
    cluster: dict[str, Any],
    is_lent: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    is_refused = bool(cluster.keys() & {"policy"}) and not is_lent

    async def test() -> None:
        async with kproxy(cluster=cluster, **settings) as here:
            client, broker = await here.connect()
            for number in range(4):
                await client.send(request(HEARTBEAT, 4, number, {"groupId": "g"}, "c"))
                if not is_refused:
                    await broker.frame()
                    await broker.send(response(HEARTBEAT, 4, number))
                await client.frame()
            (relay,) = here.server.relays.worker.relays.values()
            assert relay.session  # reading it takes the session back from the core
            assert any(by_core) == is_lent
            client.close()
            broker.close()

    with frames_of_the_core(monkeypatch) as by_core:
        live(test())


@pytest.mark.parametrize("name", [None, "n" * 300])
def test_the_core_keeps_the_same_client_id_as_python(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept() -> str | None:
        async with kproxy() as here:
            client, broker = await here.connect()
            await produces(client, broker)
            await produces(client, broker, 2, name)
            await client.send(request(HEARTBEAT, 4, 9, {}, "not read"))
            await broker.frame()
            (relay,) = here.server.relays.worker.relays.values()
            found = relay.session.client_id
            client.close()
            broker.close()
            return found

    async def test() -> None:
        in_python = await kept()
        lend_at_once(monkeypatch)
        assert await kept() == in_python == (name and name[:MAX_CUT_ID])

    live(test())


def test_a_failure_to_return_the_state_to_python_closes_the_connection(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    lend_at_once(monkeypatch)

    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    async def test() -> None:
        async with kproxy() as here:
            for end in ("finish", "drain", "close"):
                client, broker = await here.connect()
                await produces(client, broker)
                (relay,) = here.server.relays.worker.relays.values()
                assert lending_of(relay).is_lent
                with monkeypatch.context() as patch:
                    patch.setattr(compiled, "give_back", fails)
                    getattr(relay, end)("operator")
                await here.until(lambda: not here.relays)
                with suppress(ConnectionResetError):
                    assert await client.rest() == b""
                client.close()
                broker.close()
            assert here.counted.disconnects == {"defect": 2, "operator": 1}

    live(test())
    assert caplog.text.count("a defect of kproxy closed the connection") == 3


ASKED = request(FETCH, 12, 9, {"rackId": "r" * 200}, "c")
INSIGHT = response(FETCH, 12, 9, {"responses": [{"topic": "t", "partitions": [{"records": bytes(2000)}]}]})


@pytest.mark.parametrize("at", [1, 11, 12, 20])
def test_the_core_keeps_partial_frames(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)

    async def test() -> None:
        async with kproxy() as here:
            core = core_of(here)
            client, broker = await here.connect()
            await produces(client, broker)
            (relay,) = here.server.relays.worker.relays.values()
            for sender, receiver, frame in ((client, broker, ASKED), (broker, client, INSIGHT)):
                await sender.send(frame[:at])
                await here.until(lambda: core.part_bytes == at)
                await sender.send(frame[at:])
                assert await receiver.frame() == frame
                assert core.part_bytes == 0
            assert lending_of(relay).is_lent
            cells = next(
                cells
                for broker in core.metrics.clusters["default"].brokers.values()
                for (api, _), cells in broker.apis.items()
                if api == "Fetch"
            )
            core.lane.flush()
            assert cells.receiving_ns > 0
            for wire in (client, broker):
                wire.close()

    live(test())


def test_a_connection_with_a_partial_request_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bytes of a request did not count as received, and the connection was closed as idle."""
    lend_at_once(monkeypatch)

    async def test() -> None:
        async with kproxy(cluster={"limits": Limits(idle_timeout_s=600)}) as here:
            client, broker = await here.connect()
            await produces(client, broker)
            (relay,) = here.server.relays.worker.relays.values()
            ageing = here.server.relays.worker.ageing
            (watched,) = [one for batch in ageing._wheel.values() for one in batch]
            ageing._look(watched, relay, watched.idle_since + 1)
            await client.send(ASKED[:20])
            await here.until(lambda: core_of(here).part_bytes == 20)
            ageing._look(watched, relay, watched.idle_since + 600)
            assert lending_of(relay).is_lent
            await client.send(ASKED[20:])
            assert await broker.frame() == ASKED
            client.close()
            broker.close()

    live(test())


@pytest.mark.parametrize("room", [0, compiled.MAX_PARTS])
def test_partial_frames_return_to_python(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they exceed the limit, and if the session is read."""
    lend_at_once(monkeypatch)
    monkeypatch.setattr(compiled, "MAX_PARTS", room)

    async def test() -> None:
        async with kproxy() as here:
            core = core_of(here)
            client, broker = await here.connect()
            await produces(client, broker)
            (relay,) = here.server.relays.worker.relays.values()
            received = relay.counts().received_bytes
            await client.send(request(HEARTBEAT, 4, 8))
            await broker.frame()
            await client.send(ASKED[:20])
            await broker.send(response(HEARTBEAT, 4, 8)[:9])
            if room:
                await here.until(lambda: core.part_bytes == 20 + 9)
            assert relay.session.backlog[CLIENT] is not None or not room
            await here.until(
                lambda: sum(relay.session.received_bytes) == sum(received) + len(request(HEARTBEAT, 4, 8)) + 29
            )
            assert core.part_bytes == 0
            await broker.send(response(HEARTBEAT, 4, 8)[9:])
            assert await client.frame() == response(HEARTBEAT, 4, 8)
            await client.send(ASKED[20:])
            assert await broker.frame() == ASKED
            await broker.send(INSIGHT[:100])
            broker.end()
            assert await client.rest() == INSIGHT[:100]
            client.close()
            await here.until(lambda: not here.relays)
            assert core.part_bytes == 0
            broker.close()

    live(test())


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("end", ["reset", "close"])
def test_a_partial_request_counts_as_unanswered_if_its_connection_is_cut(
    end: str, tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core had its first bytes, and the request was not counted."""
    if tls:
        monkeypatch.setattr("tests.proxy.live.secured", Secured.make(tmp_path))
    found = []

    async def test() -> None:
        async with kproxy() as here:
            client, broker = await here.connect()
            await produces(client, broker)
            (relay,) = here.server.relays.worker.relays.values()
            received = sum(relay.counts().received_bytes)
            await client.send(ASKED[:20])
            await here.until(lambda: sum(relay.counts().received_bytes) == received + 20)
            if end == "reset":
                client.reset()
            else:
                relay.close("operator")
            await here.until(lambda: not here.relays)
            found.append((here.counted.unanswered, here.counted.disconnects))
            core = here.server.relays.worker.core
            assert core is None or core.part_bytes == 0
            broker.close()

    monkeypatch.setenv(core.CHOICE, core.PYTHON)
    live(test())
    lend_at_once(monkeypatch)
    live(test())
    assert found[0] == found[1]
    assert found[0][0].total() == 1


def test_the_cores_references_to_a_server_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)

    async def test() -> None:
        async with kproxy() as here:
            client, broker = await here.connect()
            await produces(client, broker)
            (relay,) = here.server.relays.worker.relays.values()
            assert here.server.relays.worker.poller in gc.get_referents(
                core_of(here).lane
            )  # so the collector sees the cycle
            assert lending_of(relay) in gc.get_referents(lending_of(relay)._conn)
            client.close()
            broker.close()

    live(test())


def test_a_reload_adds_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    lend_at_once(monkeypatch)

    async def test() -> None:
        async with kproxy() as here:
            core = core_of(here)
            info = ConnectionInfo("default", "live:0", HOST, 1, HOST, 2, 1, 0)
            counting = here.server.metrics.connection(info, "0", "1", [])
            before, after = (Interest().plan(HEARTBEAT << 16 | 4) for _ in range(2))
            assert core.tally(counting, before, counts=False) is core.tally(counting, after, counts=False)

    live(test())


def test_records_are_counted_after_a_reload_to_detail_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters of earlier connections accepted no records: the first records ended the counting of their turn."""
    lend_at_once(monkeypatch)
    data = [{"name": "t", "partitionData": [{"index": 3, "records": write_batch([Record(0, 1, None, b"x")])}]}]
    acknowledged = [{"name": "t", "partitionResponses": [{"index": 3, "baseOffset": 41}]}]

    async def test() -> None:
        async with kproxy(cluster={"lag": Lag(ask_interval_s=0)}) as here:
            before = await here.connect()
            await produces(*before)
            (cluster,) = here.server.config.clusters
            topics = cluster.model_copy(update={"detail": "topics"})
            config = here.server.config.model_copy(update={"clusters": (topics,)})
            here.server.reloader.reads(lambda: config)
            report, _ = await asyncio.gather(here.server.reloader.reload("the test"), here.broker.answer_kproxy())
            assert report.outcome == "applied"
            client, broker = await here.connect()
            for number in range(4):
                await client.send(request(PRODUCE, 8, number, ACKS | {"topicData": data}))
                await broker.frame()
                await broker.send(response(PRODUCE, 8, number, {"responses": acknowledged}))
                await client.frame()
            relay = here.server.relays.worker.relays[max(here.server.relays.worker.relays)]
            assert lending_of(relay).is_lent
            core_of(here).lane.flush()
            (cells,) = here.server.metrics.clusters.values()
            assert cells.topics is not None and cells.lags is not None
            assert cells.topics.top.cells["t"].request.records == 4
            assert cells.lags.logs["t", 3].high_watermark == 42
            for wire in (client, broker, *before):
                wire.close()

    live(test())
