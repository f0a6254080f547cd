"""Real sockets with misbehaving peers: bytes are forwarded unchanged, and closes and resets are passed on."""

import asyncio
import errno
import gc
import gzip
import json
import random
import select
import socket
import time
import tracemalloc
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet
import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import FETCH, HEARTBEAT, PRODUCE, SASL_HANDSHAKE
from kproxy.proxy.relay import in_flight, relay
from kproxy.proxy.sockets import listeners
from kproxy.proxy.sockets.sockets import READ_BYTES
from kproxy.tables.live.recorder import Recorder
from kproxy.wire import pairing
from kproxy.wire.connection import ConnectionInfo
from kproxy.wire.events import Exchange, Unanswered
from kproxy.wire.state import FRAMES_PER_CALL
from tests.native import lend_at_once, needs_core
from tests.proxy.live import HOST, Live, Secured, Wire, arrival_times, behind_kproxy, kproxy, live, request, response
from tests.wire.playbook import foreign_request, sized

VECTORS = Path(__file__).parents[2] / "data" / "vectors-dev.jsonl.gz"
MEBIBYTE = 1 << 20
BUSY_S = 180  # for hundreds of connections on a busy machine


# These tests concern the socket itself, or send and receive without a turn of the loop.
PLAIN_ONLY = (
    "test_bytes_that_are_not_kafka_cause_few_log_lines_and_a_close",
    "test_a_drain_still_relays_new_requests_until_its_time_is_short",
    "test_the_client_is_read_only_once_the_broker_is_connected",
    "test_a_response_read_in_the_turn_of_its_request_is_not_older_than_it",
    "test_the_limit_of_connections_makes_clients_wait",
    "test_accepting_pauses_while_no_file_descriptor_is_left",
)
NOT_OVER_TLS = (
    "test_an_idle_connection_takes_few_bytes_of_memory",
    "test_memory_is_released_without_the_garbage_collector",
)


def pytest_generate_tests(metafunc):
    """Run each test also with TLS on both sides, and with connections that the compiled core relays."""
    name = metafunc.function.__name__
    if name not in PLAIN_ONLY:
        ways = ["plain", pytest.param("core", marks=needs_core)]
        if name not in NOT_OVER_TLS:
            ways += ["tls", pytest.param("tls core", marks=needs_core)]
        metafunc.parametrize("over", ways, indirect=True)


@pytest.fixture(scope="session")
def certified(tmp_path_factory):
    return Secured.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(autouse=True)
def over(request, certified, monkeypatch):
    ways = getattr(request, "param", "plain").split()
    if "tls" in ways:
        monkeypatch.setattr("tests.proxy.live.secured", certified)
    if "core" in ways:
        lend_at_once(monkeypatch)


def produce(correlation_id: int, size: int = 100, acks: int = -1) -> bytes:
    topics = [{"name": "t", "partitionData": [{"index": 0, "records": b"r" * size}]}]
    return request(PRODUCE, 8, correlation_id, {"acks": acks, "topicData": topics})


def produced(correlation_id: int) -> bytes:
    return response(PRODUCE, 8, correlation_id, {"responses": []})


def fetched(correlation_id: int, size: int) -> bytes:
    partitions = [{"partitionIndex": 0, "records": b"r" * size}]
    return response(FETCH, 11, correlation_id, {"responses": [{"topic": "t", "partitions": partitions}]})


def test_an_idle_connection_takes_few_bytes_of_memory():
    """Memory that kproxy's own code keeps for a connection after one exchange: 4,200 bytes."""

    async def test():
        async def idle(count: int) -> list[Wire]:
            ends = []
            for number in range(count):
                client, broker = await here.connect()
                await client.send(produce(number))
                await broker.frame()
                await broker.send(produced(number))
                await client.frame()
                ends += [client, broker]
            return ends

        own = [tracemalloc.Filter(True, str(Path(relay.__file__).parents[2] / "*"))]
        async with kproxy() as here:
            opened = await idle(10)
            tracemalloc.start()
            try:
                opened += await idle(50)  # in total below PROBED_AT, at which kproxy queries the broker
                gc.collect()
                size = sum(found.size for found in tracemalloc.take_snapshot().filter_traces(own).traces)
            finally:
                tracemalloc.stop()
            assert here.relays == 60
            assert size / 50 < 5000
            for wire in opened:
                wire.close()

    live(test())


