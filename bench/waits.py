"""`python -m bench.waits`: the longest wait of a healthy client while others attack the same kproxy.

One kproxy has a listener of each kind: plain, `detail = "topics"`, a policy of 200 rules, logins, TLS, ZooKeeper, and
the admin port. During each attack of `bench.attacks`, a healthy client of another listener sends a Produce of 1 kB
every two milliseconds, and so does a second client, the control, that bypasses kproxy: its wait is the cost of the busy
machine. The first may wait LIMIT_MS longer. Attackers and the broker behind them have a core of their own, as on other
machines; kproxy and the healthy clients share another one. Run it on an idle machine.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from jwt.algorithms import ECAlgorithm
from rich.console import Console
from rich.table import Table

from bench import cases, processes
from bench.attacks import ATTACKS
from bench.processes import Address, BenchError, Process
from tests.certificates import Authority
from tests.ports import free_ports

LIMIT_MS = 50.0
_OURS, _THEIRS = (0, 1) if (os.cpu_count() or 1) > 1 else (None, None)  # cores
_LEAD_S = 0.5  # the healthy clients run that long before and after an attack
_PAUSE_S = 0.002
_HOST = "127.0.0.1"
_CONFIG = """\
admin = "127.0.0.1:{admin}"
[[cluster]]
name = "healthy"
listen = "127.0.0.1:{healthy}"
bootstrap = ["{broker}"]

[[zookeeper]]
name = "registry"
listen = "127.0.0.1:{zookeeper}"
servers = ["{registry}"]
"""
_ATTACKED = """\
[[cluster]]
name = "{name}"
listen = "127.0.0.1:{port}"
bootstrap = ["{broker}"]
{settings}

"""
_RULES = 200
_KINDS = ("plain", "topics", "policy", "login", "tls")  # kinds of attacked listeners


@dataclass(frozen=True)
class Waits:
    """The waits of two clients during one attack, in ms; rss_mb: kproxy's at the end."""

    attack: str
    requests: int
    median_ms: float
    longest_ms: float
    control_longest_ms: float
    sent_mb: float
    rss_mb: float

    @property
    def is_kept(self) -> bool:
        return self.longest_ms <= self.control_longest_ms + LIMIT_MS


@dataclass(frozen=True)
class Attacked:
    """A kproxy that is ready, and its listeners by kind."""

    process: Process
    listeners: dict[str, Address]
    healthy: Address
    control: Address  # the healthy client's broker


def _settings(kind: str, folder: Path) -> str:
    if kind == "topics":
        return 'detail = "topics"'
    if kind == "policy":
        denied = (f'[[cluster.policy]]\naction = "deny"\ngroup = "g-{"*" * (not n)}{n}*"' for n in range(_RULES))
        return "\n".join(denied)
    if kind == "login":
        users, keys = folder / "users", folder / "keys.json"
        if not users.exists():
            add = [processes.KPROXY, "users", "add", str(users), "alice"]
            subprocess.run(add, input=b"a password of alice\n", check=True, capture_output=True)
            key = json.loads(ECAlgorithm.to_jwk(generate_private_key(SECP256R1()).public_key()))
            keys.write_text(json.dumps({"keys": [key | {"kid": "k"}]}))
        return (
            f'[cluster.authentication]\nmechanisms = ["PLAIN", "OAUTHBEARER"]\nusers_file = "{users}"\n'
            f'jwks_file = "{keys}"\nissuer = "https://issuer"\naudience = ["kafka"]'
        )
    if kind == "tls":
        certificate = Authority(folder).server()
        return f'[cluster.tls]\ncertificate = "{certificate.certificate}"\nkey = "{certificate.key}"'
    return ""


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """Both brokers and kproxy. Raises BenchError if one does not start."""
    with ExitStack() as stack:
        broker = stack.enter_context(processes.broker(folder, _OURS))
        command = [sys.executable, "-m", "bench.attacks", "broker"]
        swallowing = stack.enter_context(
            processes.running("attacked", command, folder, _THEIRS, stdout=subprocess.PIPE)
        )
        line = swallowing.first_line()
        if not line:
            swallowing.check()
            raise BenchError("the attacked broker did not start")
        other = f"{_HOST}:{int(line)}"
        ports = {
            kind: free_ports(2, _HOST) for kind in (*_KINDS, "admin", "zookeeper", "healthy")
        }  # its own port, and the following one for its broker
        text = _CONFIG.format(**ports, broker=processes.text(broker), registry=other)
        for kind in _KINDS:
            text += _ATTACKED.format(name=kind, port=ports[kind], broker=other, settings=_settings(kind, folder))
        config = folder / "kproxy.toml"
        config.write_text(text)
        run = [processes.KPROXY, "run", "--config", str(config)]
        process = stack.enter_context(processes.running("kproxy", run, folder, _OURS))
        admin = _HOST, ports["admin"]
        processes.until(
            process, "is not ready", lambda: processes.is_open(admin) and processes.get(admin, "/ready")[0] == 200
        )
        listeners = {kind: (_HOST, port) for kind, port in ports.items()}
        yield Attacked(process, listeners, listeners["healthy"], broker)


