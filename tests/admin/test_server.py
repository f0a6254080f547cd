"""The admin server over HTTP."""

import asyncio
import gc
import gzip
import json
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from urllib.parse import quote

import aiohttp
import pytest
import uvloop
from yarl import URL

from kproxy.admin.connections import Connection
from kproxy.admin.server import Admin
from kproxy.proxy.config.tls import ClientTls
from kproxy.proxy.tls import contexts
from tests.certificates import Authority
from tests.proxy.live import TlsWire, Wire

BODY = b"# TYPE a gauge\na 1\n" * 500


@asynccontextmanager
async def serving(scrape=lambda accept: (BODY, "text/plain; version=0.0.4"), reasons=(), api=None, **more):
    admin = Admin("127.0.0.1", 0, scrape=scrape, not_ready=lambda: reasons, api=api or {}, **more)
    await admin.start()
    try:
        async with aiohttp.ClientSession(
            admin.url, headers={"Accept-Encoding": "identity"}, auto_decompress=False
        ) as client:
            yield client
    finally:
        await admin.stop()


def run(coroutine):
    return uvloop.run(coroutine)  # kproxy runs on uvloop, which has its own transports


def test_metrics_have_the_accepted_format_and_are_compressed_on_request():
    asked = []

    def scrape(accept):
        asked.append((accept, threading.current_thread() is threading.main_thread()))
        return BODY, "application/openmetrics-text; version=1.0.0; charset=utf-8"

    async def main():
        async with serving(scrape) as client:
            headers = {"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"}
            async with client.get("/metrics", headers=headers) as answer:
                assert answer.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
                assert answer.headers["Content-Encoding"] == "gzip"
                assert answer.headers["Cache-Control"] == "no-store"
                assert gzip.decompress(await answer.read()) == BODY
            async with client.get("/metrics") as answer:
                assert "Content-Encoding" not in answer.headers
                assert await answer.read() == BODY

    run(main())
    assert asked == [("application/openmetrics-text", False), ("*/*", False)]


def test_the_loop_goes_on_while_a_scrape_is_rendered():
    released = threading.Event()

    def scrape(_):
        assert released.wait(30)
        return b"", "text/plain"

    async def main():
        async with serving(scrape) as client:
            slow = asyncio.create_task(client.get("/metrics"))
            async with client.get("/health") as answer:
                assert (answer.status, await answer.text()) == (200, "ok\n")
            assert not slow.done()
            released.set()
            (await slow).close()

    run(main())


def test_a_failed_scrape_returns_500_and_the_server_goes_on(caplog):
    async def main():
        async with serving(lambda accept: 1 // 0) as client:
            for _ in range(2):
                async with client.get("/metrics") as answer:
                    assert answer.status == 500
            async with client.get("/health") as answer:
                assert answer.status == 200

    run(main())
    assert "ZeroDivisionError" in caplog.text


def test_bad_http_is_answered_and_fills_no_log(caplog):
    async def main():
        async with serving() as client:
            url = client._base_url
            for sent in (
                b"GET / HTTP/1.1\r\nX: " + b"x" * 9_000,
                b"GET / HTTP/7.x\r\n\r\n",
                b"\0" * 9_000,
                b"\0\0\0\x12\0\x12",
                b"GET \r\n",
            ):
                reader, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(sent + b"\r\n\r\n")
                answer = await reader.read()
                assert answer.split()[1] == b"400"
                assert b"Cache-Control: no-store\r\n" in answer
                assert b"X-Content-Type-Options: nosniff\r\n" in answer
                assert len(answer) < 1000  # does not echo the whole request
                writer.close()

    run(main())
    assert not caplog.records


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (b"\0", b"\0" * 65_536),
        (b"GET / HTTP/1.1\r\nX: ", b"x" * 65_536),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 10_000),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n", b"x" * 65_536),
    ],
)
def test_nothing_is_read_after_bad_http_or_after_a_response_sent_before_the_body(request_, more):
    async def main():
        async with serving() as client:
            _, writer = await asyncio.open_connection(client._base_url.host, client._base_url.port)
            sent = 0
            writer.write(request_)
            with pytest.raises(ConnectionError):
                while sent < 16 * 2**20:  # more than the kernel keeps
                    writer.write(more)
                    await writer.drain()
                    sent += len(more)
            writer.close()

    run(main())