def test_bytes_are_forwarded_unchanged():
    """Requests and responses of all sizes, split anywhere, read at any pace, in both directions at once."""

    async def test():
        dice = random.Random(4)
        asked = [produce(number, dice.choice((0, 10, 3000, 300_000))) for number in range(60)]
        answers = [produced(number) for number in range(60)]

        async def say(wire: Wire, data: bytes) -> None:
            at = 0
            while at < len(data):
                step = dice.choice((1, 7, 100, 5000, 200_000))
                await wire.send(data[at : at + step])
                at += step
                if dice.random() < 0.1:
                    await asyncio.sleep(0.001)

        async def hear(wire: Wire, count: int) -> bytes:
            received = b""
            while len(received) < count:
                received += await wire.read(min(count - len(received), dice.choice((1, 1000, 100_000))))
            return received

        async def serve(broker: Wire) -> bytes:
            received = b""
            for answer in answers:
                received += await broker.frame()
                await say(broker, answer)
            return received

        async with kproxy() as here:
            client, broker = await here.connect()
            at_broker, at_client, _ = await asyncio.gather(
                serve(broker), hear(client, sum(map(len, answers))), say(client, b"".join(asked))
            )
            assert at_broker == b"".join(asked)
            assert at_client == b"".join(answers)
            cells = here.server.metrics.cluster("default").brokers["bootstrap"].apis["Produce", "8"]
            assert cells.requests == 60
            assert cells.request_bytes == len(at_broker)

    live(test())


@behind_kproxy()
async def test_a_broker_that_does_not_read_pauses_the_client(here, client, broker):
    message = produce(1, 40 * MEBIBYTE)
    sending = asyncio.create_task(client.send(message))
    await here.until(lambda: here.counted.paused)
    (relay,) = here.server.relays.worker.relays.values()
    assert len(relay._peers[1].unsent) <= READ_BYTES
    assert not sending.done()
    assert await broker.read(len(message)) == message
    await sending
    await broker.send(produced(1))
    assert await client.frame() == produced(1)


@behind_kproxy()
async def test_a_client_that_does_not_read_pauses_the_broker_and_can_still_send(here, client, broker):
    await client.send(request(FETCH, 11, 1))
    await broker.frame()
    answer = fetched(1, 40 * MEBIBYTE)
    sending = asyncio.create_task(broker.send(answer))
    await here.until(lambda: here.counted.paused)
    (relay,) = here.server.relays.worker.relays.values()
    assert len(relay._peers[0].unsent) <= READ_BYTES
    await client.send(produce(2))  # a client may write before it reads
    assert await broker.frame() == produce(2)
    assert await client.read(len(answer)) == answer
    await sending
    await broker.send(produced(2))
    assert await client.frame() == produced(2)
    assert set(here.counted.paused) == {"broker"}


@behind_kproxy()
async def test_too_many_unanswered_requests_pause_the_client(here, client, broker):
    count = 3 * pairing.LIMIT
    size = 100  # so that one read contains more requests than the limit leaves
    asked = [produce(number, size) for number in range(count)]
    go = asyncio.Event()
    lag = pairing.LIMIT // 2

    async def serve() -> None:
        for number in range(count + lag):
            if number < count:
                assert await broker.frame() == asked[number]
            if number >= lag:
                await go.wait()
                await broker.send(produced(number - lag))

    sending = asyncio.create_task(client.send(b"".join(asked)))
    serving = asyncio.create_task(serve())
    await here.until(lambda: here.counted.paused.get("client"))
    (relay,) = here.server.relays.worker.relays.values()
    assert await client.is_silent()
    assert len(relay.session.pending) == pairing.LIMIT
    go.set()
    answers = b"".join(map(produced, range(count)))
    assert await client.read(len(answers)) == answers
    await asyncio.gather(sending, serving)


@behind_kproxy()
async def test_a_flood_of_small_frames_is_spread_over_turns_and_paused_at_the_limit(here, client, broker):
    """One read contains more frames than a call of the session handles, and more than may be pending. None is lost."""
    frames = [foreign_request(9999, 0, number) for number in range(3 * pairing.LIMIT)]
    turns: list[int] = []

    async def watch() -> None:
        while relays := [*here.server.relays.worker.relays.values()]:
            turns.append(relays[0].session.completed[0])
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    sending = asyncio.create_task(client.send(b"".join(frames)))
    first = b"".join(frames[: pairing.LIMIT])
    assert await broker.read(len(first)) == first and await broker.is_silent()
    (relay,) = here.server.relays.worker.relays.values()
    assert len(relay.session.pending) == pairing.LIMIT and here.counted.paused.get("client")
    for number in range(len(frames)):
        await broker.send(sized(number.to_bytes(4)))
    rest = b"".join(frames[pairing.LIMIT :])
    assert await broker.read(len(rest)) == rest
    answers = b"".join(sized(number.to_bytes(4)) for number in range(len(frames)))
    assert await client.read(len(answers)) == answers
    await sending
    watching.cancel()
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 8 * FRAMES_PER_CALL


def test_a_client_that_sent_nothing_is_counted_as_silent():
    """Health checks of a load balancer must not look like reconnecting clients."""

    async def test():
        async with kproxy() as here:
            for number, sent in enumerate((b"", b"", produce(1, 100)), 1):
                client, broker = await here.connect()
                await client.send(sent)
                assert await broker.read(len(sent)) == sent
                client.close()
                broker.close()
                await here.until(lambda number=number: sum(here.counted.disconnects.values()) == number)
            assert (here.counted.accepted, here.counted.silent) == (3, 2)

    live(test())


