"""Networks of their own for tests: a client, a gateway and brokers in network namespaces, joined by veth pairs.

It needs root, `ip` (iproute2) and `nft` (nftables). Nothing outside these namespaces is touched; what was made goes
with the `with`. The names carry the process id, so that runs beside each other do not meet.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

_numbers = count()


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def why_not() -> str | None:
    """Why namespaces cannot be made here; None: they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"needs {tool}: apt-get install {package}"
    done = subprocess.run(["unshare", "--net", "nft", "list", "ruleset"], capture_output=True, text=True, check=False)
    return f"nft does not work here: {done.stderr.strip()}" if done.returncode else None


class Namespace:
    """One machine, as far as its network goes."""

    def __init__(self, name: str) -> None:
        self.name = f"kp{os.getpid()}-{next(_numbers)}-{name}"
        self._processes = ExitStack()

    def command(self, *arguments: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.name, *map(str, arguments)]

    def run(self, *arguments: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in it to its end."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=120, check=False, **options
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command in it, which is killed with the namespace."""
        process = subprocess.Popen(self.command(*arguments), text=True, stdin=subprocess.DEVNULL, **options)

        def end() -> None:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

        self._processes.callback(end)
        return process

    def make(self) -> None:
        ip("netns", "add", self.name)
        self.run("ip", "link", "set", "lo", "up")
        # An address of IPv6 is usable at once, without the second that looking for duplicates takes.
        self.run("sh", "-c", "echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad")

    def end_processes(self) -> None:
        """Kill what was started in it and runs."""
        self._processes.close()

    def remove(self) -> None:
        self.end_processes()
        ip("netns", "del", self.name, check=False)


@contextmanager
def network(brokers: Sequence[int]) -> Iterator[tuple[Namespace, Namespace, Namespace]]:
    """(client, gateway, brokers): the client is 10.91.1.9, broker N 10.91.2.N and fd00:91:2::N, the gateway between."""
    client, gateway, kafka = (Namespace(name) for name in ("client", "gateway", "kafka"))
    try:
        for namespace in (client, gateway, kafka):
            namespace.make()
        _join(client, gateway, 1)
        _join(kafka, gateway, 2)
        for node_id in brokers:
            for address in (f"10.91.2.{node_id}/24", f"fd00:91:2::{node_id}/64"):
                kafka.run("ip", "address", "add", address, "dev", "uplink")
        client.run("ip", "address", "add", "10.91.1.9/24", "dev", "uplink")
        client.run("ip", "address", "add", "fd00:91:1::9/64", "dev", "uplink")
        for namespace, number in ((client, 1), (kafka, 2)):
            namespace.run("ip", "route", "add", "default", "via", f"10.91.{number}.254")
            namespace.run("ip", "-6", "route", "add", "default", "via", f"fd00:91:{number}::fe")
        for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            gateway.run("sh", "-c", f"echo 1 > /proc/sys/net/{setting}")
        yield client, gateway, kafka
    finally:
        for namespace in (client, gateway, kafka):
            namespace.remove()


def _join(namespace: Namespace, gateway: Namespace, number: int) -> None:
    """A veth pair: `uplink` in the namespace, `net1` or `net2` in the gateway."""
    end = f"net{number}"
    ip("link", "add", end, "netns", gateway.name, "type", "veth", "peer", "name", "uplink", "netns", namespace.name)
    gateway.run("ip", "address", "add", f"10.91.{number}.254/24", "dev", end)
    gateway.run("ip", "address", "add", f"fd00:91:{number}::fe/64", "dev", end)
    gateway.run("ip", "link", "set", end, "up")
    namespace.run("ip", "link", "set", "uplink", "up")
