"""Rounds that alternate between the proxies, and the ratios of their minimum CPU times.

The machine is noisy, so nothing is compared over minutes: in every round each proxy carries the same requests once, one
after the other. The result is the minimum CPU time of a proxy's rounds divided by the minimum of HAProxy's: other load
only adds time, and not equally. With a neighbour on the core's other hyperthread the same Python takes 1.5 times as
long, while the kernel's work, which is most of HAProxy's, hardly changes. The median of the rounds' ratios, also
reported, therefore shows the effect of neighbours: 1.24 to 1.56 in six runs of one case, where the minimum gave 1.11 to
1.25.

There are two kinds of load. The paced one (Python) leaves the proxies idle most of the time: they wake for one or two
sockets, and the kernel's cost of waking is in every request, equally for all proxies. The saturating one (C) has many
sockets ready at every poll: HAProxy then costs half to two thirds as much per request, so ratios are higher. Those show
what kproxy carries on a full core; the paced ones show its cost on a core with other work.

The first actions of each proxy in a case, its connections and a short run that compares every response byte for byte,
are not timed.
"""

import os
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import cases, processes
from bench.load import Load, SaturatingLoad
from bench.processes import BenchError, Proxy
from kproxy.core import native
from kproxy.protocol.schema import api_name

REFERENCE = "haproxy"

Progress = Callable[[str], None]  # the next step


@dataclass(frozen=True)
class Result:
    """One case in one API version: seconds of CPU time of each proxy in each round."""

    case: cases.Case
    version: int
    load: str
    requests: int  # per round
    round_bytes: int
    cpu_s: dict[str, list[float]]

    def ratios(self, proxy: str) -> list[float]:
        return [own / reference for own, reference in zip(self.cpu_s[proxy], self.cpu_s[REFERENCE], strict=True)]

    def median(self, proxy: str) -> float:
        return statistics.median(self.ratios(proxy))

    def ratio(self, proxy: str) -> float:
        return min(self.cpu_s[proxy]) / min(self.cpu_s[REFERENCE])

    def us_per_request(self, proxy: str) -> float:
        return min(self.cpu_s[proxy]) / self.requests * 1e6

    def s_per_gb(self, proxy: str) -> float:
        return min(self.cpu_s[proxy]) / self.round_bytes * 1e9

    @property
    def passed(self) -> bool:
        return self.ratio("kproxy") <= self.case.limit


@dataclass(frozen=True)
class Run:
    results: list[Result]
    rss_bytes: dict[str, int]
    version_cpu_s: float
    pinned: bool


def steps(wanted: Sequence[cases.Case], rounds: int) -> int:
    """How many times `run` reports progress."""
    return sum(len(case.versions) for case in wanted) * (rounds + 1) + 1


def run(
    wanted: Sequence[cases.Case],
    rounds: int,
    share: float,
    progress: Progress,
    detail: str = "headers",
    load: str = cases.PACED,
    *,
    policy: bool = False,
) -> Run:
    """share: the fraction of a case's requests per round, for a quicker and noisier run. load: one of LOADS.

    detail: of kproxy. policy: kproxy decides by rules.
    """
    cores = sorted(os.sched_getaffinity(0))
    # Two ends that saturate a proxy use more than one core together.
    is_pinned = len(cores) > (1 if load == cases.PACED else 2)
    proxy_core, load_core = cores[:2] if is_pinned else (None, None)
    progress("kproxy --version")
    version_cpu_s = processes.version_cpu_s()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        binary = None
        if load == cases.PACED:
            upstream = stack.enter_context(processes.broker(folder, load_core))
        else:
            binary, load_core = processes.saturate(folder), None
            upstream = stack.enter_context(processes.saturating_broker(binary, folder, None))
        starts = (processes.haproxy, processes.nginx, partial(processes.kproxy, detail=detail, policy=policy))
        proxies = [stack.enter_context(start(upstream, folder, proxy_core)) for start in starts]
        stack.enter_context(processes.pinned(load_core))
        results = [
            _measure(
                cases.limited(case, "topics" if policy else detail, load, native=native() is not None),
                version,
                rounds,
                share,
                proxies,
                upstream,
                progress,
                binary,
            )
            for case in wanted
            for version in case.versions
        ]
        rss_bytes = {proxy.name: proxy.process.rss_bytes() for proxy in proxies}
    return Run(results, rss_bytes, version_cpu_s, len(cores) > 1)


def _measure(
    case: cases.Case,
    version: int,
    rounds: int,
    share: float,
    proxies: list[Proxy],
    upstream: processes.Address,
    progress: Progress,
    binary: Path | None,
) -> Result:
    """One case in one version; binary: the program of the saturating load, None for the paced one."""
    request = cases.request(case, version)
    answer = cases.answer(case.api_key, version, upstream[1])
    requests = max(case.connections * case.depth, round(case.requests * share))
    name = f"{case.name} v{version}"
    kproxy = next(proxy for proxy in proxies if proxy.admin is not None)
    api = api_name(case.api_key)
    counted_before = kproxy.requests_counted(api)
    cpu_s: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
    sent = 0
    with ExitStack() as stack:
        progress(f"{name}: first look")
        loads: list[Load | SaturatingLoad] = []
        for proxy in proxies:
            look = Load(proxy.address, request, answer, case.connections, case.depth)
            with look if binary else nullcontext():
                look.run(requests // 10, compare=True)
            if binary is None:
                loads.append(stack.enter_context(look))
                continue
            sent += look.sent if proxy is kproxy else 0
            frame = binary.with_name("request")
            frame.write_bytes(request)
            load = SaturatingLoad(binary, proxy.address, frame, case.connections, case.depth)
            loads.append(stack.enter_context(load))
            load.run(requests // 10)
        turns = deque(zip(proxies, loads, strict=True))
        for number in range(rounds):
            progress(f"{name}: round {number + 1} of {rounds}")
            turns.rotate()  # so that no proxy is always the first
            for proxy, each in turns:
                before = proxy.process.cpu_s()
                each.run(requests)
                cpu_s[proxy.name].append(proxy.process.cpu_s() - before)
                proxy.process.check()
        sent += loads[proxies.index(kproxy)].sent
    counted = kproxy.requests_counted(api) - counted_before
    if counted != sent:
        raise BenchError(f"{name}: {sent} requests went through kproxy, and its metrics count {counted}")
    kind = cases.SATURATING if binary else cases.PACED
    return Result(case, version, kind, requests, requests * (len(request) + len(answer)), cpu_s)
