"""`python -m bench.tls`: the cost of TLS towards clients, compared with HAProxy that terminates the same TLS.

It has three parts. `cpu`: CPU time per request and per GB, in rounds that alternate between the two, as in `measure`.
`idle`: memory with 10,000 idle connections, and the latency of 1,000 active ones, without and with the idle ones.
`flood`: the latency of active clients, without and with clients that only perform TLS handshakes, as fast as they can.

A proxy needs two file descriptors per connection. If a process may not have that many, `idle` uses as many workers as
necessary, and as many HAProxy processes on one port.

The load is paced: Python, on another core than the proxies. With TLS 1.3 all use TLS_AES_256_GCM_SHA384.
"""

import json
import os
import resource
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from bench import cases, processes
from bench.load import Load
from bench.processes import BenchError, Process, Proxy
from kproxy.core import native
from kproxy.protocol.apis import API_VERSIONS
from kproxy.proxy.sockets.sockets import READ_BYTES
from kproxy.proxy.tls.tls_socket import TlsSocket
from tests.certificates import Authority, Certificate

# CPU time relative to HAProxy's, by implementation and case. Pipelined requests share TLS records, so TLS is a smaller
# part of their cost.
LIMITS = {
    "python": {"small": 1.5, "pipelined": 2.2, "produce": 1.0, "fetch": 1.0},
    "native": {"small": 1.2, "pipelined": 1.4, "produce": 1.0, "fetch": 1.0},
}
CASES = tuple(LIMITS["python"])
_WAIT_S = 20.0
_OTHER_FILES = 1200  # kproxy's reserve for ports, names and operators
_FLOODS = 2  # processes that perform handshakes
_HAPROXY = """\
global
    nbthread 1
    maxconn {maxconn}
defaults
    mode tcp
    timeout connect 5s
    timeout client 1h
    timeout server 1h
listen kafka
    bind {listen} ssl crt {certificate}
    server broker {broker}
"""
_KPROXY = """\
workers = {workers}
max_connections = 20000
admin = "{admin}"
[[cluster]]
listen = "{listen}"
bootstrap = ["{broker}"]
broker_port_base = {base}
[cluster.tls]
certificate = "{certificate}"
key = "{key}"
"""


class TlsLoad(Load):
    """`Load` over TLS."""

    def __init__(self, context: ssl.SSLContext, *load: Any) -> None:
        self._context = context
        self._shared = memoryview(bytearray(READ_BYTES))
        super().__init__(*load)

    def _connect(self, address: tuple[str, int]) -> socket.socket:
        return handshaken(super()._connect(address), self._context, self._shared)

    def _receive(self, connection: Any, compare: bool) -> int:
        try:
            return super()._receive(connection, compare)
        except BlockingIOError:  # a session ticket, or part of a record
            return 0


def handshaken(raw: socket.socket, context: ssl.SSLContext, buffer: memoryview) -> TlsSocket:
    """A connection after its TLS handshake."""
    sock = TlsSocket(raw, context, buffer, server_side=False, server_name="localhost")
    while not sock.step():
        sock.flush()
        if not _readable(sock) or not sock.fetch():
            raise BenchError("no TLS handshake")
    sock.flush()
    return sock


class ProcessGroup(Process):
    """ProcessGroup processes that act as one: the first, which already runs, and others."""

    def __init__(self, first: Process, others: list[Process]) -> None:
        self._all = [first, *others]

    def pss_bytes(self) -> int:
        return sum(one.pss_bytes() for one in self._all)


