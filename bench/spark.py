"""`python -m bench.spark`: the cost of `kproxy spark ingest` per exchange, for captures of 1 GB to 10 GB, and per core.

A Spark session has a fixed cost, which a nearly empty capture shows; above it an exchange must cost the same in a
capture of any size. The session starts as on a prepared machine (`kproxy spark prepare`). `kproxy convert` reads the
same captures for comparison. CPU time and memory are those of all processes while they live: the driver, its JVM, and
the Python workers, which Spark does not account for. Shuffled bytes come from Spark's event log, bytes read from the
kernel's counts of the workers (without mapped files). `--captures 100,10000` measures the driver's memory instead, on
folders with as many small captures.
"""

import json
import os
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

from bench.offline import KINDS, environment, generate, measured

KIND = KINDS[0]  # segments of Ethernet's size: the most packets per exchange
START_EXCHANGES = 100  # in the capture that shows the start-up cost
MAX_STEEPNESS = 1.25  # cost of an exchange in a larger capture, relative to the smallest
# Limits for a large capture, of LARGE_BYTES (in a smaller one Spark's start dominates): packets per CPU second relative
# to `convert`, and the gain in wall time by a second core. Limits for every capture: bytes read and bytes shuffled,
# relative to the capture; and for many captures the driver's growth.
LARGE_BYTES = 9 * 10**9
MIN_OF_CONVERT, MIN_SPEEDUP = 0.5, 1.8
MAX_READ, MAX_SHUFFLED = 1.1, 0.01
MAX_DRIVER_GROWTH = 1.25
_KPROXY = [sys.executable, "-c", "from kproxy.cli import main; main()"]
_MIN_WIDTH = 165  # even if the output is no terminal
POLL_S = 0.2  # at most this much CPU time of an ended process is missed


@dataclass(frozen=True)
class Cost:
    """The cost of one run."""

    master: str
    capture_bytes: int
    exchanges: int
    cpu_s: float
    wall_s: float
    worker_bytes: int  # of the largest Python worker, without pages of files that it shares
    cpu_us: float | None = None  # per exchange, above the start
    wall_us: float | None = None
    steepness: float | None = None  # cpu_us relative to the smallest capture
    read_bytes: int = 0  # by the Python workers
    shuffle_bytes: int = 0
    of_convert: float | None = None  # exchanges per CPU second relative to `convert`, both with their start
    speedup: float | None = None  # of wall time above the start, relative to the first master
    driver_bytes: int = 0  # of the driver's Python process
    jvm_bytes: int = 0

    @property
    def faults(self) -> list[str]:
        """The figures that miss their limits."""
        is_large = self.capture_bytes >= LARGE_BYTES
        asked = (
            ("times", self.steepness is None or self.steepness <= MAX_STEEPNESS),
            ("of convert", not is_large or self.of_convert is None or self.of_convert >= MIN_OF_CONVERT),
            ("speedup", not is_large or self.speedup is None or self.speedup >= MIN_SPEEDUP),
            ("read", self.cpu_us is None or self.read_bytes <= MAX_READ * self.capture_bytes),
            ("shuffled", self.cpu_us is None or self.shuffle_bytes <= MAX_SHUFFLED * self.capture_bytes),
        )
        return [name for name, is_kept in asked if not is_kept]

    @property
    def passed(self) -> bool:
        return not self.faults


@dataclass
class _Processes:
    """The resources used by a process and its descendants, including ended ones."""

    root: psutil.Process
    cpu_s: dict[tuple[int, float], float] = field(default_factory=dict)  # by pid and start time
    read_bytes: dict[tuple[int, float], int] = field(default_factory=dict)  # of the Python workers
    worker_bytes: int = 0
    driver_bytes: int = 0
    jvm_bytes: int = 0

    def look(self) -> None:
        for process in (self.root, *self._descendants()):
            try:
                with process.oneshot():
                    times, memory, name = process.cpu_times(), process.memory_info(), process.name()
                    key = process.pid, process.create_time()
                    self.cpu_s[key] = times.user + times.system
                    if name.startswith("python") and process != self.root:
                        self.worker_bytes = max(self.worker_bytes, memory.rss - memory.shared)
                        self.read_bytes[key] = process.io_counters().read_chars
            except psutil.Error:  # it has just ended
                continue
            if process == self.root:
                self.driver_bytes = max(self.driver_bytes, memory.rss)
            elif name.startswith("java"):
                self.jvm_bytes = max(self.jvm_bytes, memory.rss)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return self.root.children(recursive=True)
        except psutil.Error:
            return []