@pytest.mark.parametrize(
    ("reasons", "status", "text"),
    [
        ((), 200, "ready\n"),
        (("default: no broker answers", "x"), 503, "not ready: default: no broker answers\nnot ready: x\n"),
    ],
)
def test_ready_reports_the_reasons_for_503(reasons, status, text):
    async def main():
        async with serving(reasons=reasons) as client:
            async with client.get("/ready") as answer:
                assert (answer.status, await answer.text()) == (status, text)
            async with client.get("/ready", headers={"Accept": "application/json"}) as answer:
                assert answer.status == status
                assert await answer.json() == {"ready": not reasons, "reasons": list(reasons)}
            async with client.get("/") as answer:
                page = await answer.text()
                assert all(reason in page for reason in reasons)
                assert 'href="/metrics"' in page

    run(main())


def test_live_state_is_json_by_name():
    async def main():
        async with serving(api={"connections": lambda _: [{"client": "127.0.0.1:1"}]}) as client:
            async with client.get("/api") as answer:
                assert await answer.json() == {"connections": "/api/connections"}
            async with client.get("/api/connections") as answer:
                assert await answer.json() == [{"client": "127.0.0.1:1"}]
            for accepted, is_packed in (("gzip, br", True), ("br, GZIP ; q=0.1", True), ("gzip;q=0.0, br", False)):
                async with client.get("/api/connections", headers={"Accept-Encoding": accepted}) as answer:
                    body = await answer.read()
                    assert json.loads(gzip.decompress(body) if is_packed else body) == [{"client": "127.0.0.1:1"}]
            async with client.get("/api/secrets") as answer:
                assert answer.status == 404
                assert answer.headers["Cache-Control"] == "no-store"
            async with client.post("/api/connections", headers={"X-Kproxy": "yes"}) as answer:
                assert answer.status == 405

    run(main())


def test_a_list_continues_after_a_name_of_any_length():
    """A group id has up to 32 KiB, and each byte of it may take three characters of a URL."""
    name = "default/" + "é" * (1 << 14)

    async def main():
        async with serving(api={"groups": lambda query: [query["after"] == name]}) as client:
            asked = URL(f"/api/groups?after={quote(name, safe='')}", encoded=True)
            async with client.get(asked) as answer:
                assert (answer.status, await answer.json()) == (200, [True])

    run(main())


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(10):
            return not await reader.read()
    except ConnectionResetError:
        return True


def test_silent_connections_do_not_block_other_clients():
    async def main():
        async with serving(max_connections=4) as client:
            url = client._base_url
            silent = [await asyncio.open_connection(url.host, url.port) for _ in range(20)]
            async with client.get("/health") as answer:
                assert answer.status == 200
            assert all([await is_closed(reader) for reader, _ in silent[:16]])
            for _, writer in silent:
                writer.close()

    run(main())


def test_a_burst_of_silent_connections_leaves_no_slot_taken(monkeypatch):
    """Connections dropped before they have a transport are closed too."""
    monkeypatch.setattr("kproxy.admin.connections.REQUEST_S", 600.0)  # none of them times out

    async def main():
        async with serving(max_connections=4) as client:
            url = client._base_url
            burst = [
                socket.create_connection((url.host, url.port)) for _ in range(40)
            ]  # opened while the loop is blocked
            async with asyncio.timeout(60), client.get("/health") as answer:
                assert answer.status == 200
            for sock in burst:
                sock.close()

    run(main())