@contextmanager
def proxies(
    folder: Path, upstream: processes.Address, made: Certificate, core: int | None, workers: int = 1
) -> Iterator[list[Proxy]]:
    """HAProxy and kproxy with the same certificate before the same broker, each with `workers` relaying processes."""
    folder.mkdir()
    listens = [("127.0.0.1", processes.free_port()) for _ in range(2)]
    whole = folder / "whole.pem"
    whole.write_bytes(made.certificate.read_bytes() + made.key.read_bytes())
    haproxy = folder / "haproxy.cfg"
    haproxy.write_text(
        _HAPROXY.format(
            listen=processes.text(listens[0]),
            certificate=whole,
            broker=processes.text(upstream),
            maxconn=resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2 - 100,
        )
    )
    admin, base = ("127.0.0.1", processes.free_port()), processes.free_port() - cases.NODE_ID
    settings = folder / "kproxy.toml"
    settings.write_text(
        _KPROXY.format(
            admin=processes.text(admin),
            listen=processes.text(listens[1]),
            broker=processes.text(upstream),
            base=base,
            certificate=made.certificate,
            key=made.key,
            workers=workers,
        )
    )
    command = [processes.found("haproxy"), "-db", "-f", str(haproxy)]
    with (
        processes.running("haproxy", command, folder, core) as first,
        processes.running("kproxy", [processes.KPROXY, "run", "--config", str(settings)], folder, core) as second,
        ExitStack() as others,
    ):
        processes.until(first, "opens no port", lambda: processes.is_open(listens[0]))
        processes.until(
            second,
            "is not ready",
            lambda: processes.is_open(admin) and processes.get(admin, "/ready")[0] == 200,
        )
        # Processes that bind the same port share its clients: HAProxy sets SO_REUSEPORT.
        more = [
            others.enter_context(processes.running(f"haproxy-{number}", command, folder, core))
            for number in range(2, workers + 1)
        ]
        for one in more:
            processes.until(one, "does not listen", lambda: _listens(one))  # noqa: B023
        yield [
            Proxy("haproxy", ProcessGroup(first, more) if more else first, listens[0]),
            Proxy("kproxy", second, ("127.0.0.1", base + cases.NODE_ID), admin),
        ]


def _listens(process: Process) -> bool:
    """Whether a process has a listening socket."""
    sockets = psutil.Process(process.pid).net_connections("tcp")
    return any(one.status == psutil.CONN_LISTEN for one in sockets)


