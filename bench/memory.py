"""`python -m bench.memory`: the memory (RSS) of `kproxy run` at its start, after scrapes, and with idle connections.

An idle connection has carried one request, so that it holds all its state. Memory shared with other processes
(pages of libraries) is reported separately.
"""

import json
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click

from bench import cases, processes
from bench.processes import BenchError, Proxy
from kproxy.protocol.apis import API_VERSIONS

_OTHER_FILES = 200
_SCRAPES = 3
_SETTLE_S = 1.0
_CONNECTIONS_AT_ONCE = 100  # so that no backlog overflows


def memory(proxy: Proxy) -> dict[str, float]:
    """MB of the process: all resident memory, and the part that is not shared."""
    rss = proxy.process.rss_bytes()
    return {"rss_mb": rss / 1e6, "own_mb": (rss - proxy.process.shared_bytes()) / 1e6}


def idle(proxy: Proxy, count: int) -> list[socket.socket]:
    """Open `count` connections, each of which has carried one answered request."""
    frame = cases.request_frame(API_VERSIONS, 3, {"clientSoftwareName": "bench", "clientSoftwareVersion": "1"})
    opened: list[socket.socket] = []
    while len(opened) < count:
        more = [
            socket.create_connection(proxy.address, timeout=10)
            for _ in range(min(_CONNECTIONS_AT_ONCE, count - len(opened)))
        ]
        for sock in more:
            sock.sendall(frame)
        for sock in more:
            if not sock.recv(1 << 16):
                raise BenchError("kproxy closed an idle connection")
        opened += more
    return opened


def run(connections: int, detail: str = "headers") -> dict[str, dict[str, float]]:
    """Memory by state: `start`, `scraped` and `idle`, the last also with bytes per connection."""
    processes.allow_files(2 * connections + _OTHER_FILES)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        upstream = stack.enter_context(processes.broker(folder, None))
        proxy = stack.enter_context(processes.kproxy(upstream, folder, None, detail=detail))
        found = {"start": memory(proxy)}
        for _ in range(_SCRAPES):
            proxy.requests_counted("Produce")
        found["scraped"] = memory(proxy)
        opened = idle(proxy, connections)
        time.sleep(_SETTLE_S)
        found["idle"] = memory(proxy)
        each = (found["idle"]["rss_mb"] - found["scraped"]["rss_mb"]) * 1e6 / connections
        found["idle"] |= {"connections": connections, "bytes_per_connection": round(each)}
        for sock in opened:
            sock.close()
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--connections", type=click.IntRange(1, 100_000), default=9000, show_default=True)
@click.option("--detail", type=click.Choice(("headers", "topics")), default="headers", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of lines.")
def main(connections: int, detail: str, as_json: bool) -> None:
    """Memory of `kproxy run`: at its start, after scrapes, and with idle connections."""
    try:
        found = run(connections, detail)
    except BenchError as fault:
        raise click.ClickException(str(fault)) from fault
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for state, sizes in found.items():
        print(f"{state:8} {sizes['rss_mb']:6.1f} MB resident, {sizes['own_mb']:6.1f} MB of it its own")
    print(f"{found['idle']['bytes_per_connection']:,.0f} bytes per idle connection, of {connections:,}")


if __name__ == "__main__":
    sys.exit(main())