@pytest.mark.parametrize("reset", [True, False])
def test_a_paused_client_that_disconnects_leaves_no_connection(reset, monkeypatch):
    """Its requests are pending at a silent broker, and further ones are unread."""
    monkeypatch.setattr(in_flight, "GONE_S", 0.1)

    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            # Few enough that buffers take all of them: otherwise the close, behind them, would not reach kproxy.
            sent = b"".join(produce(number, 100) for number in range(pairing.LIMIT + 400))
            sending = asyncio.create_task(client.send(sent))
            first = b"".join(produce(number, 100) for number in range(pairing.LIMIT))
            assert await broker.read(len(first)) == first and await broker.is_silent()
            assert here.relays == 1
            await sending
            client.reset() if reset else client.end()
            await here.until(lambda: not here.relays)
            assert here.counted.disconnects == {"client_reset" if reset else "client_closed": 1}
            assert sum(here.counted.unanswered.values()) == pairing.LIMIT
            for wire in (client, broker):
                wire.close()

    live(test())


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_step_does_not_count_as_duration(step_s, monkeypatch):
    step_ns = 0
    monkeypatch.setattr("kproxy.proxy.sockets.poller.time_ns", lambda: time.time_ns() + step_ns)

    async def test():
        nonlocal step_ns
        async with kproxy() as here:
            client, broker = await here.connect()
            for number in range(3):
                await asyncio.sleep(0.05)
                step_ns = number * step_s * 1_000_000_000
                await client.send(produce(number))
                await broker.frame()
            (found,) = here.server.relays.worker.relays.values()
            counting = found._counting
            assert sum(counting.inside[0].counts) == 3
            assert 0 <= counting.inside[0].total_ns < 60e9 and 0 <= counting.lag.total_ns < 60e9
            for wire in (client, broker):
                wire.close()

    live(test())


@behind_kproxy()
async def test_a_half_close_is_passed_on_and_the_response_still_arrives(here, client, broker):
    await client.send(produce(1))
    client.end()
    assert await broker.rest() == produce(1)
    await broker.send(produced(1))
    assert await client.frame() == produced(1)
    assert here.relays == 1
    broker.close()
    assert await client.rest() == b""
    await here.until(lambda: not here.relays)
    assert here.counted.disconnects == {"client_closed": 1}


REFUSED = {"errorCode": 33, "mechanisms": ["GSSAPI"]}


@behind_kproxy()
async def test_a_half_close_behind_an_unanswered_handshake_waits_for_the_response(here, client, broker):
    ask = request(SASL_HANDSHAKE, 0, 1, {"mechanism": "PLAIN"})
    behind = b"".join(foreign_request(9999, 0, number) for number in range(4 * FRAMES_PER_CALL))
    await client.send(ask)
    assert await broker.frame() == ask
    await client.send(behind)
    client.end()
    assert await broker.is_silent()
    await broker.send(response(SASL_HANDSHAKE, 0, 1, REFUSED))
    assert await broker.rest() == behind
    answers = b"".join(sized(number.to_bytes(4)) for number in range(4 * FRAMES_PER_CALL))
    await broker.send(answers)
    assert (
        await client.frame() == response(SASL_HANDSHAKE, 0, 1, REFUSED) and await client.read(len(answers)) == answers
    )
    broker.close()
    assert await client.rest() == b""
    await here.until(lambda: not here.relays)
    assert here.counted.disconnects == {"client_closed": 1}


@pytest.mark.parametrize("answer", ["never", "an end"])
def test_a_close_waits_for_a_handshake_only_for_a_limited_time(answer, monkeypatch):
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.1 if answer == "never" else 3600)

    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            await client.send(request(SASL_HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}))
            await broker.frame()
            await client.send(sized(b"token"))
            client.close()
            if answer == "an end":
                assert await broker.is_silent()
                broker.close()
            await here.until(lambda: not here.relays)

    live(test())


@behind_kproxy()
async def test_requests_that_wait_for_a_handshake_keep_their_time_of_arrival(here, client, broker):
    begun = time.monotonic_ns()
    await client.send(request(SASL_HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}))
    await broker.frame()
    behind = b"".join(foreign_request(9999, 0, number) for number in range(4 * FRAMES_PER_CALL))
    await client.send(behind)
    assert await broker.is_silent()
    await broker.send(response(SASL_HANDSHAKE, 0, 1, REFUSED))
    assert await broker.read(len(behind)) == behind
    (connection,) = here.server.relays.worker.relays.values()
    inside = connection._counting.inside[0]
    await here.until(lambda: sum(inside.counts) == 4 * FRAMES_PER_CALL + 1)
    assert inside.total_ns <= sum(inside.counts) * (time.monotonic_ns() - begun)


