"""The processes of a run: the broker and each proxy in front of it, on cores of their own, ended in any case."""

import http.client
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from prometheus_client.parser import text_string_to_metric_families

from bench import cases
from kproxy.protocol import codec
from kproxy.protocol.apis import METADATA

Address = tuple[str, int]

# The installed script of this environment.
KPROXY = str(Path(sys.executable).with_name("kproxy"))

_ROOT = Path(__file__).parent.parent  # where `bench` can be imported
_HOST = "127.0.0.1"
_KEY_VERSION = Struct(">hh")
_START_S = 20.0
_STOP_S = 5.0

# splice-auto lets HAProxy move large bodies inside the kernel, its fastest mode.
_HAPROXY = """\
global
    nbthread 1
    maxconn 2000
defaults
    mode tcp
    option splice-auto
    timeout connect 5s
    timeout client 1m
    timeout server 1m
listen kafka
    bind {listen}
    server broker {broker}
"""
_NGINX = """\
{modules}
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 2000; }}
stream {{
    server {{
        listen {listen};
        proxy_pass {broker};
    }}
}}
"""
_RULES = 20
_RULE = """\
[[cluster.policy]]
action = "deny"
topic = "secret-{number}-*"
group = "secret-{number}-*"
"""
_POLICY = """\
workers = {workers}
admin = "{admin}"
[[cluster]]
listen = "{listen}"
bootstrap = ["{bootstrap}"]
broker_port_base = {broker_port_base}
detail = "{detail}"
{rules}"""
_NGINX_STREAM = Path("/usr/lib/nginx/modules/ngx_stream_module.so")  # Debian builds it as a module


class BenchError(Exception):
    """The bench cannot continue; the text names the cause."""