def cpu(
    stage: list[Proxy], context: ssl.SSLContext, upstream: processes.Address, rounds: int, names: Collection[str]
) -> list[dict[str, Any]]:
    """The minimum CPU time of both proxies for each named case, and their ratio."""
    limits = LIMITS["python" if native() is None else "native"]
    found = []
    for case in (case for case in cases.CASES if case.name in names):
        version = case.versions[-1]
        request, answer = cases.request(case, version), cases.answer(case.api_key, version, upstream[1])
        requests = max(case.connections * case.depth, case.requests // 3)
        times: dict[str, list[float]] = {proxy.name: [] for proxy in stage}
        with ExitStack() as stack:
            loads = []
            for proxy in stage:
                load = TlsLoad(context, proxy.address, request, answer, case.connections, case.depth)
                loads.append(stack.enter_context(load))
                load.run(requests // 10, compare=True)
            turns = deque(zip(stage, loads, strict=True))
            for _ in range(rounds):
                turns.rotate()
                for proxy, load in turns:
                    before = proxy.process.cpu_s()
                    load.run(requests)
                    times[proxy.name].append(proxy.process.cpu_s() - before)
                    proxy.process.check()
        size = requests * (len(request) + len(answer))
        unit = size / 1e9 if case.is_bulk else requests / 1e6
        least = {name: min(each) / unit for name, each in times.items()}
        ratio = least["kproxy"] / least["haproxy"]
        found.append(
            {
                "case": case.name,
                "title": f"{case.title}, v{version}",
                "unit": "s/GB" if case.is_bulk else "us",
                **least,
                "ratio": ratio,
                "limit": limits[case.name],
                "passed": ratio <= limits[case.name],
            }
        )
    return found


class ActiveClients:
    """Connections that send small requests one after the other at a steady rate, and record the latency of each
    response."""

    def __init__(self, address: processes.Address, context: ssl.SSLContext | None, count: int) -> None:
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._frame = cases.request_frame(API_VERSIONS, 3, _SOFTWARE)
        self.socks = [connected(address, context, self._buffer) for _ in range(count)]
        self._epoll = select.epoll()
        self._by_fd = {}
        for sock in self.socks:
            self._by_fd[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)

    def ask(self, rate: int, seconds: float) -> dict[str, float]:
        """Latency in milliseconds: the median, and the 99th and 99.9th percentile."""
        sent: dict[int, float] = {}
        took: list[float] = []
        start = time.perf_counter()
        due, number = start, 0
        view = memoryview(bytearray(1 << 16))
        while (now := time.perf_counter()) < start + seconds or sent:
            if now > start + seconds + _WAIT_S:
                raise BenchError(f"{len(sent)} requests were not answered")
            while due <= now < start + seconds:
                sock = self.socks[number % len(self.socks)]
                number += 1
                due += 1 / rate
                if sock.fileno() not in sent:  # skip a connection whose request is pending
                    sent[sock.fileno()] = now
                    sock.send(self._frame)
            for fd, _ in self._epoll.poll(max(0.0, min(due - time.perf_counter(), 0.01))):
                try:
                    if not self._by_fd[fd].recv_into(view):
                        raise BenchError("the proxy closed a connection")
                except BlockingIOError:
                    continue
                asked = sent.pop(fd, None)
                if asked is not None:
                    took.append(time.perf_counter() - asked)
        took.sort()
        at = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
        return {name: took[int(len(took) * share)] * 1e3 for name, share in at.items()}

    def close(self) -> None:
        self._epoll.close()
        for sock in self.socks:
            sock.close()


_SOFTWARE = {"clientSoftwareName": "bench", "clientSoftwareVersion": "1"}


def connected(address: processes.Address, context: ssl.SSLContext | None, buffer: memoryview) -> socket.socket:
    """A connection that has carried one request, so that it holds all its state."""
    sock: socket.socket = socket.create_connection(address, timeout=_WAIT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    if context is not None:
        sock = handshaken(sock, context, buffer)
    sock.send(cases.request_frame(API_VERSIONS, 3, _SOFTWARE))
    view = memoryview(bytearray(1 << 16))
    while True:
        _readable(sock)
        try:
            if sock.recv_into(view):
                return sock
        except BlockingIOError:
            continue
        raise BenchError("the proxy closed a connection")


def _readable(sock: socket.socket) -> bool:
    """Wait for bytes; returns whether there are any."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(_WAIT_S * 1000))


def idle(proxy: Proxy, context: ssl.SSLContext, count: int, active: int, seconds: float) -> dict[str, float]:
    """Memory and latency with `count` idle connections and `active` others that send one request a second each."""
    before = proxy.process.pss_bytes()
    buffer = memoryview(bytearray(READ_BYTES))
    active_clients = ActiveClients(proxy.address, context, active)
    alone = active_clients.ask(active, seconds)
    opened = [connected(proxy.address, context, buffer) for _ in range(count)]
    time.sleep(1)
    each = (proxy.process.pss_bytes() - before) / (count + active)
    found = active_clients.ask(active, seconds)
    active_clients.close()
    for sock in opened:
        sock.close()
    return {
        "pss_mb": before / 1e6 + each * (count + active) / 1e6,
        "bytes_per_connection": each,
        **{f"alone_{name}": value for name, value in alone.items()},
        **found,
    }


def flood(proxy: Proxy, context: ssl.SSLContext, ca: Path, seconds: float) -> dict[str, float]:
    """The latency of 100 clients, without and with a flood of handshakes."""
    active_clients = ActiveClients(proxy.address, context, 100)
    alone = active_clients.ask(1000, seconds)
    command = [sys.executable, "-m", "bench.tls", "shake", str(proxy.address[1]), str(ca)]
    floods = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(_FLOODS)]
    try:
        for each in floods:
            assert each.stdout is not None
            each.stdout.readline()
        start = time.perf_counter()
        before = proxy.process.cpu_s()
        found = active_clients.ask(1000, seconds)
        took = time.perf_counter() - start
        busy = (proxy.process.cpu_s() - before) / took
    finally:
        for each in floods:
            each.terminate()
    made = 0
    for each in floods:
        assert each.stdout is not None
        lines = each.stdout.read().split()
        each.wait()
        made += int(lines[-1]) if lines else 0
    active_clients.close()
    return {
        "handshakes_per_s": made / took,
        "cores_busy": busy,
        **{f"alone_{name}": value for name, value in alone.items()},
        **found,
    }


def shake(port: int, ca: Path) -> None:
    """Perform handshakes until SIGTERM, one after the other; prints a line first, then about every second their
    number."""
    context = ssl.create_default_context(cafile=str(ca))
    buffer = memoryview(bytearray(READ_BYTES))
    print(0, flush=True)
    count, printed_s = 0, time.monotonic()
    while True:
        try:
            raw = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
            raw.setblocking(False)
            handshaken(raw, context, buffer).close()
            count += 1
        except (OSError, BenchError):
            time.sleep(0.01)
        if time.monotonic() - printed_s > 0.2:
            printed_s = time.monotonic()
            print(count, flush=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("parts", nargs=-1)
@click.option("--rounds", type=click.IntRange(1, 100), default=5, show_default=True)
@click.option(
    "--cases", "names", metavar="NAME,...", default=",".join(CASES), show_default=True, help="Cases of `cpu`."
)
@click.option("--connections", type=click.IntRange(1, 10_000), default=10_000, show_default=True)
@click.option("--active", type=click.IntRange(1, 5000), default=1000, show_default=True)
@click.option("--seconds", type=click.FloatRange(0.1, 60), default=5.0, show_default=True)
@click.option(
    "--workers",
    type=click.IntRange(1, 16),
    help="Processes of each proxy for `idle`. Default: as many as the limit of open files requires.",
)
@click.option("--rsa", is_flag=True, help="Use an RSA key of 2048 bits instead of ECDSA P-256.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
def main(
    parts: tuple[str, ...],
    rounds: int,
    names: str,
    connections: int,
    active: int,
    seconds: float,
    workers: int | None,
    rsa: bool,
    as_json: bool,
) -> None:
    """PARTS: cpu, idle, flood; default: all of them."""
    if parts[:1] == ("shake",):
        shake(int(parts[1]), Path(parts[2]))
    wanted = parts or ("cpu", "idle", "flood")
    if unknown := {*names.split(",")}.difference(CASES):
        raise click.UsageError(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    found: dict[str, Any] = {}
    cores = sorted(os.sched_getaffinity(0))
    own, other = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    # A proxy has two file descriptors per connection; the clients and the broker, one process each, have one.
    total = connections + active
    workers = workers or -(-2 * total // _most_files(total))
    processes.allow_files(max(total, 2 * total // workers) + _OTHER_FILES if "idle" in wanted else 4096)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        authority = Authority(folder / "ca", rsa=rsa)
        context = ssl.create_default_context(cafile=str(authority.bundle))
        made = authority.server()
        upstream = stack.enter_context(processes.broker(folder, other))
        if {"cpu", "flood"} & {*wanted}:
            with proxies(folder / "one", upstream, made, own) as stage, processes.pinned(other):
                if "cpu" in wanted:
                    found["cpu"] = cpu(stage, context, upstream, rounds, names.split(","))
                if "flood" in wanted:
                    found["flood"] = {proxy.name: flood(proxy, context, authority.bundle, seconds) for proxy in stage}
        if "idle" in wanted:
            with proxies(folder / "idle", upstream, made, own, workers) as stage, processes.pinned(other):
                found["idle"] = {proxy.name: idle(proxy, context, connections, active, seconds) for proxy in stage}
                for values in found["idle"].values():
                    values["processes"] = workers
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found, Console(width=max(125, Console().width)))
    sys.exit(0 if all(case["passed"] for case in found.get("cpu", ())) else 1)


def _most_files(wanted: int) -> int:
    """How many file descriptors a process may have for connections; enough for `wanted` connections if there is no
    limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 2 * wanted if hard == resource.RLIM_INFINITY else max(1, hard - _OTHER_FILES)


def _show(found: dict[str, Any], console: Console) -> None:
    if "cpu" in found:
        table = Table("case", "HAProxy", "kproxy", "ratio", "limit", title="CPU time, least of the rounds, over TLS")
        for case in found["cpu"]:
            cost = (f"{case[name]:.2f} {case['unit']}" for name in ("haproxy", "kproxy"))
            mark = "" if case["passed"] else " FAIL"
            table.add_row(case["title"], *cost, f"{case['ratio']:.2f}{mark}", f"{case['limit']:.2f}")
        console.print(table)
    for part in ("idle", "flood"):
        for name, values in found.get(part, {}).items():
            text = ", ".join(f"{key} {value:,.2f}" for key, value in values.items())
            console.print(f"{part}: {name}: {text}")


if __name__ == "__main__":
    main()