@behind_kproxy()
async def test_the_time_of_a_response_behind_a_tls_key_update_is_not_too_long(here, client, broker):
    """The uptime of the machine was added, after a client had requested a key update and read nothing."""
    begun = time.monotonic_ns()
    for number in range(2):
        await client.send(produce(number))
        await broker.frame()
        (connection,) = here.server.relays.worker.relays.values()
        broker.sock.send(produced(number))
        if number:
            connection._wait_for_room(0)  # as the TLS socket does
            connection._peers[1].readable()  # before the client's socket is found writable
        assert await client.frame() == produced(number)
    inside = connection._counting.inside[1]
    assert connection.session
    await here.until(lambda: sum(inside.counts) == 2)
    assert inside.total_ns <= 2 * (time.monotonic_ns() - begun)


@pytest.mark.parametrize("first", [0, 1], ids=["client", "broker"])
def test_a_side_that_hangs_after_the_other_has_closed_leaves_no_connection(first, monkeypatch):
    monkeypatch.setattr(relay, "HALF_CLOSED_S", 0.1)

    async def test():
        async with kproxy() as here:
            ends = await here.connect()
            ends[first].close()
            assert await ends[1 - first].rest() == b""
            await here.until(lambda: not here.relays)
            assert here.counted.disconnects == {("client_closed", "broker_closed")[first]: 1}

    live(test())


@pytest.mark.parametrize("side", [0, 1], ids=["client", "broker"])
def test_a_side_that_does_not_read_is_closed(side, monkeypatch):
    """The other side is paused meanwhile, so its disconnect would go unnoticed."""
    monkeypatch.setattr(relay, "STALLED_S", (0.2, 0.2))

    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            if side == 0:
                await client.send(request(FETCH, 11, 1))
                await broker.frame()
                sending = broker.send(fetched(1, 40 * MEBIBYTE))
            else:
                sending = client.send(produce(1, size=40 * MEBIBYTE))
            with pytest.raises(OSError):
                await sending
            await here.until(lambda: not here.relays)
            assert here.counted.disconnects == {("client_stalled", "broker_stalled")[side]: 1}
            for wire in (client, broker):
                wire.close()

    live(test())


@behind_kproxy()
async def test_a_close_is_passed_on_after_all_bytes_before_it(here, client, broker):
    await client.send(request(FETCH, 11, 1))
    await broker.frame()
    answer = fetched(1, 40 * MEBIBYTE)
    sending = asyncio.create_task(broker.send(answer))
    await here.until(lambda: here.counted.paused)
    sending.add_done_callback(lambda _: broker.close())
    assert await client.rest() == answer
    client.close()
    await here.until(lambda: not here.relays)
    assert here.counted.disconnects == {"broker_closed": 1}


def test_a_reset_is_passed_on_as_a_reset():
    async def test():
        async with kproxy() as here:
            for side in (0, 1):
                wires = await here.connect()
                await wires[0].send(produce(1))
                await wires[1].frame()
                wires[side].reset()
                with pytest.raises(ConnectionResetError):
                    await wires[1 - side].rest()
            await here.until(lambda: not here.relays)
            assert here.counted.disconnects == {"client_reset": 1, "broker_reset": 1}
            assert here.counted.unanswered == {("Produce", "client_reset"): 1, ("Produce", "broker_reset"): 1}

    live(test())


def test_a_reset_directly_behind_a_request_is_not_missed():
    """Both are ready at the client's only read, so the poller must report the reset again."""

    async def test():
        async with kproxy() as here:
            for _ in range(20):
                client, broker = await here.connect()
                await here.until(lambda: here.relays == 1)
                client.sock.send(produce(1))
                client.reset()
                with pytest.raises(ConnectionResetError):
                    await broker.rest()
                await here.until(lambda: not here.relays)

    live(test())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("detail", "records"), [("headers", False), ("topics", False), ("batches", True)])
