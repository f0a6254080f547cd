"""`python -m bench.screens`: the cost of `kproxy top` and of the page with very many rows to show.

The bench creates many connections, topics, clients and groups on a kproxy, with some traffic so that figures change. It
reports bytes and duration of the screens' requests, the CPU time of kproxy with and without them, how long kproxy's
loop delayed bytes, and how long the browser was busy at a time. The four numbers and SECONDS bound a run.
"""

import asyncio
import fcntl
import json
import operator
import os
import pty
import re
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click

from bench import cases, processes
from bench.processes import Address, BenchError, Proxy, get
from kproxy.admin.live import MAX_ROWS
from kproxy.protocol import codec, records
from kproxy.protocol.apis import API_VERSIONS, JOIN_GROUP, METADATA, PRODUCE, SYNC_GROUP

VERSIONS = {PRODUCE: 9, JOIN_GROUP: 5, SYNC_GROUP: 3, API_VERSIONS: 3}
SECONDS = 10.0  # of each measurement
PAIRS = 5  # of measurements with the open page and with the same page paused, in turn
_OTHER_FILES = 300
_CONNECTIONS_AT_ONCE = 100
_REQUESTS_PER_S = 300  # after set-up
_SHOWN_S = 30.0  # time limit for kproxy top to show connections
_KNOWN_S = 60.0  # time limit for all groups to be known
_HOST = "127.0.0.1"
ASKED = ("/api/live", "/api/connections?limit=200", "/api/connections?limit=2000", "/api/findings", "/metrics")


def frame(key: int, body: dict[str, Any], client: str) -> bytes:
    header = {"requestApiKey": key, "requestApiVersion": VERSIONS[key], "correlationId": 7, "clientId": client}
    data = codec.encode_request(header, body)
    return cases.INT32.pack(len(data)) + data


def produce(topic: int, client: str) -> bytes:
    batch = records.write_batch([records.Record(0, 1_700_000_000_000, None, b"v" * 200)])
    data = {"name": f"topic-{topic:05}", "partitionData": [{"index": 0, "records": batch}]}
    return frame(PRODUCE, {"transactionalId": None, "acks": -1, "timeoutMs": 1000, "topicData": [data]}, client)


def greeting(number: int, clients: int) -> bytes:
    """The first request of the connection with this number."""
    client = number % clients
    software = {"clientSoftwareName": f"software-{client % 7}", "clientSoftwareVersion": f"{client % 50}.0"}
    return frame(API_VERSIONS, software, f"client-{client:05}")


def joins(number: int, client: str) -> list[bytes]:
    """The requests by which a group's only member joins."""
    group, member = f"group-{number:05}", f"member-{number:05}"
    join = {"groupId": group, "sessionTimeoutMs": 45_000, "rebalanceTimeoutMs": 60_000, "memberId": member}
    join |= {"groupInstanceId": None, "protocolType": "consumer", "protocols": [{"name": "range", "metadata": b""}]}
    sync = {"groupId": group, "generationId": 1, "memberId": member, "groupInstanceId": None, "assignments": []}
    return [frame(JOIN_GROUP, join, client), frame(SYNC_GROUP, sync, client)]


# --- the broker ------------------------------------------------------------------------------------------------------


def answer(data: bytes, port: int) -> bytes:
    """The response to a request without its size."""
    header, body = codec.decode_request(data)
    key, version = header["requestApiKey"], header["requestApiVersion"]
    response: dict[str, Any] = {}
    if key == API_VERSIONS:
        known = {**VERSIONS, METADATA: 12}
        response = {"apiKeys": [{"apiKey": api, "minVersion": 0, "maxVersion": most} for api, most in known.items()]}
    elif key == METADATA:
        response = {"brokers": [{"nodeId": cases.NODE_ID, "host": _HOST, "port": port}]}
    elif key == PRODUCE:
        done = [{"index": 0, "errorCode": 0, "baseOffset": 0}]
        response = {"responses": [{"name": topic["name"], "partitionResponses": done} for topic in body["topicData"]]}
    elif key == JOIN_GROUP:
        member = body["memberId"]
        members = [{"memberId": member, "groupInstanceId": None, "metadata": b""}]
        response = {
            "generationId": 1,
            "protocolName": "range",
            "leader": member,
            "memberId": member,
            "members": members,
        }
    made = codec.encode_response(key, version, {"correlationId": header["correlationId"]}, response)
    return cases.INT32.pack(len(made)) + made