def test_a_closing_port_drops_the_connections_it_has_just_accepted():
    """A connection's task used to be cancelled before it began, or aiohttp's was lost in an exception."""

    async def main():
        gc.collect()
        admin = Admin("127.0.0.1", 0, scrape=lambda _: (b"", ""), not_ready=tuple, api={})
        await admin.start()
        accepted = asyncio.Event()
        serve = admin._serve

        async def served(*arguments):
            accepted.set()
            await serve(*arguments)

        admin._serve = served
        clients = [
            socket.create_connection(admin.address) for _ in range(9)
        ]  # one turn of the loop accepts some of them
        await accepted.wait()
        await admin.stop()
        async with asyncio.timeout(60):
            while admin.gate.connections:  # noqa: ASYNC110 - transports report their end in the next turn
                await asyncio.sleep(0)
        assert not admin._idle
        for sock in clients:
            sock.close()

    run(main())


def hello(trusts):
    """Return a complete ClientHello; its sender sends nothing after it."""
    theirs, ours = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trusts.wrap_bio(theirs, ours, server_hostname="localhost").do_handshake()
    return ours.read()


def test_connections_without_a_complete_handshake_do_not_block_other_clients(tmp_path, monkeypatch):
    """TLS port: clients that send nothing, plain HTTP, half a ClientHello, or a ClientHello and no more.

    None leaves reference cycles behind: collecting that much garbage would stop the loop.
    """
    monkeypatch.setattr("kproxy.admin.connections.REQUEST_S", 600.0)  # none of them times out
    authority = Authority(tmp_path)
    settings = ClientTls(**authority.server().settings())
    tls = contexts.Reloading("admin", lambda: contexts.for_clients(settings, None, "admin_tls"))
    trusts = ssl.create_default_context(cafile=authority.bundle)

    async def main():
        async with serving(max_connections=8, tls=tls) as client:
            url = URL(f"https://localhost:{client._base_url.port}")

            silent = []
            gc.collect()
            for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00half", hello(trusts)):
                for _ in range(20):
                    silent.append(socket.create_connection(("127.0.0.1", url.port)))
                    silent[-1].sendall(sent)
                async with asyncio.timeout(60), client.get(url / "health", ssl=trusts) as answer:
                    assert answer.status == 200
            for sock in silent:
                sock.close()
            await client.close()
            async with asyncio.timeout(60):
                while any(isinstance(each, Connection) for each in gc.get_objects()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    gc.disable()
    try:
        run(main())
    finally:
        gc.enable()


def test_clients_that_start_handshakes_leave_a_distant_client_time_to_finish_its_own(tmp_path, monkeypatch):
    """Each client has its own address, so none is refused a turn; the test grants the turns."""
    monkeypatch.setattr("kproxy.admin.openings.EVERY_S", 3600.0)
    authority = Authority(tmp_path)
    settings = ClientTls(**authority.server().settings())
    tls = contexts.Reloading("admin", lambda: contexts.for_clients(settings, None, "admin_tls"))
    trusts = ssl.create_default_context(cafile=authority.bundle)

    def begins(port, address):
        sock = socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
        sock.sendall(hello(trusts))
        return sock

    async def main():
        admin = Admin("127.0.0.1", 0, scrape=lambda _: (b"", ""), not_ready=tuple, api={}, tls=tls, max_connections=8)
        await admin.start()
        theirs, ours = ssl.MemoryBIO(), ssl.MemoryBIO()
        far = trusts.wrap_bio(theirs, ours, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            far.do_handshake()
        async with asyncio.timeout(60):
            wire = await Wire.dial(admin.address[1])
            await wire.send(ours.read())
            theirs.write(await wire.loop.sock_recv(wire.sock, 1 << 16))  # the distant client has had its turn
            others = [begins(admin.address[1], f"127.0.5.{number}") for number in range(1, 16)]
            while admin._openings._count < 7:  # noqa: ASYNC110 - the others are in the backlog
                await asyncio.sleep(0.005)
            for _ in range(3):  # while more clients wait than have had their turn
                admin._openings._grant()
                for _ in range(20):
                    await asyncio.sleep(0)
            far.do_handshake()
            far.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await wire.send(ours.read())
            theirs.write(await wire.rest())
            assert far.read(1 << 16).startswith(b"HTTP/1.1 200")
        for sock in (wire, *others):
            sock.close()
        await admin.stop()

    run(main())


@pytest.mark.parametrize(
    ("idle", "waiting", "comes", "goes"),
    [
        # A connection that has not begun its handshake is dropped first.
        ("shaken 9, stalls 8, opening 1, opening 0", 2, "opening", "opening 1"),
        ("shaken 9, stalls 8, opening 0", 9, "begins", "opening 0"),
        # None is dropped for a connection that has to wait, or while more wait than have had their turn.
        ("shaken 9, stalls 8", 1, "opening", None),
        ("shaken 9, stalls 8", 3, "begins", None),
        # Stalled handshakes go first, then connections whose time is over.
        ("shaken 9, stalls 8, stalls 7", 3, "begins", "stalls 8"),
        ("shaken 9, stalls 8, stalls 7", 0, "opening", "stalls 8"),
        ("shaken 0.9, stalls 0.3, shaken 0.1", 0, "begins", "stalls 0.3"),
        ("shaken 9, shaken 8, stalls 0.2", 0, "begins", "shaken 9"),
        # All are new: no kind is spared.
        ("shaken 0.2, stalls 0.1, shaken 0", 0, "begins", "shaken 0.2"),
        ("stalls 0.2, shaken 0.1, stalls 0", 0, "begins", "stalls 0.2"),
        ("", 0, "begins", None),
        # A client that is reading a response is dropped last; one that has stopped reading is like any other.
        ("takes 0.2, shaken 0.1", 0, "begins", "shaken 0.1"),
        ("takes 9, shaken 0.1", 0, "begins", "takes 9"),
        # Within a kind, drop one of the network with the most connections, not a lone one or one of few.
        ("shaken 0.3, shaken@few 0.2, shaken@few 0.1", 0, "begins", "shaken 0.3"),
        ("shaken 0.3, shaken@b 0.2, shaken@b 0.1", 0, "begins", "shaken@b 0.2"),
        ("takes 0.3, takes@b 0.2, takes@b 0.1", 0, "begins", "takes@b 0.2"),
        ("takes@b 0.3, takes@b 0.2, shaken 0.1", 0, "begins", "takes@b 0.3"),
        ("shaken 9, shaken@b 0.2, shaken@b 0.1", 0, "begins", "shaken 9"),
        # Drop the new one itself if others of its network have requests in flight.
        ("shaken 0.1", 0, "begins@busy", "begins@busy"),
        ("shaken 9", 0, "begins@busy", "shaken 9"),
        ("takes@busy 0.1", 0, "begins@busy", "takes@busy 0.1"),  # otherwise it would block its whole network
        ("opening 0", 1, "opening@busy", "opening 0"),
        ("shaken 0.1", 0, "asks@busy", "shaken 0.1"),  # the new one has a request in flight by now
        ("", 0, "asks@busy", None),
    ],
)
def test_which_connection_is_dropped_when_all_slots_are_taken(idle, waiting, comes, goes):
    class Other:
        def __init__(self, name):
            kind, _, self.silent_s = name.partition(" ")
            kind, _, self.network = kind.partition("@")
            self.name, self.is_opening, self.takes = name, kind == "opening", kind == "takes"
            self.opening = None if kind in ("shaken", "takes") else object()

        def give_up(self):
            gone.append(self.name)

    gone = []

    async def main():
        admin = Admin("127.0.0.1", 0, scrape=lambda _: (b"", ""), not_ready=tuple, api={}, max_connections=1)
        admin.gate.enter()
        others = [Other(name) for name in idle.split(", ") if name]
        admin._networks = Counter(other.network for other in others) + Counter(newest=1, busy=9, b=4)
        now = asyncio.get_running_loop().time()
        admin._idle = {other: now - float(other.silent_s) for other in others}
        admin._openings._count = waiting
        newest = Other(comes if "@" in comes else f"{comes}@newest")
        if not comes.startswith("asks"):
            admin._idle[newest] = now
        admin._make_room(newest)
        admin.gate.leave()
        admin._make_room(newest)  # none is dropped while a slot is free
        admin._idle.clear()
        await admin.stop()

    run(main())
    assert gone == ([] if goes is None else [goes])


def test_a_client_whose_request_is_still_unread_does_not_count_as_silent():
    """Under many slow requests, freshly accepted connections used to be reset in favour of others."""

    async def takes_long(_):
        for _ in range(30):
            await asyncio.sleep(0)
        return "done"

    async def main():
        async with serving(api={"slow": takes_long}, max_connections=4) as client:
            url = client._base_url
            clients = [
                socket.create_connection((url.host, url.port), source_address=(f"127.0.7.{number}", 0))
                for number in range(1, 41)
            ]
            for sock in clients:
                sock.sendall(b"GET /api/slow HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                sock.setblocking(False)
            for sock in clients:
                reader, writer = await asyncio.open_connection(sock=sock)
                assert (await reader.read()).endswith(b'"done"')
                writer.close()

    run(main())


@pytest.mark.parametrize("path", ["metrics", "nothing-here"])
def test_busy_connections_do_not_block_other_clients(path, monkeypatch):
    """All slots are busy when the last client connects, and requests come too often for the idle timeout."""
    released = threading.Event()
    begun = []
    metrics = Admin._metrics

    async def counted(admin, request):
        begun.append(request)
        return await metrics(admin, request)

    monkeypatch.setattr(Admin, "_metrics", counted)

    def scrape(_):
        assert released.wait(60)
        return BODY, "text/plain"

    async def are_under_way(requests):
        async with asyncio.timeout(60):
            while len(begun) < requests:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.005)

    async def ask_on(writer, asked):
        while not writer.is_closing():
            writer.write(f"GET /{asked} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            await asyncio.sleep(0.02)

    async def main():
        async with serving(scrape, max_connections=4) as client:
            url = client._base_url
            busy = [await asyncio.open_connection(url.host, url.port) for _ in range(3)]
            for _, writer in busy:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await are_under_way(3)
            last, its_writer = await asyncio.open_connection(url.host, url.port)
            its_writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await are_under_way(4)
            asking = [asyncio.create_task(ask_on(writer, path)) for _, writer in busy]
            released.set()
            assert (await last.readline()).startswith(b"HTTP/1.1 200")
            async with asyncio.timeout(10):
                async with client.get("/ready") as answer:
                    assert answer.status == 200
            for task in asking:
                task.cancel()
            for _, writer in (*busy, (last, its_writer)):
                writer.close()

    run(main())


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX-Slow: "])
def test_a_connection_whose_request_does_not_arrive_is_closed(monkeypatch, sent):
    monkeypatch.setattr("kproxy.admin.connections.REQUEST_S", 0.05)

    async def main():
        async with serving() as client:
            url = client._base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(sent)
            assert await is_closed(reader)
            writer.close()

    run(main())


def test_a_request_whose_body_does_not_arrive_gets_408(monkeypatch, caplog):
    """Its slot is free when its time is over; a client that disconnects earlier leaves no traceback."""
    monkeypatch.setattr("kproxy.admin.connections.REQUEST_S", 1.0)

    async def done(parameters):
        return 200, parameters

    async def main():
        async with serving(actions={"do": done}, max_connections=3) as client:
            address = client._base_url.host, client._base_url.port
            silent = []
            for _ in range(4):
                silent.append(socket.create_connection(address))
                silent[-1].sendall(
                    b"POST /api/do HTTP/1.1\r\nHost: localhost\r\nX-Kproxy: yes\r\nContent-Length: 9\r\n\r\n{"
                )
                await asyncio.sleep(0.05)
            silent.pop().close()
            async with asyncio.timeout(20):
                async with client.get("/health") as answer:
                    assert answer.status == 200
            assert b" 408 " in await asyncio.to_thread(silent[0].recv, 1000)
            silent[0].close()
            async with client.post("/api/do", headers={"X-Kproxy": "yes"}, json={"a": 1}) as answer:
                assert await answer.json() == {"a": "1"}
            silent.append(socket.create_connection(address))
            silent[-1].sendall(
                b"POST /api/do HTTP/1.1\r\nHost: localhost\r\nX-Kproxy: yes\r\nContent-Length: 9\r\n\r\n{"
            )
            await asyncio.sleep(0.3)
            for sock in silent:
                sock.close()
            await asyncio.sleep(0.2)

    run(main())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_request_in_flight_is_not_cut_and_its_idle_connection_is_closed_afterwards(monkeypatch):
    monkeypatch.setattr("kproxy.admin.connections.REQUEST_S", 0.05)
    monkeypatch.setattr("kproxy.admin.connections.IDLE_S", 0.2)

    def slow(_):
        time.sleep(0.3)
        return BODY, "text/plain"

    async def main():
        async with serving(slow) as client:
            url = client._base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(BODY):
                answer += await reader.read(1 << 20)
            assert await is_closed(reader)
            writer.close()

    run(main())


def test_a_stream_that_its_client_does_not_read_ends_and_frees_its_slot(monkeypatch):
    monkeypatch.setattr("kproxy.admin.server.TAKEN_S", 0.2)
    begun, ended = [], []

    async def lines(_):
        begun.append(True)
        try:
            while True:
                yield {"frame": "x" * 100_000}
        finally:
            ended.append(True)

    async def main():
        async with serving(streams={"trace": lines}, max_connections=2) as client, asyncio.timeout(60):
            address = client._base_url.host, client._base_url.port
            paused = []
            for number in range(2):  # one by one: the last would replace a connection that has not sent its request
                paused.append(socket.create_connection(address))
                paused[-1].sendall(
                    b"POST /api/trace HTTP/1.1\r\nHost: localhost\r\nX-Kproxy: yes\r\nContent-Length: 0\r\n\r\n"
                )
                while len(begun) == number:  # noqa: ASYNC110 (there is no event for the start of a generator)
                    await asyncio.sleep(0.001)
            async with client.get("/health") as answer:  # all slots are taken
                assert answer.status == 200 and ended
            while len(ended) < 2:  # noqa: ASYNC110 (there is no event for the end of a generator)
                await asyncio.sleep(0.02)
            for sock in paused:
                sock.close()

    run(main())


def test_long_lists_are_sent_in_slices_and_the_loop_runs_in_between():
    turns = 0
    between = []

    async def slices():
        for first in range(0, 1000, 50):
            between.append(turns)
            yield list(range(first, first + 50))

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def api(query):
        if "limit" in query:
            raise ValueError("limit='x' is not a number")
        return slices()

    async def main():
        async with serving(api={"connections": api}) as client:
            task = asyncio.create_task(others())
            async with client.get("/api/connections") as answer:
                assert answer.content_type == "application/json"
                assert await answer.json() == list(range(1000))
            async with client.get("/api/connections?limit=x") as answer:
                assert (answer.status, await answer.text()) == (400, "limit='x' is not a number\n")
            task.cancel()

    run(main())
    assert sorted(set(between)) == between  # a turn of others between any two slices


def test_an_address_in_use_is_an_os_error():
    async def main():
        async with serving() as client:
            port = int(str(client._base_url).rpartition(":")[2].strip("/"))
            other = Admin("127.0.0.1", port, scrape=lambda _: (b"", ""), not_ready=tuple, api={})
            with pytest.raises(OSError):
                await other.start()
            await other.stop()

    run(main())


ASKS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
LARGE = b"x" * (16 << 20)  # more than the kernel takes of a client that does not read


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_large_unread_response_is_not_copied_into_the_transport(tmp_path, over_tls):
    authority = Authority(tmp_path)
    settings = ClientTls(**authority.server().settings())
    tls = contexts.Reloading("admin", lambda: contexts.for_clients(settings)) if over_tls else None

    async def main():
        admin = Admin("127.0.0.1", 0, scrape=lambda _: (LARGE, "text/plain"), not_ready=tuple, api={}, tls=tls)
        await admin.start()
        client = await Wire.dial(admin.address[1])
        if over_tls:
            trusted = ssl.create_default_context(cafile=str(authority.bundle))
            client = await TlsWire(client.sock).begin(trusted, server_side=False)
        await client.send(ASKS)
        await client.read(1)
        await asyncio.sleep(0.2)  # fill the kernel's buffer
        (connection,) = admin._idle
        assert connection.untaken == len(LARGE)
        assert connection.transport.get_write_buffer_size() < 2 << 20
        head, _, body = (await client.read(2 * len(LARGE))).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(LARGE)}".encode() in head and b"Connection: close" in head
        assert body == LARGE
        client.close()
        await admin.stop()

    run(main())


def test_the_oldest_large_unread_responses_are_dropped_first(monkeypatch):
    monkeypatch.setattr("kproxy.admin.server.MAX_UNTAKEN", 2 * len(LARGE))

    async def whole(client):
        try:
            return (await client.rest()).endswith(LARGE)
        except ConnectionError:
            return False

    async def main():
        admin = Admin("127.0.0.1", 0, scrape=lambda _: (LARGE, "text/plain"), not_ready=tuple, api={})
        await admin.start()
        clients = []
        for _ in range(3):
            clients.append(await Wire.dial(admin.address[1]))
            await clients[-1].send(ASKS)
            await clients[-1].read(1)
        assert [await whole(client) for client in clients] == [False, True, True]
        for client in clients:
            client.close()
        await admin.stop()

    run(main())


def test_new_connections_do_not_cut_a_large_response_that_its_client_reads(monkeypatch):
    """Its connection used to count as silent from the first byte on, so any newer one replaced it, and with all slots
    taken it had one second for the whole response."""
    monkeypatch.setattr("kproxy.admin.connections.FULL_S", 600.0)
    monkeypatch.setattr("kproxy.admin.connections.KEPT_S", 600.0)

    async def main():
        admin = Admin(
            "127.0.0.1", 0, scrape=lambda _: (LARGE, "text/plain"), not_ready=tuple, api={}, max_connections=4
        )
        await admin.start()
        client = await Wire.dial(admin.address[1])
        await client.send(ASKS)
        await client.read(1)
        (connection,) = admin._idle
        others = []
        for _ in range(3):
            ends = connection._patience.when()
            # The kernel accepts the next piece when it has space; short of memory, only after more is read.
            while connection._patience.when() <= ends:
                await client.read(64 << 10)
                await asyncio.sleep(0)
            others += [await Wire.dial(admin.address[1]) for _ in range(8)]
            for gone in others[:-4]:
                assert await gone.rest() == b""
        assert connection in admin._idle
        assert len(await client.rest()) > 1 << 20
        for sock in (client, *others):
            sock.close()
        await admin.stop()

    run(main())


def test_a_head_response_has_the_length_of_a_large_body_and_no_body():
    async def main():
        async with serving(lambda _: (b"x" * (1 << 20), "text/plain")) as client:
            for _ in range(2):  # the next response on the connection parses
                async with client.head("/metrics") as answer:
                    assert (answer.status, answer.headers["Content-Length"]) == (200, "1048576")
                    assert await answer.read() == b""

    run(main())
