"""Rounds that alternate between the proxies, and the ratios of the least.

The machine is noisy, so nothing is compared over minutes: in every round each proxy carries the same requests once, one
after the other. The result is the least CPU time of a proxy's rounds, divided by the least of HAProxy's: what happens
beside only ever adds, and not alike. With a neighbour on the core's other thread the same Python takes half as much
again, and the kernel's work, which is most of HAProxy's, hardly more. So the median of the rounds' ratios, told too,
says what the neighbours do: 1.24 to 1.56 in six runs of one case, where the least gave 1.11 to 1.25.

Two kinds of load. A paced one (Python) leaves the proxies idle most of the time: they wake for one or two sockets, and
what waking costs the kernel is in every request, alike for all proxies. A saturating one (C) has many sockets ready
whenever a proxy looks: then HAProxy costs a half to two thirds as much per request, so that ratios are higher. They say
what kproxy carries on a full core, the paced ones what it costs beside it.

What each proxy does first in a case, its connections and a short run in which every answer is compared byte for byte,
is not timed.
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
from kproxy.protocol.schema import api_name
from kproxy.proxy.relay.compiled import native

REFERENCE = "haproxy"

Progress = Callable[[str], None]  # what comes next


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
    """How many times `run` tells its progress."""
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
    """`share`: of a case's requests per round, for a quicker and noisier run. `load`: of LOADS.

    detail: of kproxy. policy: it decides by rules.
    """
    cores = sorted(os.sched_getaffinity(0))
    # Two ends that saturate a proxy take more than a core between them.
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
    """One case in one version; `binary`: the program of the saturating load, None for the paced one."""
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
            turns.rotate()  # nobody is always the first
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
