"""Rounds that alternate between the proxies, and the ratios of the least.

The machine is noisy, so nothing is compared over minutes: in every round each proxy carries the same requests once, one
after the other. The result is the least CPU time of a proxy's rounds, divided by the least of HAProxy's: what happens
beside only ever adds, and not alike. With a neighbour on the core's other thread the same Python takes half as much
again, and the kernel's work, which is most of HAProxy's, hardly more. So the median of the rounds' ratios, told too,
says what the neighbours do: 1.24 to 1.56 in six runs of one case, where the least gave 1.11 to 1.25.

What each proxy does first in a case, its connections and a short run in which every answer is compared byte for byte,
is not timed.
"""

import os
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import cases, processes
from bench.load import Load
from bench.processes import BenchError, Proxy
from kproxy.protocol.schema import api_name

REFERENCE = "haproxy"

Progress = Callable[[str], None]  # what comes next


@dataclass(frozen=True)
class Result:
    """One case in one API version: seconds of CPU time of each proxy in each round."""

    case: cases.Case
    version: int
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
    """How many times `run` tells its progress."""
    return sum(len(case.versions) for case in wanted) * (rounds + 1) + 1


def run(wanted: Sequence[cases.Case], rounds: int, share: float, progress: Progress, detail: str = "headers") -> Run:
    """`share`: of a case's requests per round, for a quicker and noisier run. `detail`: of kproxy."""
    cores = sorted(os.sched_getaffinity(0))
    proxy_core, load_core = cores[:2] if len(cores) > 1 else (None, None)
    progress("kproxy --version")
    version_cpu_s = processes.version_cpu_s()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kproxy-bench-")))
        upstream = stack.enter_context(processes.broker(folder, load_core))
        starts = (processes.haproxy, processes.nginx, partial(processes.kproxy, detail=detail))
        proxies = [stack.enter_context(start(upstream, folder, proxy_core)) for start in starts]
        stack.enter_context(processes.pinned(load_core))
        results = [
            _measure(case, version, rounds, share, proxies, upstream, progress)
            for case in wanted
            for version in case.versions
        ]
        rss_bytes = {proxy.name: proxy.process.rss_bytes() for proxy in proxies}
    return Run(results, rss_bytes, version_cpu_s, proxy_core is not None)


def _measure(
    case: cases.Case,
    version: int,
    rounds: int,
    share: float,
    proxies: list[Proxy],
    upstream: processes.Address,
    progress: Progress,
) -> Result:
    request = cases.request(case, version)
    answer = cases.answer(case.api_key, version, upstream[1])
    requests = max(case.connections * case.depth, round(case.requests * share))
    name = f"{case.name} v{version}"
    kproxy = next(proxy for proxy in proxies if proxy.admin is not None)
    api = api_name(case.api_key)
    counted_before = kproxy.requests_counted(api)
    cpu_s: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
    with ExitStack() as stack:
        progress(f"{name}: first look")
        loads = [Load(proxy.address, request, answer, case.connections, case.depth) for proxy in proxies]
        for load in loads:
            stack.enter_context(load)
            load.run(requests // 10, compare=True)
        turns = deque(zip(proxies, loads, strict=True))
        for number in range(rounds):
            progress(f"{name}: round {number + 1} of {rounds}")
            turns.rotate()  # nobody is always the first
            for proxy, load in turns:
                before = proxy.process.cpu_s()
                load.run(requests)
                cpu_s[proxy.name].append(proxy.process.cpu_s() - before)
                proxy.process.check()
        sent = loads[proxies.index(kproxy)].sent
    counted = kproxy.requests_counted(api) - counted_before
    if counted != sent:
        raise BenchError(f"{name}: {sent} requests went through kproxy, and its metrics count {counted}")
    return Result(case, version, requests, requests * (len(request) + len(answer)), cpu_s)