class Process:
    """A started process: its cost, its output, and its end."""

    def __init__(
        self, name: str, command: list[str], folder: Path, core: int | None, *, stdout: int | None = None
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log, pinned(core):
            self._popen = subprocess.Popen(
                command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=log if stdout is None else stdout, stderr=log
            )
        # The clock of another process's CPU time, in ns, while /proc has ticks of 10 ms: clock_getcpuclockid(3), Linux.
        self._clock = (~self._popen.pid << 3) | 2

    @property
    def pid(self) -> int:
        return self._popen.pid

    def cpu_s(self) -> float:
        """User and system time of all its threads."""
        return time.clock_gettime(self._clock)

    def rss_bytes(self) -> int:
        pages = Path(f"/proc/{self._popen.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def pss_bytes(self) -> int:
        """The proportional set size of the process and all its descendants: each page divided among the processes that
        map it."""
        pids, found = [self._popen.pid], 0
        for pid in pids:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return found * 1024

    def shared_bytes(self) -> int:
        """The part of its RSS that is pages of files: libraries, which other processes may share."""
        pages = Path(f"/proc/{self._popen.pid}/statm").read_text().split()[2]
        return int(pages) * resource.getpagesize()

    def first_line(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().decode()

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def check(self) -> None:
        if self._popen.poll() is not None:
            raise BenchError(f"{self.name} ended with status {self._popen.returncode}:\n{self.log_tail()}")

    def stop(self) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()


@dataclass(frozen=True)
class Proxy:
    """A proxy that is ready, and the address for its clients."""

    name: str
    process: Process
    address: Address
    admin: Address | None = None

    def requests_counted(self, api: str) -> int:
        """How many requests of an API kproxy's own metrics count."""
        assert self.admin is not None
        families = text_string_to_metric_families(get(self.admin, "/metrics")[1])
        samples = (sample for family in families for sample in family.samples)
        counted = (s.value for s in samples if s.name == "kproxy_requests_total" and s.labels["api"] == api)
        return int(sum(counted))


@contextmanager
def broker(folder: Path, core: int | None) -> Iterator[Address]:
    with running("broker", [sys.executable, "-m", "bench.broker"], folder, core, stdout=subprocess.PIPE) as process:
        line = process.first_line()
        if not line:
            process.check()
            raise BenchError("the bench's broker did not start")
        yield _HOST, int(line)


@contextmanager
def saturating_broker(binary: Path, folder: Path, core: int | None) -> Iterator[Address]:
    """The broker of saturate.c, with the same responses."""
    port = free_port()
    file = folder / "answers"
    with file.open("wb") as out:
        for (api_key, version), frame in cases.answers(port).items():
            out.write(_KEY_VERSION.pack(api_key, version) + frame)
    command = [str(binary), "broker", str(port), str(file)]
    with running("broker", command, folder, core, stdout=subprocess.PIPE) as process:
        if not process.first_line():
            process.check()
            raise BenchError(f"the bench's broker did not start:\n{process.log_tail()}")
        yield _HOST, port


def saturate(folder: Path) -> Path:
    """Compile saturate.c; returns the program."""
    binary = folder / "saturate"
    command = [found("gcc"), "-O2", "-o", str(binary), str(Path(__file__).with_name("saturate.c"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"gcc cannot compile saturate.c:\n{done.stderr}")
    return binary


@contextmanager
def haproxy(upstream: Address, folder: Path, core: int | None) -> Iterator[Proxy]:
    address = _HOST, free_port()
    config = folder / "haproxy.cfg"
    config.write_text(_HAPROXY.format(listen=text(address), broker=text(upstream)))
    with running("haproxy", [found("haproxy"), "-db", "-f", str(config)], folder, core) as process:
        until(process, "opens no port", lambda: is_open(address))
        yield Proxy("haproxy", process, address)


@contextmanager
def nginx(upstream: Address, folder: Path, core: int | None) -> Iterator[Proxy]:
    address = _HOST, free_port()
    modules = f"load_module {_NGINX_STREAM};" if _NGINX_STREAM.exists() else ""
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(modules=modules, folder=folder, listen=text(address), broker=text(upstream)))
    command = [found("nginx"), "-p", str(folder), "-c", str(config), "-e", "stderr"]
    with running("nginx", command, folder, core) as process:
        until(process, "opens no port", lambda: is_open(address))
        yield Proxy("nginx", process, address)


@contextmanager
def kproxy(
    upstream: Address,
    folder: Path,
    core: int | None,
    detail: str = "headers",
    workers: int = 1,
    *,
    policy: bool = False,
) -> Iterator[Proxy]:
    """kproxy with default settings except ports, rewriting and all metrics. Clients connect where its Metadata directs
    them."""
    listen, admin = (_HOST, free_port()), (_HOST, free_port())
    base = free_port() - cases.NODE_ID
    settings = {"listen": text(listen), "bootstrap": text(upstream), "admin": text(admin), "broker-port-base": base}
    flags = [
        part
        for name, value in (settings | {"detail": detail, "workers": workers}).items()
        for part in (f"--{name}", str(value))
    ]
    if policy:
        config = folder / "kproxy.toml"
        rules = "".join(_RULE.format(number=number) for number in range(_RULES))
        config.write_text(_POLICY.format(detail=detail, workers=workers, rules=rules, **_with_underscores(settings)))
        flags = ["--config", str(config)]
    with running("kproxy", [KPROXY, "run", *flags], folder, core) as process:
        until(process, "is not ready", lambda: is_open(admin) and get(admin, "/ready")[0] == 200)
        advertised = _advertised(listen)
        if advertised != (_HOST, base + cases.NODE_ID):
            raise BenchError(f"kproxy does not rewrite: through it, the broker says that it is at {text(advertised)}")
        yield Proxy("kproxy", process, advertised, admin)


def _with_underscores(settings: dict[str, str | int]) -> dict[str, str | int]:
    return {name.replace("-", "_"): value for name, value in settings.items()}


def metrics(proxy: Proxy) -> str:
    """The current metrics of kproxy."""
    assert proxy.admin is not None
    return get(proxy.admin, "/metrics")[1]


def version_cpu_s() -> float:
    """The CPU time of `kproxy --version`, the median of five."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([KPROXY, "--version"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(times)


@contextmanager
def running(
    name: str, command: list[str], folder: Path, core: int | None, *, stdout: int | None = None
) -> Iterator[Process]:
    process = Process(name, command, folder, core, stdout=stdout)
    try:
        yield process
    finally:
        process.stop()


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Run this process and the processes that it starts on one core; None: on any core."""
    before = os.sched_getaffinity(0)
    if core is not None:
        os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def allow_files(files: int) -> None:
    """Allow this process and its children that many open files. Raises BenchError if the system allows fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        raise BenchError(f"{files} open files are needed, the system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))


def found(command: str) -> str:
    path = shutil.which(command, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise BenchError(f"{command} is not installed: ./dev bench installs it, or apt-get install {command}")
    return path


def text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        return int(server.getsockname()[1])


def until(process: Process, trouble: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not done():
        process.check()
        if time.monotonic() > deadline:
            raise BenchError(f"{process.name} {trouble} after {_START_S:g} s:\n{process.log_tail()}")
        time.sleep(0.05)


def is_open(address: Address) -> bool:
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True


def get(address: Address, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=_START_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _advertised(bootstrap: Address) -> Address:
    """The address that the bootstrap address advertises for the cluster's broker."""
    answer = ask(bootstrap, cases.request_frame(METADATA, 12, {"topics": None}))
    _, body = codec.decode_response(answer[4:], METADATA, 12)
    (node,) = body["brokers"]
    return node["host"], node["port"]


def ask(address: Address, request: bytes) -> bytes:
    """The response to one request on a connection of its own, including its size."""
    with socket.create_connection(address, timeout=_START_S) as sock, sock.makefile("rb") as answers:
        sock.sendall(request)
        size = answers.read(4)
        return size + answers.read(cases.INT32.unpack(size)[0])