def measure(kproxy: Attacked, name: str, seconds: float, rounds: int = 1) -> Waits:
    """Run one attack `rounds` times: the medians of all rounds. Raises BenchError if a healthy client fails.

    In some rounds the machine itself makes both clients wait for long.
    """
    each = [_measure_once(kproxy, name, seconds) for _ in range(rounds)]
    middle = {
        key: median(getattr(waits, key) for waits in each) for key in ("median_ms", "longest_ms", "control_longest_ms")
    }
    requests, sent_mb = sum(waits.requests for waits in each), sum(waits.sent_mb for waits in each)
    return Waits(name, requests, sent_mb=sent_mb, rss_mb=each[-1].rss_mb, **middle)


def _measure_once(kproxy: Attacked, name: str, seconds: float) -> Waits:
    attack = ATTACKS[name]
    lasts = seconds + 2 * _LEAD_S
    clients = [_client(address, lasts) for address in (kproxy.healthy, kproxy.control)]
    for client in clients:
        _has_begun(client)
    time.sleep(_LEAD_S)
    command = [sys.executable, "-m", "bench.attacks", "attack", name, processes.text(kproxy.listeners[attack.listener])]
    with processes.pinned(_THEIRS):
        sent = subprocess.run([*command, str(seconds)], stdout=subprocess.PIPE, check=True, timeout=60 + seconds).stdout
    through, control = (_result(client) for client in clients)
    kproxy.process.check()
    return Waits(
        name,
        len(through),
        through[len(through) // 2] * 1e3,
        through[-1] * 1e3,
        control[-1] * 1e3,
        int(sent) / 1e6,
        kproxy.process.rss_bytes() / 1e6,
    )


def _client(address: Address, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.waits", "--client", processes.text(address), "--seconds", str(seconds)]
    with processes.pinned(_OURS):
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _has_begun(client: subprocess.Popen[str]) -> None:
    """Wait for the client's first response. Python takes longer to start than some attacks need to connect."""
    assert client.stdout is not None
    client.stdout.readline()


def _result(client: subprocess.Popen[str]) -> list[float]:
    """The seconds of each request, sorted."""
    out, _ = client.communicate()
    if client.returncode or not out.strip():
        raise BenchError("a healthy client failed: its lines are above")
    return sorted(json.loads(out))


def healthy_client(address: Address, seconds: float) -> list[float]:
    """The seconds that each Produce of 1 kB took, one at a time, on one connection."""
    case = next(case for case in cases.CASES if case.name == "pipelined")
    request = cases.request(case, 9)
    found = []
    with socket.create_connection(address, timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = sock.makefile("rb")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter()
            sock.sendall(request)
            size = cases.INT32.unpack(answers.read(4))[0]
            answers.read(size)
            found.append(time.perf_counter() - begin)
            if len(found) == 1:
                print("begun", flush=True)
            time.sleep(_PAUSE_S)
    return found


def show(waits: list[Waits], console: Console) -> None:
    table = Table(title="How long a healthy client waits during an attack, in ms", title_justify="left")
    table.add_column("attack")
    for heading in ("requests", "median", "longest", "past kproxy", "sent MB", "RSS MB"):
        table.add_column(heading, justify="right")
    for each in waits:
        longest = f"{each.longest_ms:.1f}" if each.is_kept else f"[red]{each.longest_ms:.1f}[/]"
        table.add_row(
            ATTACKS[each.attack].title,
            f"{each.requests:,}",
            f"{each.median_ms:.2f}",
            longest,
            f"{each.control_longest_ms:.1f}",
            f"{each.sent_mb:,.1f}",
            f"{each.rss_mb:,.0f}",
        )
    console.print(table)
    console.print(f"A client may wait {LIMIT_MS:g} ms longer than one that bypasses kproxy.")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--attacks", "names", metavar="NAME,...", default=",".join(ATTACKS), show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, help="Duration of each attack."
)
@click.option(
    "--rounds", type=click.IntRange(1, 99), default=3, show_default=True, help="Rounds per attack; medians count."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
@click.option("--client", metavar="HOST:PORT", hidden=True, help="Be the healthy client of one attack.")
def main(names: str, seconds: float, rounds: int, as_json: bool, client: str | None) -> None:
    """The longest wait of a healthy client while others attack the same kproxy; status 1 if it is too long."""
    if client is not None:
        host, _, port = client.rpartition(":")
        print(json.dumps(healthy_client((host, int(port)), seconds)))
        return
    wanted = names.split(",")
    if unknown := set(wanted) - set(ATTACKS):
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}: there are {', '.join(ATTACKS)}", param_hint="--attacks"
        )
    found = []
    try:
        with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as folder, attacked(Path(folder)) as kproxy:
            for name in wanted:
                print(f"{ATTACKS[name].title} ...", file=sys.stderr)
                found.append(measure(kproxy, name, seconds, rounds))
    except BenchError as fault:
        raise click.ClickException(str(fault)) from fault
    if as_json:
        print(json.dumps([asdict(each) | {"kept": each.is_kept} for each in found], indent=2))
    else:
        show(found, Console(width=max(110, Console().width)))
    sys.exit(0 if all(each.is_kept for each in found) else 1)


if __name__ == "__main__":
    main()