class _Serving(asyncio.Protocol):
    def __init__(self, port: list[int]) -> None:
        self._port = port
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        held = self._data
        held += data
        while len(held) >= 4 and len(held) >= 4 + (size := int.from_bytes(held[:4], "big")):
            self._transport.write(answer(bytes(held[4 : 4 + size]), self._port[0]))  # type: ignore[attr-defined]
            del held[: 4 + size]


async def serve() -> None:
    """A broker at a free port, which it prints, until the process is ended."""
    port = [0]
    server = await asyncio.get_running_loop().create_server(lambda: _Serving(port), _HOST, 0, backlog=1024)
    port[0] = server.sockets[0].getsockname()[1]
    print(port[0], flush=True)
    await server.serve_forever()


@contextmanager
def broker(folder: Path) -> Iterator[Address]:
    command = [sys.executable, "-m", "bench.screens", "--broker"]
    with processes.running("broker", command, folder, None, stdout=subprocess.PIPE) as process:
        line = process.first_line()
        if not line:
            process.check()
            raise BenchError("the broker did not start")
        yield _HOST, int(line)


# --- clients ---------------------------------------------------------------------------------------------------------


def read_frames(sock: socket.socket, count: int) -> None:
    data = b""
    while count:
        more = sock.recv(1 << 16)
        if not more:
            raise BenchError("kproxy closed a connection")
        data += more
        while count and len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
            data = data[4 + size :]
            count -= 1


def connect(proxy: Proxy, connections: int, topics: int, clients: int, groups: int) -> list[socket.socket]:
    """Open all connections and wait until their first requests are answered; topics and groups are spread over them."""
    opened: list[socket.socket] = []
    while len(opened) < connections:
        numbers = range(len(opened), min(len(opened) + _CONNECTIONS_AT_ONCE, connections))
        more = [socket.create_connection(proxy.address, timeout=30) for _ in numbers]
        for sock, number in zip(more, numbers, strict=True):
            sock.sendall(greeting(number, clients))
        for sock in more:
            read_frames(sock, 1)
        opened += more
    for start in range(0, max(topics, groups), _CONNECTIONS_AT_ONCE):
        pending: dict[socket.socket, int] = {}
        for number in range(start, start + _CONNECTIONS_AT_ONCE):
            sock, client = opened[number % connections], f"client-{number % connections % clients:05}"
            requests = [produce(number, client)] if number < topics else []
            requests += joins(number, client) if number < groups else []
            if requests:
                sock.sendall(b"".join(requests))
                pending[sock] = pending.get(sock, 0) + len(requests)
        for sock, count in pending.items():
            read_frames(sock, count)
    return opened


