"""`kproxy doctor`: connects and checks before there is traffic.

Duty: the configuration, this host (open files, memory, ports), ZooKeeper servers, and each cluster (`doctor_cluster`),
all in parallel and within a timeout. Brokers are reached by the same code that serves clients, and kproxy's own ports
are open meanwhile, so that loops are found. It changes nothing: it opens connections, sends ApiVersions and Metadata,
and logs in. Bounded by `timeout_s`, and by IN_PARALLEL connections. Refuses to know how findings are shown.
"""

import asyncio
import os
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kproxy.checks.doctor_cluster import ClusterExamination, unbound
from kproxy.checks.findings import Report
from kproxy.errors import ConfigError, of_extras
from kproxy.metrics import Metrics
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.load import load
from kproxy.proxy.config.settings import Cluster, Config
from kproxy.proxy.config.zookeeper import ZooKeeper
from kproxy.proxy.connection.worker import Worker
from kproxy.proxy.process.cautions import cautions
from kproxy.proxy.relay.pressure import Pressure
from kproxy.proxy.sasl import tokens
from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.listeners import Gate, Listener, resolve, why_unbound
from kproxy.proxy.sockets.poller import Poller

TIMEOUT_S = 60.0
IDLE_BYTES = 4_300  # per connection (bench/FIGURES.md)
START_BYTES = 61_000_000  # per process
UNSENT_BYTES = 2 * 512 * 1024  # per connection if both sides receive nothing: one read each

SERVER_FIX = "is the server up, is it the right address and port (2181 as a rule), does a firewall let kproxy through?"
KEYS_FIX = (
    "is it the URL of the issuer's jwks_uri, does this host reach it, and does jwks_ca_file vouch for its certificate?"
)

Say = Callable[[str], None]  # takes a progress line


def examine(
    file: str | None,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
    say: Say = lambda _: None,
) -> Report:
    """Check a configuration as `kproxy run` would read it; invalid settings are findings too."""
    report = Report()
    try:
        config = load(file, environment, flags)
    except ConfigError as fault:
        for path, text in fault.faults:
            report.error("configuration", path or "settings", text, "correct the setting; the rest was not checked")
        return report
    report.ok("configuration", file or "settings", f"{len(config.clusters)} cluster(s)")
    for place, text, fix in cautions(config):
        report.warn("configuration", place, text, fix)
    asyncio.run(_examine(config, report, timeout_s, say))
    return report


async def _examine(config: Config, report: Report, timeout_s: float, say: Say) -> None:
    _open_files(config, report)
    _memory(config, report)
    loop = asyncio.get_running_loop()
    gate = Gate(1 << 20, name="doctor")
    poller = Poller(loop)
    worker = Worker(config, gate, poller, Pressure(memoryview(b"")), 0, Metrics(), ())
    try:
        _admin_port(config, gate, report)
        examinations = []
        for cluster in config.clusters:
            try:
                examinations.append(ClusterExamination(worker, cluster, report, say))
            except ConfigError as fault:  # from files named in the settings
                for path, text in fault.faults:
                    report.error("configuration", path, text, "correct it; this cluster was not examined")
        for examination in examinations:
            examination.listen()
        async with asyncio.timeout(timeout_s):
            ensembles = (_zookeeper(each, config.connect_timeout_s, gate, report) for each in config.zookeeper)
            keys = (_keys(cluster, report) for cluster in config.clusters)
            await asyncio.gather(*(examination.run() for examination in examinations), *ensembles, *keys)
    except TimeoutError:
        report.error(
            "time",
            "doctor",
            f"not all was checked within {timeout_s:g} s",
            "look at what is slow above, or give --timeout-s more",
        )
    finally:
        gate.close()
        poller.close()
    report.skip(
        "clock",
        "brokers",
        "brokers report their time only for written records; certificates that are not valid yet, or logins that "
        "expire at once, would reveal a wrong clock",
    )


async def _zookeeper(settings: ZooKeeper, within_s: float, gate: Gate, report: Report) -> None:
    """Check the port and the servers; clients need only one server, so an unreachable one is a warning."""
    name = f"zookeeper {settings.name}"
    _port(name, f"{name}: listen {settings.listen}", settings.listen, gate, report)
    faults = await asyncio.gather(*(_unreached(server, within_s) for server in settings.servers))
    say = report.error if all(faults) else report.warn
    for server, fault in zip(settings.servers, faults, strict=True):
        if fault:
            say("reachability", f"{name}: server {server}", f"cannot be reached: {fault}", SERVER_FIX)
        else:
            report.ok("reachability", f"{name}: server {server}", "accepts connections")


