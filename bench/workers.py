"""`python -m bench.workers`: the cost of a response with several workers, compared with one process, and the balance of
the workers.

On a machine with spare cores the throughput shows how much more N workers carry. Where load and broker share the cores
with kproxy it cannot; CPU time per response does: workers that cost no more per response than one process carry N times
as much on N cores. Both are reported.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click

from bench import cases, processes
from bench.load import SaturatingLoad

_WORKER_CPU = re.compile(r"^kproxy_worker_cpu_seconds_total\S* (\S+)", re.MULTILINE)
MIN_RATIO = 0.9  # of one process's responses per CPU second: 1.8 times as much on twice the cores


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all processes that it forked."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return time.clock_gettime((~pid << 3) | 2) + sum(cpu_of(int(child)) for child in children)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--workers", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=9, show_default=True)
@click.option("--cases", "names", metavar="NAME,...", default="small,pipelined,produce", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
def main(workers: int, rounds: int, names: str, as_json: bool) -> None:
    """Responses per CPU second and per second, of one process and of several workers, under a saturating load."""
    found = []
    for case in [case for case in cases.CASES if case.name in names.split(",")]:
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            folder = Path(place)
            binary = processes.saturate(folder)
            upstream = stack.enter_context(processes.saturating_broker(binary, folder, None))
            version = case.versions[0]
            frame = folder / "request"
            frame.write_bytes(cases.request(case, version))
            loads = {}
            for count in (1, workers):
                below = folder / str(count)
                below.mkdir()
                proxy = stack.enter_context(processes.kproxy(upstream, below, None, workers=count))
                load = SaturatingLoad(binary, proxy.address, frame, case.connections, case.depth)
                loads[count] = proxy, stack.enter_context(load)
                load.run(case.requests // 10)
            per_cpu_s: dict[int, list[float]] = {1: [], workers: []}
            per_s: dict[int, list[float]] = {1: [], workers: []}
            for number in range(rounds):
                for count in sorted(loads, reverse=bool(number % 2)):
                    proxy, load = loads[count]
                    cpu_s, start = cpu_of(proxy.process.pid), time.monotonic()
                    load.run(case.requests)
                    per_s[count].append(case.requests / (time.monotonic() - start))
                    per_cpu_s[count].append(case.requests / (cpu_of(proxy.process.pid) - cpu_s))
            text = processes.metrics(loads[workers][0])
            shares = [
                float(cpu) for cpu in re.findall(r"^kproxy_worker_cpu_seconds_total\S* (\S+)", text, re.MULTILINE)
            ]
            found.append(
                {
                    "case": f"{case.name} v{version}",
                    "answers_per_cpu_s": {count: statistics.median(values) for count, values in per_cpu_s.items()},
                    "answers_per_s": {count: statistics.median(values) for count, values in per_s.items()},
                    "per_cpu_s_beside_one": statistics.median(
                        a / b for a, b in zip(per_cpu_s[workers], per_cpu_s[1], strict=True)
                    ),
                    "busiest_worker_of_mean": max(shares) / statistics.mean(shares),
                }
            )
    if as_json:
        print(json.dumps(found, indent=2))
    for each in () if as_json else found:
        print(
            f"{each['case']:14} answers per CPU s: 1 process {each['answers_per_cpu_s'][1]:8,.0f}, {workers} workers "
            f"{each['answers_per_cpu_s'][workers]:8,.0f} ({each['per_cpu_s_beside_one']:.2f}); per s: "
            f"{each['answers_per_s'][1]:8,.0f}, {each['answers_per_s'][workers]:8,.0f}; "
            f"busiest worker {each['busiest_worker_of_mean']:.2f} of the mean"
        )
    sys.exit(0 if all(each["per_cpu_s_beside_one"] >= MIN_RATIO for each in found) else 1)


if __name__ == "__main__":
    main()