def keep_moving(opened: list[socket.socket], topics: int, clients: int, over: Event) -> None:
    """Send some requests per second, over all connections in turn."""
    number = 0
    while not over.is_set():
        begun = time.monotonic()
        for _ in range(_REQUESTS_PER_S // 10):
            number += 1
            at = number * 37 % len(opened)
            opened[at].sendall(produce(number % topics, f"client-{at % clients:05}"))
            read_frames(opened[at], 1)
        over.wait(max(0.0, 0.1 - (time.monotonic() - begun)))


def _until_known(proxy: Proxy, groups: int) -> None:
    """Wait until all groups are shown: a separate process follows them, with a delay."""
    assert proxy.admin is not None
    end_s = time.monotonic() + _KNOWN_S
    while len(json.loads(get(proxy.admin, "/api/live")[1])["groups"]) < min(groups, MAX_ROWS):
        if time.monotonic() > end_s:
            raise BenchError(f"the {groups} groups are not known after {_KNOWN_S:g} s")
        time.sleep(0.1)


# --- the cost ---------------------------------------------------------------------------------------------------------


def cpu_share(proxy: Proxy) -> float:
    before, begun = proxy.process.cpu_s(), time.monotonic()
    time.sleep(SECONDS)
    return (proxy.process.cpu_s() - before) / (time.monotonic() - begun)


def asked(proxy: Proxy) -> dict[str, dict[str, float]]:
    """Bytes, and the maximum of five durations, of each request of the screens."""
    assert proxy.admin is not None
    found = {}
    for path in ASKED:
        times, size = [], 0
        for _ in range(5):
            begun = time.monotonic()
            status, text = get(proxy.admin, path)
            times.append(time.monotonic() - begun)
            size = len(text)
            if status != 200:
                raise BenchError(f"{path} answers {status}: {text[:200]}")
        found[path] = {"bytes": size, "ms": round(max(times) * 1000, 1)}
    return found


def loop_lag_ms(before: str, after: str) -> float | None:
    """p99 of kproxy's loop lag between two scrapes: the bound of its bucket, in ms."""
    pattern = re.compile(r'^kproxy_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.MULTILINE)
    counts = [dict(pattern.findall(text)) for text in (before, after)]
    added = [(float(bound), float(counts[1][bound]) - float(counts[0].get(bound, 0))) for bound in counts[1]]
    total = max((count for _, count in added), default=0.0)
    return next((bound * 1000 for bound, count in sorted(added) if total and count >= 0.99 * total), None)


FRAMES = """
window.kproxyFrames = []; let before = performance.now();
const next = (now) => { window.kproxyFrames.push(now - before); before = now; requestAnimationFrame(next); };
requestAnimationFrame(next);
window.kproxyTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((each) => window.kproxyTasks.push(each.duration)))
  .observe({ entryTypes: ["longtask"] });
"""


PAUSE = "document.getElementById('pause').click()"
DRAWN = "return ['tbody tr', '*'].map((each) => document.querySelectorAll(each).length)"
ROWS_OF_EACH = """
const rows = (each) => [each.id, each.querySelectorAll("tbody tr").length];
return Object.fromEntries([...document.querySelectorAll("div.table")].map(rows));
"""


def in_browser(proxy: Proxy, picture: Path | None) -> dict[str, Any]:
    """An open page: kproxy's CPU time, the same with the page paused, and how long the browser was busy."""
    from tests.chromium import opened

    assert proxy.admin is not None
    with opened(f"http://{processes.text(proxy.admin)}/?range=300", 1440) as browser:
        time.sleep(5)  # it sends requests each second, for connections every three
        browser.asked(FRAMES)
        with_it, without = [], []
        for _ in range(PAIRS):
            with_it.append(cpu_share(proxy))
            browser.asked(PAUSE)
            without.append(cpu_share(proxy))
            browser.asked(PAUSE)
        frames = sorted(browser.asked("return window.kproxyFrames"))
        tasks = browser.asked("return window.kproxyTasks")
        rows, nodes = browser.asked(DRAWN)
        browser.asked("document.querySelectorAll('.more').forEach((each) => each.click())")
        time.sleep(2)
        of_each = browser.asked(ROWS_OF_EACH)
        browser.chrome.find_element("css selector", "input[name=find]").send_keys("00042")
        time.sleep(2)
        if picture is not None:
            browser.chrome.save_screenshot(str(picture))
        return {
            "core_share": round(statistics.median(with_it), 4),
            "paused_core_share": round(statistics.median(without), 4),
            "added_core_share": round(statistics.median(map(operator.sub, with_it, without)), 4),
            "frame_p99_ms": round(frames[int(len(frames) * 0.99)], 1),
            "longest_task_ms": round(max(tasks, default=0.0), 1),
            "rows": rows,
            "nodes": nodes,
            "rows_of_all": of_each,
            "nodes_of_all": browser.asked(DRAWN)[1],
            "complaints": browser.complaints(),
        }


def in_top(proxy: Proxy) -> dict[str, Any]:
    """`kproxy top --json` once, and the CPU time of kproxy while one shows connections, its longest table."""
    assert proxy.admin is not None
    begun = time.monotonic()
    command = [processes.KPROXY, "top", processes.text(proxy.admin), "--json", "--interval", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise BenchError(done.stderr)
    document = json.loads(done.stdout)
    rows = {name: len(value) for name, value in document.items() if isinstance(value, list)}
    found = {"seconds": round(time.monotonic() - begun, 2), "rows": rows, "bytes": len(done.stdout)}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [processes.KPROXY, "top", processes.text(proxy.admin), "--show", "connections"]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as shown:
        os.close(theirs)
        drawn: list[bytes] = []
        reading = Thread(target=_read_to_the_end, args=(ours, drawn), daemon=True)
        reading.start()
        end_s = time.monotonic() + _SHOWN_S
        while b"client-" not in b"".join(drawn) and time.monotonic() < end_s:
            time.sleep(0.05)
        share = cpu_share(proxy)
        os.write(ours, b"q")
        shown.wait(30)
        reading.join(5)
    os.close(ours)
    if b"client-" not in b"".join(drawn):
        raise BenchError("kproxy top shows no connections")
    return found | {"core_share": round(share, 4)}


def _read_to_the_end(terminal: int, into: list[bytes]) -> None:
    with suppress(OSError):  # the other end is closed
        while data := os.read(terminal, 1 << 16):
            into.append(data)


def run(
    connections: int, topics: int, clients: int, groups: int, *, browser: bool, picture: Path | None = None
) -> dict[str, Any]:
    """All figures by name."""
    processes.allow_files(2 * connections + _OTHER_FILES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        upstream = stack.enter_context(broker(folder))
        proxy = stack.enter_context(processes.kproxy(upstream, folder, None, detail="topics"))
        begun = time.monotonic()
        opened = connect(proxy, connections, topics, clients, groups)
        found: dict[str, Any] = {"made_in_s": round(time.monotonic() - begun, 1)}
        _until_known(proxy, groups)
        over = Event()
        moving = Thread(target=keep_moving, args=(opened, topics, clients, over), daemon=True)
        moving.start()
        try:
            found["alone_core_share"] = round(cpu_share(proxy), 4)
            before = processes.metrics(proxy)
            found["asked"] = asked(proxy)
            found["top"] = in_top(proxy)
            if browser:
                found["page"] = in_browser(proxy, picture)
            found["loop_lag_p99_ms"] = loop_lag_ms(before, processes.metrics(proxy))
            found["rss_mb"] = round(proxy.process.rss_bytes() / 1e6, 1)
        finally:
            over.set()
            moving.join()
            for sock in opened:
                sock.close()
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--connections", type=click.IntRange(1, 50_000), default=9_000, show_default=True)
@click.option("--topics", type=click.IntRange(1, 100_000), default=10_000, show_default=True)
@click.option("--clients", type=click.IntRange(1, 50_000), default=3_000, show_default=True)
@click.option("--groups", type=click.IntRange(0, 50_000), default=3_000, show_default=True)
@click.option("--no-browser", is_flag=True, help="Skip the measurements in Chromium.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write a screenshot of the page to this file.")
@click.option("--broker", "is_broker", is_flag=True, hidden=True)
def main(
    connections: int, topics: int, clients: int, groups: int, no_browser: bool, picture: Path | None, is_broker: bool
) -> None:
    """The cost of `kproxy top` and of the page with very many rows to show."""
    if is_broker:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(serve())
    try:
        found = run(connections, topics, clients, groups, browser=not no_browser, picture=picture)
    except BenchError as fault:
        raise click.ClickException(str(fault)) from fault
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    sys.exit(main())