async def _keys(cluster: Cluster, report: Report) -> None:
    """Check that the keys for clients' tokens are available: without them each login by OAUTHBEARER is refused."""
    settings = cluster.authentication
    if settings is None or settings.jwks_url is None:
        return
    subject = f"cluster {cluster.name}: authentication.jwks_url"
    try:
        found = await asyncio.to_thread(tokens.fetch, settings.jwks_url, settings.jwks_ca_file)
        with of_extras(lambda missing: ConfigError([(subject, f"it {missing}")])):
            tokens.TokenChecker(issuer=None, audience=(), claim="sub", skew_s=0).use(found)
    except tokens.TokenError as fault:
        report.error("login", subject, f"{fault}: logins of clients by OAUTHBEARER would be refused", KEYS_FIX)
    except ConfigError as missing:
        report.error("configuration", subject, str(missing), "install it")
    else:
        report.ok("login", subject, "answers with keys that can check tokens")


async def _unreached(server: Address, within_s: float) -> str:
    """Return why a server cannot be reached, or ""."""
    try:
        async with asyncio.timeout(within_s):
            _, writer = await asyncio.open_connection(server.host, server.port)
    except TimeoutError:
        return f"no answer within {within_s:g} s"
    except OSError as fault:
        return os.strerror(fault.errno) if fault.errno and fault.errno > 0 else f"{fault.strerror or fault}"
    writer.close()
    return ""


def _open_files(config: Config, report: Report) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections or descriptors.DEFAULT_CONNECTIONS
    infinite = hard == resource.RLIM_INFINITY
    possible = wanted if infinite else descriptors.shares(hard, wanted, config.workers).connections
    limit = "no limit" if infinite else f"{hard} at most ({soft} now)"
    if possible >= wanted:
        report.ok("open files", "this host", f"{limit}, enough for {wanted} connections")
    elif config.max_connections is not None:
        fix = "raise the limit (ulimit -Hn, LimitNOFILE) or lower max_connections"
        report.error("open files", "this host", f"{limit}: {possible} of max_connections={wanted} fit", fix)
    else:
        fix = "raise the limit (ulimit -Hn, LimitNOFILE), or set max_connections to what is needed"
        report.note("open files", "this host", f"{limit}: {possible} connections fit, not {wanted}", fix)


def _memory(config: Config, report: Report) -> None:
    """Check that idle connections fit into memory; the number that may stall with full buffers is only reported."""
    available = _memory_available()
    if available is None:
        report.skip("memory", "this host", "neither a limit nor /proc/meminfo says how much there is")
        return
    connections = config.max_connections or descriptors.DEFAULT_CONNECTIONS
    processes = config.workers + (config.workers > 1)
    idle = processes * START_BYTES + connections * IDLE_BYTES + config.max_held_bytes
    stalled = max(0, available - idle) // UNSENT_BYTES
    found = (
        f"{_mb(idle)} for {connections} connections and the answers that are held, of {_mb(available)}; "
        f"{min(stalled, connections)} of them may stand still with all their buffers full ({_mb(UNSENT_BYTES)} each)"
    )
    if idle > available:
        report.error("memory", "this host", found, "give it more memory, or lower max_connections")
    elif stalled < min(connections, 100):
        fix = "give it more memory, or lower max_connections: clients that read slowly would exhaust it"
        report.warn("memory", "this host", found, fix)
    else:
        report.ok("memory", "this host", found)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _memory_available(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return how many bytes this process may use: its container's limit, or the machine's free memory, or None."""
    found = []
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int((cgroup / name).read_text())
            if limit < 1 << 60:  # version 1 has a huge number for "no limit"
                found.append(limit)
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    return min(found, default=None)


def _admin_port(config: Config, gate: Gate, report: Report) -> None:
    if config.admin is None or not config.admin.port:
        return
    _port("admin", f"admin {config.admin}", config.admin, gate, report)


def _port(name: str, subject: str, address: Address, gate: Gate, report: Report) -> None:
    """Bind one of our addresses, and keep it open during the examination, as no broker's port may be the same."""
    hosts: list[str] = []
    try:
        hosts = resolve(address.host)
        Listener(gate, hosts, address.port, 1, lambda sock, _: sock.close(), name)
    except OSError as fault:
        report.error("ports", subject, unbound(fault), why_unbound(fault, gate, hosts, address.port))
        return
    report.ok("ports", subject, "free")