def test_no_bytes_and_no_disconnect_of_peers_make_a_relay_hang_or_raise(detail, records, tmp_path):
    """Frames of every API, cut, changed and repeated, from both sides; closes and resets at any time.

    With every level of detail, and with a recorder, whose tables then contain every exchange that was counted.
    """
    dice = random.Random(11)
    rounds = 10 if detail == "headers" else 4
    recorder = Recorder(tmp_path / "tables", {"detail": detail}) if records else None
    frames = {"request": [], "response": []}
    with gzip.open(VECTORS) as lines:
        for line in lines:
            vector = json.loads(line)
            if vector["dir"] in frames and len(vector["hex"]) < 20_000:
                frames[vector["dir"]].append(sized(bytes.fromhex(vector["hex"])))

    def hostile(frame: bytes) -> bytes:
        for _ in range(dice.choice((0, 0, 0, 1, 3))):
            at = dice.randrange(len(frame) + 1)
            frame = dice.choice(
                (
                    frame[:at],
                    frame[:at] + dice.randbytes(dice.randrange(20)) + frame[at:],
                    frame[:at] + dice.randbytes(1) + frame[at + 1 :],
                    frame + frame,
                )
            )
        return frame

    async def leave(wire: Wire) -> None:
        match dice.randrange(3):
            case 0:
                wire.reset()
            case 1:
                wire.end()
                async with asyncio.timeout(0.2):
                    await wire.rest()
        wire.close()

    async def ask(here: Live) -> None:
        with suppress(OSError, TimeoutError):
            wire = await here.dial()
            with closing(wire):
                for _ in range(dice.randrange(1, 20)):
                    await wire.send(hostile(dice.choice(frames["request"])))
                    if dice.random() < 0.3:
                        await asyncio.sleep(0)
                await leave(wire)

    async def answer(wire: Wire) -> None:
        with suppress(OSError, TimeoutError), closing(wire):
            while len(frame := await wire.read(12)) == 12:
                length = int.from_bytes(frame[:4], "big") - 8
                if not 0 <= length < 1_000_000 or dice.random() < 0.05:
                    break
                await wire.read(length)
                reply = bytearray(dice.choice(frames["response"]))
                reply[4:8] = frame[8:12]
                await wire.send(hostile(bytes(reply)))
            await leave(wire)

    async def serve(here: Live) -> None:
        async with asyncio.TaskGroup() as serving:
            while True:
                with suppress(OSError):  # a peer that disconnected in the TLS handshake
                    serving.create_task(answer(await here.broker.accept()))

    async def all_gone(here: Live, count: int) -> None:
        """Wait until all connections have ended, also those that ended before kproxy accepted them."""
        await here.until(lambda: here.counted.disconnects.total() == here.counted.accepted == count)

    relayed: list[int] = []

    async def test():
        async with kproxy(detail=detail, sinks=[recorder] if recorder else []) as here:
            serving = asyncio.create_task(serve(here))
            wanted = {"fault", "client_reset", "broker_reset", "client_closed"}
            asked = 0
            while asked < 40 * rounds or not here.counted.disconnects.keys() >= wanted:  # random causes
                await asyncio.gather(*(ask(here) for _ in range(40)))
                asked += 40
                await all_gone(here, asked)
            assert not serving.done()
            serving.cancel()
            assert not here.relays
            assert "defect" not in here.counted.disconnects
            gone = here.counted.disconnects
            relayed.append(asked - gone["tls"] - gone["unreachable"])  # these had no relay yet

    if recorder is None:
        live(test(), BUSY_S)
        return
    recorder.start()
    live(test(), BUSY_S)
    recorder.close()
    tables = tmp_path / "tables"
    exchanges = pyarrow.parquet.read_table(tables / "exchanges").to_pylist()
    assert pyarrow.parquet.read_table(tables / "connections").num_rows == sum(relayed)
    assert {"answered", "unanswered"} <= {row["outcome"] for row in exchanges} and len(exchanges) > sum(relayed)
    quality = pyarrow.parquet.read_table(tables / "quality").to_pylist()
    assert not {"dropped", "defect", "lost"} & {row["kind"] for row in quality}


@behind_kproxy()
async def test_the_client_gets_the_part_of_a_response_that_a_dying_broker_sent(here, client, broker):
    """The client gets the part and the close; the request counts as unanswered."""

    await client.send(request(FETCH, 11, 1))
    await broker.frame()
    answer = fetched(1, 500_000)
    await broker.send(answer[:300_000])
    broker.close()
    assert await client.rest() == answer[:300_000]
    client.close()
    await here.until(lambda: not here.relays)
    assert here.counted.unanswered == {("Fetch", "broker_closed"): 1}


@behind_kproxy()
async def test_writing_to_a_closed_broker_connection_resets_the_client(here, client, broker):
    broker.close()
    assert await client.rest() == b""
    with pytest.raises(OSError, match=r"reset|pipe|closed"):
        while True:
            await client.send(produce(1, 10_000))
            await asyncio.sleep(0.001)
    await here.until(lambda: not here.relays)