def prepare(folder: str) -> None:
    """Prepare Spark's class archive in a folder, for all processes started from here."""
    os.environ["XDG_CACHE_HOME"] = folder
    subprocess.run([*_KPROXY, "spark", "prepare"], check=True, stdout=subprocess.DEVNULL)


def ingest(path: Path, exchanges: int, master: str, out: Path) -> Cost:
    """Run the command once. Its rows are counted, so that missing work does not look like speed."""
    events = out.with_name("events")
    events.mkdir()
    log = {"enabled": "true", "dir": events.as_uri(), "compress": "false", "rolling.enabled": "false"}
    conf = [word for name, value in log.items() for word in ("--conf", f"spark.eventLog.{name}={value}")]
    with TemporaryFile("w+") as errors:
        start = time.monotonic()
        process = subprocess.Popen(
            [*_KPROXY, "spark", "ingest", str(path), "--out", str(out), "--master", master, *conf],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment(out.with_name("bytecode")),
        )
        used = _Processes(psutil.Process(process.pid))
        while process.poll() is None:
            used.look()
            time.sleep(POLL_S)
        wall_s = time.monotonic() - start
        if process.returncode:
            errors.seek(0)
            raise click.ClickException(
                f"ingest on {master} ended with status {process.returncode}: {errors.read().strip()[-1000:]}"
            )
    rows = json.loads((out / "_kproxy.json").read_text())["rows"]["exchanges"]
    if rows != exchanges:
        raise click.ClickException(f"ingest on {master} made {rows:,} rows of {exchanges:,} exchanges")
    shuffled = sum(map(_shuffled, events.iterdir()))
    rmtree(out)
    rmtree(events)
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    return Cost(
        master,
        size,
        exchanges,
        sum(used.cpu_s.values()),
        wall_s,
        used.worker_bytes,
        read_bytes=sum(used.read_bytes.values()),
        shuffle_bytes=shuffled,
        driver_bytes=used.driver_bytes,
        jvm_bytes=used.jvm_bytes,
    )


def _shuffled(log: Path) -> int:
    """The bytes that tasks wrote for other tasks, by Spark's event log."""
    found = 0
    with log.open() as lines:
        for line in lines:
            if '"SparkListenerTaskEnd"' in line:
                metrics = json.loads(line).get("Task Metrics") or {}
                found += metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
    return found


def converted(path: Path, out: Path) -> float:
    """The CPU seconds of `kproxy convert`."""
    command = [*_KPROXY, "convert", "--quiet", "--processes", "1", "--out", str(out), str(path)]
    cpu_s, _ = measured(command, out.with_name("bytecode"))
    rmtree(out)
    return cpu_s


def run(sizes: list[float], masters: list[str], folder: Path, *, connections: int = KIND.connections) -> Iterator[Cost]:
    """Run every size, from the smallest, on every master; a capture exists only while it is needed."""
    path = folder / "bench.pcap"
    kind = replace(KIND, connections=connections)
    starts: dict[str, Cost] = {}
    smallest: dict[str, float] = {}
    per_gb = 0.0
    for size in (0.0, *sorted(sizes)):
        exchanges = max(START_EXCHANGES, round(size * per_gb))
        with path.open("wb") as file:
            generate(kind, file, exchanges)
        per_gb = per_gb or 1e9 * exchanges / path.stat().st_size
        if not size:
            ingest(path, exchanges, masters[0], folder / "tables")  # not counted: it loads Spark from the disk
        convert_s = converted(path, folder / "converted") if size else 0.0
        first_us = 0.0
        for master in masters:
            cost = ingest(path, exchanges, master, folder / "tables")
            start = starts.setdefault(master, cost)
            if cost is not start:
                cpu_us = (cost.cpu_s - start.cpu_s) * 1e6 / exchanges
                steepness = cpu_us / smallest.setdefault(master, cpu_us)
                wall_us = (cost.wall_s - start.wall_s) * 1e6 / exchanges
                speedup = first_us / wall_us if first_us else None
                first_us = first_us or wall_us
                cost = replace(
                    cost,
                    cpu_us=cpu_us,
                    wall_us=wall_us,
                    steepness=steepness,
                    read_bytes=cost.read_bytes - start.read_bytes,
                    of_convert=convert_s / cost.cpu_s,
                    speedup=speedup,
                )
            yield cost
        path.unlink()


