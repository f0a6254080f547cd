"""`python -m bench.real`: the cost of kproxy, HAProxy and nginx before a real Kafka broker.

A null broker answers all requests of one read at once; a real one answers each when its batch is appended. So only this
bench shows whether an optimisation for responses that arrive together helps in operation. The broker is one node in a
JVM with all its compilers; the client is the bench's own, which pipelines. Produces of two sizes go over one connection
and over sixteen.

As in `measure`, every round gives the same requests to each proxy in turn, and only their CPU time counts. The broker
uses all cores, so rounds differ more than with a null broker: the figures are medians, not minima. Needs Java and the
jars that `./dev bench real` downloads.
"""

import json
import statistics
import sys
import tempfile
import uuid
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from bench import cases, processes
from bench.load import Load, LoadError
from bench.processes import Address, BenchError, Proxy
from kproxy.protocol import codec
from kproxy.protocol.apis import METADATA, NOT_LEADER_OR_FOLLOWER, PRODUCE
from tests.broker import cluster

VERSION = 9  # of Produce: the last version before topic ids, which the bench would have to look up
REFERENCE = "haproxy"
_MIN_WIDTH = 100  # even if the output is no terminal
_WARM_UP = 20_000  # requests, so that the JVM has compiled its hot code
# A single broker; its log is kept short, since nobody reads it.
_SETTINGS = {
    **{name: "1" for name in cluster.SETTINGS if name.endswith((".replication.factor", ".min.isr"))},
    "num.partitions": "1",
    "auto.create.topics.enable": "true",
    "default.replication.factor": "1",
    "log.segment.bytes": str(64 << 20),
    "log.retention.bytes": str(128 << 20),
    "log.retention.check.interval.ms": "2000",
    "log.segment.delete.delay.ms": "1000",
}


@dataclass(frozen=True)
class Case:
    """Produces of one size over `connections` connections, each with `depth` of them in flight."""

    request_bytes: int
    connections: int
    depth: int
    requests: int  # per round

    @property
    def title(self) -> str:
        return f"{self.request_bytes} B, {self.connections} conn., depth {self.depth}"


CASES = tuple(
    Case(request_bytes, connections, depth, 6_000 if depth == 1 else 12_000)
    for request_bytes in (100, 1_000)
    for connections in (1, 16)
    for depth in (1, 8, 50)
)


@dataclass(frozen=True)
class Result:
    """One case: microseconds of CPU time per exchange of each proxy in each round."""

    case: Case
    us: dict[str, list[float]]

    def median(self, proxy: str) -> float:
        return statistics.median(self.us[proxy])

    def ratio(self, proxy: str, reference: str = REFERENCE) -> float:
        """The median over the rounds of the ratio within a round."""
        return statistics.median(own / other for own, other in zip(self.us[proxy], self.us[reference], strict=True))


@contextmanager
def broker(folder: Path) -> Iterator[Address]:
    """Start one Kafka broker; returns the address of its listener for clients."""
    node = cluster.Broker(cases.NODE_ID, folder, controls=True)
    voters = f"{node.node_id}@{node.host}:{node.ports['CONTROLLER']}"
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    node.format(cluster_id, voters, cluster.SETTINGS | _SETTINGS)
    try:
        node.start(options=("-XX:TieredStopAtLevel=4", "-Xmx512m"))
        node.wait_until_started()
        yield node.host, node.port
    finally:
        node.stop(kill=True)


def request(request_bytes: int) -> bytes:
    """A Produce of about `request_bytes` bytes; its batch has a checksum that a broker accepts."""
    return cases.request(replace(cases.CASES[0], request_bytes=request_bytes), VERSION)


def first_answer(address: Address, frame: bytes) -> bytes:
    """The broker's response to a first request, once its topic exists; all later ones have the same length."""
    create = cases.request_frame(METADATA, 4, {"topics": [{"name": cases.TOPIC}], "allowAutoTopicCreation": True})

    answer = b""

    def exists() -> bool:
        _, body = codec.decode_response(processes.ask(address, create)[4:], METADATA, 4)
        return not body["topics"][0]["errorCode"]

    def leads() -> bool:
        """Whether the broker leads the topic, which it knows a moment before."""
        nonlocal answer
        answer = processes.ask(address, frame)
        _, body = codec.decode_response(answer[4:], PRODUCE, VERSION)
        errors = {partition["errorCode"] for topic in body["responses"] for partition in topic["partitionResponses"]}
        if errors - {0, NOT_LEADER_OR_FOLLOWER}:
            raise BenchError(f"the broker refuses the bench's batch: {body}")
        return errors == {0}

    cluster.wait_for("the bench's topic", exists)
    cluster.wait_for("its leader", leads)
    return answer


def run(
    wanted: list[Case], rounds: int, proxies: list[Proxy], upstream: Address, *, warm_up: int = _WARM_UP
) -> Iterator[Result]:
    """Run each case in turn: `rounds` rounds in which every proxy carries the same requests."""
    for case in wanted:
        frame = request(case.request_bytes)
        answer = first_answer(upstream, frame)
        us: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
        with ExitStack() as stack:
            loads = [
                stack.enter_context(Load(proxy.address, frame, answer, case.connections, case.depth))
                for proxy in proxies
            ]
            for load in loads:
                load.run(warm_up)
            warm_up = min(warm_up, case.requests // 4)
            turns = deque(zip(proxies, loads, strict=True))
            for _ in range(rounds):
                turns.rotate()  # so that no proxy is always the first
                for proxy, load in turns:
                    before = proxy.process.cpu_s()
                    load.run(case.requests)
                    us[proxy.name].append((proxy.process.cpu_s() - before) / case.requests * 1e6)
                    proxy.process.check()
        yield Result(case, us)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1, 1000), default=9, show_default=True, help="Rounds per case.")
@click.option("--detail", type=click.Choice(("headers", "topics")), default="headers", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
def main(rounds: int, detail: str, as_json: bool) -> None:
    """CPU time of kproxy, HAProxy and nginx per exchange before a real Kafka broker."""
    results = []
    try:
        with tempfile.TemporaryDirectory(prefix="kproxy-bench-") as name, ExitStack() as stack:
            folder = Path(name)
            upstream = stack.enter_context(broker(folder))
            proxies = [
                stack.enter_context(processes.haproxy(upstream, folder, None)),
                stack.enter_context(processes.nginx(upstream, folder, None)),
                stack.enter_context(processes.kproxy(upstream, folder, None, detail=detail)),
            ]
            for result in run(list(CASES), rounds, proxies, upstream):
                results.append(result)
                print(f"{result.case.title}: {result.ratio('kproxy'):.2f}", file=sys.stderr)
    except (BenchError, LoadError) as fault:
        raise click.ClickException(str(fault)) from fault
    if as_json:
        print(json.dumps([{"case": result.case.title, "us_per_exchange": result.us} for result in results], indent=2))
    else:
        show(results, Console(width=max(_MIN_WIDTH, Console().width)))


def show(results: list[Result], console: Console) -> None:
    proxies = list(results[0].us)
    table = Table(title="CPU time per exchange before a real broker, medians; ratio to HAProxy", title_justify="left")
    table.add_column("case", no_wrap=True)
    for name in proxies:
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            result.case.title, *(f"{result.median(name):.1f} us ({result.ratio(name):.2f})" for name in proxies)
        )
    console.print(table)


if __name__ == "__main__":
    main()