@pytest.mark.parametrize(
    ("first_bytes", "kind"),
    [
        (bytes.fromhex("160301020001000100030333"), "tls"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", "http"),
        (b"\xff\xff\xff\xff" + bytes(12), "size"),
        (b"\x7f\xff\xff\xff" + bytes(12), "size"),
    ],
)
def test_bytes_that_are_not_kafka_cause_few_log_lines_and_a_close(first_bytes, kind, caplog):
    async def test():
        async with kproxy() as here:
            for _ in range(20):  # a port scan must not flood the log
                client, broker = await here.connect()
                await client.send(first_bytes)
                assert await client.rest() == b""
                assert await broker.rest() == b""
            assert here.counted.faults == {("client", kind): 20}
            assert here.counted.disconnects == {"fault": 20}

    live(test())
    lines = [record.getMessage() for record in caplog.records if f"fault={kind}" in record.getMessage()]
    assert 1 <= len(lines) < 20


@behind_kproxy()
async def test_an_unexpected_response_does_not_reach_the_client(here, client, broker):
    await client.send(produce(1))
    await broker.frame()
    await broker.send(produced(77))
    assert await client.rest() == b""
    assert await broker.rest() == b""
    assert here.counted.faults == {("broker", "unexpected_answer"): 1}


@behind_kproxy()
async def test_a_response_with_an_invalid_size_closes_the_connection(here, client, broker):
    await client.send(produce(1))
    await broker.frame()
    await broker.send(b"\xff\xff\xff\xf0" + bytes(20))
    assert await client.rest() == b""
    assert here.counted.faults == {("broker", "size"): 1}


def test_an_exception_in_a_sink_closes_one_connection(caplog):
    class Defect:
        def connected(self, info):
            return self.events

        def events(self, events):
            if any(getattr(event, "correlation_id", None) == 13 for event in events):
                raise ZeroDivisionError

    async def test():
        async with kproxy(sinks=[Defect()]) as here:
            client, broker = await here.connect()
            other, its_broker = await here.connect()
            await client.send(produce(13))
            await broker.frame()
            await broker.send(produced(13))
            assert await client.frame() == produced(13)
            for wire in (client, broker):
                with pytest.raises(ConnectionResetError):
                    await wire.rest()
            assert await other.is_silent()
            await other.send(produce(2))
            assert await its_broker.frame() == produce(2)
            assert here.relays == 1
            assert here.counted.disconnects == {"defect": 1}

    live(test())
    assert "ZeroDivisionError" in caplog.text


def test_other_sinks_get_each_event_once_although_a_sink_always_raises(caplog):
    """It raises in a turn with deferred work, and again at the close; only its connection is closed."""
    numbers: list[int] = []  # correlation ids of the events in the sink before the one that raises
    last: list[int] = []  # in the sink after it

    def number_of(event):
        return getattr(event, "exchange", event).correlation_id

    class Defect:
        def connected(self, info):
            is_the_one = not raising
            raising.append(info)

            def take(events):
                if is_the_one and (numbers[-1] >= 200 or isinstance(events[0], Unanswered)):
                    raise ZeroDivisionError

            return take

    raising: list[ConnectionInfo] = []

    class Witness:
        def __init__(self, numbers):
            self.numbers = numbers

        def connected(self, info):
            def take(events):
                if info is raising[0]:
                    self.numbers.extend(
                        number_of(event) for event in events if isinstance(event, Exchange | Unanswered)
                    )

            return take

    async def test():
        async with kproxy(sinks=[Witness(numbers), Defect(), Witness(last)]) as here:
            client, broker = await here.connect()
            await client.send(produce(1))
            await broker.frame()
            other, its_broker = await here.connect()
            count = 2000
            frames = b"".join(request(PRODUCE, 8, number, {"acks": 0}) for number in range(100, count))
            sending = [asyncio.create_task(wire.send(frames)) for wire in (client, other)]
            assert await its_broker.read(len(frames)) == frames
            await asyncio.gather(*sending, return_exceptions=True)
            await here.until(lambda: here.relays == 1)
            assert here.counted.disconnects == {"defect": 1}
            for wire in (client, broker, other, its_broker):
                wire.close()
        assert len(numbers) == len(set(numbers)) >= 100  # no event twice
        assert numbers[-1] == last[-1] == 1  # the unanswered request

    live(test())
    assert "ZeroDivisionError" in caplog.text


@behind_kproxy()
async def test_broker_addresses_at_the_end_of_a_large_response_are_hidden_at_constant_size(here, client, broker):
    """The broker endpoints of KIP-951 are at the end of a response whose size was forwarded long before."""

    await client.send(request(FETCH, 16, 1))
    await broker.frame()
    hints = [{"nodeId": 1, "host": "broker-1.internal", "port": 9092}]
    partitions = [{"partitionIndex": 0, "errorCode": 6, "records": b"r" * 500_000}]
    body = {"responses": [{"partitions": partitions}], "nodeEndpoints": hints}
    answer = response(FETCH, 16, 1, body)
    await broker.send(answer)
    frame = await client.frame()
    assert len(frame) == len(answer)
    _, body = codec.decode_response(frame[4:], FETCH, 16)
    assert "nodeEndpoints" not in body
    assert body["responses"][0]["partitions"][0]["records"] == b"r" * 500_000
    assert here.counted.neutralised == {"Fetch": 1}
    assert not here.counted.rewritten and not here.counted.unbound and not here.counted.faults


# --- draining --------------------------------------------------------------------------------------------------------


@behind_kproxy(drain_timeout_s=5)
async def test_a_drain_completes_the_request_in_transit_and_delivers_pending_responses(here, client, broker):
    idle, _ = await here.connect()
    first, second, third = produce(1), produce(2, 500_000), produce(3)
    await client.send(first + second[:200_000])
    assert await broker.frame() == first
    stopping = asyncio.create_task(here.server.stop())
    assert await idle.rest() == b""
    idle.close()
    for each in tuple(here.server.relays.worker.relays.values()):
        each.drain()  # as when the time is short: the client might always send another request
    await client.send(second[200_000:] + third)
    assert await broker.frame() == second
    assert await broker.is_silent()  # the third request is not read
    await broker.send(produced(1) + produced(2))
    assert await broker.rest() == b""
    assert await client.rest() == produced(1) + produced(2)
    client.close()
    await stopping
    assert here.counted.disconnects == {"drained": 2}
    with pytest.raises(ConnectionRefusedError):
        await Wire.dial(here.port)


@behind_kproxy(drain_timeout_s=5)
async def test_a_drain_still_relays_new_requests_until_its_time_is_short(here, client, broker):
    """The close arrives together with the last response, so that the client sees it before it sends another request."""
    (its,) = here.server.relays.worker.relays.values()
    its.finish()
    its.finish()
    assert await client.rest() == b""  # no request pending, none arriving: it ends soon
    client, broker = await here.connect()
    await client.send(produce(1))
    assert await broker.frame() == produce(1)
    here.server.relays.worker.relays[2].finish()
    await client.send(produce(2) + produce(3)[:30])
    assert await broker.frame() == produce(2)
    await broker.send(produced(1) + produced(2))
    assert await client.frame() == produced(1)
    assert await client.frame() == produced(2)
    await client.send(produce(3)[30:])
    assert await broker.frame() == produce(3)
    await broker.send(produced(3))
    await asyncio.to_thread(select.select, [client.sock], [], [], 5)
    assert client.sock.recv(1 << 16) == produced(3)
    assert client.sock.recv(1 << 16) == b""  # the close is already there
    client.close()


@behind_kproxy(drain_timeout_s=5)
async def test_a_drain_delivers_the_response_to_a_sasl_token(here, client, broker):
    await client.send(request(SASL_HANDSHAKE, 0, 1, {"mechanism": "PLAIN"}))
    await broker.frame()
    await client.send(sized(b"token"))
    assert await broker.is_silent()
    stopping = asyncio.create_task(here.server.stop())
    await broker.send(response(SASL_HANDSHAKE, 0, 1, {}))
    assert await client.frame() == response(SASL_HANDSHAKE, 0, 1, {})
    assert await broker.frame() == sized(b"token")
    await broker.send(sized(b""))
    assert await client.rest() == sized(b"")
    client.close()
    await stopping
    assert here.counted.disconnects == {"drained": 1}


@behind_kproxy(drain_timeout_s=0.05)
async def test_a_drain_ends_in_time_although_a_response_is_missing(here, client, broker):
    await client.send(produce(1))
    await broker.frame()
    await here.server.stop()
    assert await client.rest() == b""
    assert here.counted.disconnects == {"drain_timeout": 1}


@behind_kproxy(drain_timeout_s=5)
async def test_a_drain_ends_if_the_broker_disconnects(here, client, broker):
    await client.send(produce(1))
    await broker.frame()
    (its,) = here.server.relays.worker.relays.values()
    stopping = asyncio.create_task(here.server.stop())
    its.finish()
    broker.close()
    assert await client.rest() == b""
    client.close()
    await stopping
    assert here.counted.disconnects == {"drained": 1}


# --- accepting -------------------------------------------------------------------------------------------------------


def test_the_limit_of_connections_makes_clients_wait():
    async def test():
        async with kproxy(max_connections=2) as here:
            one, _ = await here.connect()
            await here.connect()
            third = await Wire.dial(here.port)
            await third.send(produce(1))
            await asyncio.sleep(0.05)
            assert here.relays == 2 and not here.server.relays.worker.gate.is_open
            one.close()
            broker = await here.broker.accept()
            assert await broker.frame() == produce(1)

    live(test())


def test_accepting_pauses_while_no_file_descriptor_is_left(monkeypatch):
    """Repeating a failing accept would use a whole core; clients wait in the backlog instead."""

    async def test():
        monkeypatch.setattr(listeners, "_EXHAUSTED_PAUSE_S", 1.0)
        real_accept = socket.socket.accept
        failed = 0

        def accept(sock):
            nonlocal failed
            if failed:
                return real_accept(sock)
            failed += 1
            raise OSError(errno.EMFILE, "Too many open files")

        async with kproxy() as here:
            monkeypatch.setattr(socket.socket, "accept", accept)
            client = await Wire.dial(here.port)
            await client.send(produce(1))
            await here.until(lambda: failed)
            assert not here.server.relays.worker.gate.is_open
            await here.until(lambda: here.relays == 1)
            monkeypatch.undo()
            broker = await here.broker.accept()
            assert await broker.frame() == produce(1)

    live(test())


def test_the_client_is_read_only_once_the_broker_is_connected(monkeypatch):
    async def test():
        async with kproxy() as here:
            loop = asyncio.get_running_loop()
            let = asyncio.Event()
            dialler = here.server.relays.worker.dialler
            dial = dialler.dial

            async def slow(address, **options):
                await let.wait()
                return await dial(address)

            dialler.dial = slow
            client = await Wire.dial(here.port)
            message = produce(1, 40 * MEBIBYTE)
            sending = loop.create_task(client.send(message))
            await asyncio.sleep(0.1)
            assert not sending.done()  # it is in the kernel's buffers, not in kproxy's
            let.set()
            broker = await here.broker.accept()
            assert await broker.read(len(message)) == message

    live(test())


def test_memory_is_released_without_the_garbage_collector():
    import gc
    import weakref

    async def test():
        async with kproxy() as here:
            client, broker = await here.connect()
            await client.send(produce(1))
            await broker.frame()
            gc.disable()
            try:
                gone = weakref.ref(next(iter(here.server.relays.worker.relays.values())))
                client.close()
                broker.close()
                await here.until(lambda: not here.relays)
                await here.until(lambda: gone() is None)
            finally:
                gc.enable()

    live(test())


def answers_at_once(sock: socket.socket) -> None:
    """A broker for one connection, on its own thread, that answers each Heartbeat at once."""
    with suppress(OSError), sock, sock.makefile("rb") as asked:
        while head := asked.read(12):
            asked.read(int.from_bytes(head[:4], "big") - 8)
            sock.sendall(response(HEARTBEAT, 4, int.from_bytes(head[8:12], "big")))


def asks(port: int, count: int, times_s: list[float]) -> None:
    """A client on its own thread: it sends `count` Heartbeats in turn and appends the duration of each to `times_s`."""
    with socket.create_connection((HOST, port)) as sock, sock.makefile("rb") as answers:
        for number in range(count):
            start = time.perf_counter()
            sock.sendall(request(HEARTBEAT, 4, number))
            answers.read(int.from_bytes(answers.read(4), "big"))
            times_s.append(time.perf_counter() - start)
            time.sleep(0.013)  # or the next would arrive while the loop is awake


async def asked_while_blocked(here: Live, times_s: list[float]) -> asyncio.Future[None]:
    """Send 40 requests in turn while other work blocks the loop for 40 ms at a time; return the broker's future."""
    loop = asyncio.get_running_loop()
    client = loop.run_in_executor(None, asks, here.port, 40, times_s)
    broker = await here.broker.accept()
    broker.sock.setblocking(True)
    serving = loop.run_in_executor(None, answers_at_once, broker.sock)
    while not client.done():
        await asyncio.sleep(0.002)
        time.sleep(0.04)  # noqa: ASYNC251
    await client
    return serving


@pytest.mark.parametrize("is_late", [False, True], ids=["turn", "kernel"])
def test_a_response_read_in_the_turn_of_its_request_is_not_older_than_it(is_late):
    """It arrived after the turn began: the time of the turn is too early for it, and the kernel's clock may step."""
    seen: list[Exchange] = []

    class Sink:
        def connected(self, info):
            return lambda events: seen.extend(event for event in events if isinstance(event, Exchange))

    async def test():
        async with kproxy(sinks=[Sink()]) as here:
            client, broker = await here.connect()
            await here.until(lambda: here.relays)
            (relay,) = here.server.relays.worker.relays.values()
            clock = here.server.relays.worker.poller
            for number in range(3):
                client.sock.send(request(HEARTBEAT, 4, number))
                clock.turn_ns = time.monotonic_ns()
                clock.wall_offset_ns = time.time_ns() - clock.turn_ns
                clock.now_ns = clock.turn_ns + 5_000_000  # earlier work of the turn took 5 ms
                clock.is_late = is_late
                relay._peers[0].readable()
                assert broker.sock.recv(100) == request(HEARTBEAT, 4, number)
                broker.sock.send(response(HEARTBEAT, 4, number))
                relay._peers[1].readable()
                assert await client.frame() == response(HEARTBEAT, 4, number)
        assert len(seen) == 3
        times = [(each.request_start, each.request_end, each.response_start, each.response_end) for each in seen]
        assert all(list(each) == sorted(each) for each in times)
        assert all(each.queue_ns == 0 for each in seen)

    live(test())


def test_the_wait_of_a_response_for_a_busy_loop_does_not_count_as_time_of_the_broker():
    """By the clock of the turn, the loop reads it an hour after the kernel received it."""
    hour_ns = 3600 * 10**9
    seen: list[Exchange] = []

    class Sink:
        def connected(self, info):
            return lambda events: seen.extend(event for event in events if isinstance(event, Exchange))

    async def test():
        async with kproxy(sinks=[Sink()]) as here:
            client, broker = await here.connect()
            await here.until(lambda: here.relays)
            (relay,) = here.server.relays.worker.relays.values()
            clock = here.server.relays.worker.poller
            client.sock.send(request(HEARTBEAT, 4, 1))
            assert await broker.frame() == request(HEARTBEAT, 4, 1)
            broker.sock.send(response(HEARTBEAT, 4, 1))
            now_ns = time.monotonic_ns()
            clock.wall_offset_ns = time.time_ns() - now_ns
            clock.turn_ns = clock.now_ns = now_ns + hour_ns
            clock.is_late = True
            relay._peers[1].readable()
            assert await client.frame() == response(HEARTBEAT, 4, 1)
        (exchange,) = seen
        assert 0 <= exchange.response_start - exchange.request_end < hour_ns

    with arrival_times():
        live(test())