def many(counts: list[int], master: str, folder: Path) -> Iterator[Cost]:
    """Folders with as many small captures: links to one."""
    smallest = folder / "smallest.pcap"
    with smallest.open("wb") as file:
        generate(KIND, file, 1)
    for count in sorted(counts):
        captures = folder / "captures"
        captures.mkdir()
        for number in range(count):
            (captures / f"{number}.pcap").symlink_to(smallest)
        yield ingest(captures, count, master, folder / "tables")
        rmtree(captures)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--gb", default="1", show_default=True, metavar="SIZE,...", help="Sizes of the captures.")
@click.option("--masters", default="local[1] local[2]", show_default=True, metavar="URL ...", help="Spark masters.")
@click.option(
    "--connections",
    default=KIND.connections,
    show_default=True,
    help="Connections of each capture; 1: a single large one.",
)
@click.option(
    "--captures", metavar="COUNT,...", help="Measure the driver's memory with that many small captures instead."
)
@click.option("--dir", "place", type=click.Path(file_okay=False, exists=True), help="Folder for captures and tables.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
def main(gb: str, masters: str, connections: int, captures: str | None, place: str | None, as_json: bool) -> None:
    """The cost of `kproxy spark ingest` per exchange, compared with `kproxy convert`; status 1 if a limit is exceeded.

    One limit: an exchange costs the same in a large capture: --gb 1,3,10.
    """
    try:
        sizes = [float(size) for size in gb.split(",")]
        counts = [int(count) for count in captures.split(",")] if captures else []
    except ValueError as fault:
        raise click.BadParameter("numbers are needed, like 1,3,10", param_hint="--gb, --captures") from fault
    costs = []
    with TemporaryDirectory(prefix="kproxy-bench-", dir=place) as folder:
        prepare(folder)
        for cost in (
            many(counts, masters.split()[-1], Path(folder))
            if counts
            else run(sizes, masters.split(), Path(folder), connections=connections)
        ):
            costs.append(cost)
            print(f"{cost.master}, {cost.capture_bytes / 1e9:.1f} GB: {cost.wall_s:.0f} s", file=sys.stderr)
    console = Console(width=max(_MIN_WIDTH, Console().width))
    if as_json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
    elif counts:
        show_many(costs, console)
    else:
        show(costs, console)
    grown = bool(counts) and costs[-1].driver_bytes > MAX_DRIVER_GROWTH * costs[0].driver_bytes
    sys.exit(1 if grown or not all(cost.passed for cost in costs) else 0)


def show(costs: list[Cost], console: Console) -> None:
    table = Table(
        title="`kproxy spark ingest`, every table but records; per exchange above what starting costs",
        title_justify="left",
    )
    names = ("capture", "exchanges", "CPU", "wall", "worker", "CPU each", "wall each", "times", "of convert", "speedup")
    for name in ("master", *names, "read", "shuffled", ""):
        table.add_column(name, justify="left" if name == "master" else "right", no_wrap=True)
    for cost in sorted(costs, key=lambda cost: (cost.master, cost.capture_bytes)):
        is_start = cost.cpu_us is None
        table.add_row(
            cost.master,
            "start" if is_start else f"{cost.capture_bytes / 1e9:.1f} GB",
            f"{cost.exchanges:,}",
            f"{cost.cpu_s:,.1f} s",
            f"{cost.wall_s:,.1f} s",
            f"{cost.worker_bytes / 1e6:,.0f} MB",
            "" if cost.cpu_us is None else f"{cost.cpu_us:,.1f} µs",
            "" if cost.wall_us is None else f"{cost.wall_us:,.1f} µs",
            _ratio(cost.steepness),
            _ratio(cost.of_convert),
            _ratio(cost.speedup),
            "" if is_start else _ratio(cost.read_bytes / cost.capture_bytes),
            "" if is_start else f"{cost.shuffle_bytes / cost.capture_bytes:.1%}",
            "" if is_start else "kept" if cost.passed else f"[red]not kept: {', '.join(cost.faults)}[/]",
        )
    console.print(table)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def show_many(costs: list[Cost], console: Console) -> None:
    table = Table(title="`kproxy spark ingest` of many small captures: memory at most", title_justify="left")
    for name in ("captures", "CPU", "wall", "driver", "its JVM", "a worker"):
        table.add_column(name, justify="right", no_wrap=True)
    for cost in costs:
        memory = (f"{size / 1e6:,.0f} MB" for size in (cost.driver_bytes, cost.jvm_bytes, cost.worker_bytes))
        table.add_row(f"{cost.exchanges:,}", f"{cost.cpu_s:,.1f} s", f"{cost.wall_s:,.1f} s", *memory)
    console.print(table)


if __name__ == "__main__":
    main()
