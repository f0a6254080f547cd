"""`python -m bench.spark`: what `kproxy spark ingest` costs per exchange, from captures of 1 GB to 10 GB.

A session of Spark has a price of its own, which a capture of next to nothing shows; above it an exchange must cost the
same however large the capture is. CPU time and memory are those of all processes, as long as they live: the driver, its
JVM, and Python's workers, of which Spark keeps no account.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, TemporaryFile

import click
import psutil
from rich.console import Console
from rich.table import Table

from bench.offline import KINDS, generate

KIND = KINDS[0]  # segments of an Ethernet's size: the most packets per exchange
START_EXCHANGES = 100  # of the capture that shows what starting costs
STEEPEST = 1.25  # what an exchange of a larger capture may cost, times that of the smallest
_LEAST_WIDTH = 120  # also where the output is no terminal
POLL_S = 0.2  # a process that ends takes at most so much of its CPU time with it


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    master: str
    capture_bytes: int
    exchanges: int
    cpu_s: float
    wall_s: float
    worker_bytes: int  # of Python's largest worker, without the pages of files that it shares
    cpu_us: float | None = None  # per exchange, above the start
    wall_us: float | None = None
    steepness: float | None = None  # cpu_us, times that of the smallest capture

    @property
    def passed(self) -> bool:
        return self.steepness is None or self.steepness <= STEEPEST


@dataclass
class _Processes:
    """What a process and its descendants have used, also those that are gone."""

    root: psutil.Process
    cpu_s: dict[tuple[int, float], float] = field(default_factory=dict)  # by pid and time of start
    worker_bytes: int = 0

    def look(self) -> None:
        for process in (self.root, *self._descendants()):
            try:
                with process.oneshot():
                    times, memory, name = process.cpu_times(), process.memory_info(), process.name()
                    self.cpu_s[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:  # it ended just now
                continue
            if name.startswith("python") and process != self.root:
                self.worker_bytes = max(self.worker_bytes, memory.rss - memory.shared)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return self.root.children(recursive=True)
        except psutil.Error:
            return []


def ingest(path: Path, exchanges: int, master: str, out: Path) -> Cost:
    """Run the command once. Its rows are counted, so that work left undone is not taken for speed."""
    command = [sys.executable, "-c", "from kproxy.cli import main; main()", "spark", "ingest", str(path)]
    with TemporaryFile("w+") as said:
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, "--out", str(out), "--master", master], stdout=subprocess.DEVNULL, stderr=said
        )
        used = _Processes(psutil.Process(process.pid))
        while process.poll() is None:
            used.look()
            time.sleep(POLL_S)
        wall_s = time.monotonic() - start
        if process.returncode:
            said.seek(0)
            raise click.ClickException(
                f"ingest on {master} ended with status {process.returncode}: {said.read().strip()[-1000:]}"
            )
    rows = json.loads((out / "_kproxy.json").read_text())["rows"]["exchanges"]
    if rows != exchanges:
        raise click.ClickException(f"ingest on {master} made {rows:,} rows of {exchanges:,} exchanges")
    rmtree(out)
    return Cost(master, path.stat().st_size, exchanges, sum(used.cpu_s.values()), wall_s, used.worker_bytes)


def run(sizes: list[float], masters: list[str], folder: Path) -> Iterator[Cost]:
    """Every size, from the smallest, on every master; a capture lives only as long as it is needed."""
    path = folder / "bench.pcap"
    starts: dict[str, Cost] = {}
    smallest: dict[str, float] = {}
    per_gb = 0.0
    for size in (0.0, *sorted(sizes)):
        exchanges = max(START_EXCHANGES, round(size * per_gb))
        with path.open("wb") as file:
            generate(KIND, file, exchanges)
        per_gb = per_gb or 1e9 * exchanges / path.stat().st_size
        for master in masters:
            cost = ingest(path, exchanges, master, folder / "tables")
            start = starts.setdefault(master, cost)
            if cost is not start:
                cpu_us = (cost.cpu_s - start.cpu_s) * 1e6 / exchanges
                steepness = cpu_us / smallest.setdefault(master, cpu_us)
                wall_us = (cost.wall_s - start.wall_s) * 1e6 / exchanges
                cost = replace(cost, cpu_us=cpu_us, wall_us=wall_us, steepness=steepness)
            yield cost
        path.unlink()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--gb", default="1", show_default=True, metavar="SIZE,...", help="Sizes of the captures.")
@click.option("--masters", default="local[1] local[2]", show_default=True, metavar="URL ...", help="Of Spark.")
@click.option("--dir", "place", type=click.Path(file_okay=False, exists=True), help="Where captures and tables go.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
def main(gb: str, masters: str, place: str | None, as_json: bool) -> None:
    """What `kproxy spark ingest` costs per exchange; status 1 if that grows with the capture, like --gb 1,3,10."""
    try:
        sizes = [float(size) for size in gb.split(",")]
    except ValueError as fault:
        raise click.BadParameter("sizes are numbers, like 1,3,10", param_hint="--gb") from fault
    costs = []
    with TemporaryDirectory(prefix="kproxy-bench-", dir=place) as folder:
        for cost in run(sizes, masters.split(), Path(folder)):
            costs.append(cost)
            print(f"{cost.master}, {cost.capture_bytes / 1e9:.1f} GB: {cost.wall_s:.0f} s", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
    else:
        show(costs, Console(width=max(_LEAST_WIDTH, Console().width)))
    sys.exit(0 if all(cost.passed for cost in costs) else 1)


def show(costs: list[Cost], console: Console) -> None:
    table = Table(
        title="`kproxy spark ingest`, every table but records; per exchange above what starting costs",
        title_justify="left",
    )
    for name in (
        "master",
        "capture",
        "exchanges",
        "CPU",
        "wall",
        "worker",
        "CPU/exchange",
        "wall/exchange",
        "times",
        "",
    ):
        table.add_column(name, justify="left" if name == "master" else "right", no_wrap=True)
    for cost in sorted(costs, key=lambda cost: (cost.master, cost.capture_bytes)):
        table.add_row(
            cost.master,
            "start" if cost.cpu_us is None else f"{cost.capture_bytes / 1e9:.1f} GB",
            f"{cost.exchanges:,}",
            f"{cost.cpu_s:,.1f} s",
            f"{cost.wall_s:,.1f} s",
            f"{cost.worker_bytes / 1e6:,.0f} MB",
            "" if cost.cpu_us is None else f"{cost.cpu_us:,.1f} µs",
            "" if cost.wall_us is None else f"{cost.wall_us:,.1f} µs",
            "" if cost.steepness is None else f"{cost.steepness:.2f}",
            "" if cost.steepness is None else "flat" if cost.passed else f"[red]above {STEEPEST}[/]",
        )
    console.print(table)


if __name__ == "__main__":
    main()
