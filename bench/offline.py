"""`python -m bench.offline`: CPU time and memory of `kproxy convert` and tshark on the same generated captures.

There are four kinds of capture: segments of an Ethernet MTU; of 64 KB, as captured on a host with segmentation offload;
of an MTU, where of each thousand packets one is lost, one is late and one is duplicated; and of a single connection.
Half of the exchanges are Produce v9 and half Fetch v12, whose headers tshark dissects too. Both programs run in turns,
so that other load affects both; all figures are those of the processes themselves.

The cost of a capture with one exchange is the start-up: it is shown, and not counted in the rates. It is about 0.4 s
and varies by 0.05, so it is subtracted round by round, and the median of the differences counts. If kproxy needs little
more than that for a whole capture, it gets one that is four times as long, of 1.8 and 10 GB: tshark reads the first
packets of it, as many as it has memory for.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from struct import Struct, pack
from tempfile import TemporaryDirectory
from typing import BinaryIO

import click
from rich.console import Console
from rich.table import Table

from kproxy.protocol import codec, records

PORT = 9092
_TIMESTAMP = 1_700_000_000_000
_FIELDS = ("frame.time_epoch", "tcp.stream", "kafka.correlation_id", "kafka.api_key", "kafka.api_version", "kafka.len")
_RECORD = Struct("<IIII")


@dataclass(frozen=True)
class Kind:
    """A kind of capture, and its limits: kproxy's packets per CPU second over tshark's."""

    name: str
    title: str
    segment_bytes: int
    value_bytes: int
    exchanges: int
    limits: tuple[float, float]  # with exchanges and connections alone, and with all tables
    dirty: bool = False  # of each thousand packets one is lost, one is late, and one is duplicated
    connections: int = 48
    longer: int = 1  # factor of kproxy's packets over tshark's, which keeps everything that it has read in memory


KINDS = (
    Kind("mtu", "segments of 1448 bytes", 1448, 2500, 150_000, (20.0, 12.0), longer=4),
    Kind("offload", "segments of 65000 bytes", 65_000, 1_000_000, 2_500, (25.0, 6.0), longer=4),
    Kind("dirty", "1448 bytes, 0.1 % lost", 1448, 2500, 150_000, (12.0, 8.0), dirty=True),
    Kind("one", "one connection, 1448 bytes", 1448, 2500, 150_000, (12.0, 6.0), connections=1),
)
_MIN_WIDTH = 120  # even if the output is no terminal
DETAILS = ("headers", "batches")  # without the tables of bodies, and with all tables but records


@dataclass(frozen=True)
class Cost:
    """The cost of a capture for one program: medians of the rounds."""

    program: str
    cpu_s: float
    startup_s: float  # part of cpu_s
    rss_bytes: int  # the minimum
    packets_per_s: float  # per second of CPU time after start-up
    bytes_per_s: float
    ratio: float  # to tshark's packets per second
    limit: float | None

    @property
    def passed(self) -> bool:
        return self.limit is None or self.ratio >= self.limit


class Connection:
    """The packets of one connection; its frames come from the codec, its TCP stream is complete and in order."""

    def __init__(self, number: int, segment_bytes: int) -> None:
        client, broker = bytes((10, 0, number >> 8, number & 255)), bytes((10, 1, 0, 1))
        self._ends = ((client, broker, 40_000 + number, PORT), (broker, client, PORT, 40_000 + number))
        self._next = [number * 1_000_003 & 0xFFFFFFFF, number * 2_000_003 & 0xFFFFFFFF]
        self._most = segment_bytes

    def shake(self) -> Iterator[bytes]:
        for side, flags in ((0, 0x02), (1, 0x12), (0, 0x10)):
            yield self._packet(side, b"", flags)
            self._next[side] += flags >> 1 & 1

    def send(self, side: int, data: bytes) -> Iterator[bytes]:
        """The segments of some bytes, with an acknowledgement after every second one."""
        for count, start in enumerate(range(0, len(data), self._most), 1):
            part = data[start : start + self._most]
            yield self._packet(side, part, 0x18)
            self._next[side] += len(part)
            if count % 2 == 0:
                yield self._packet(1 - side, b"", 0x10)

    def _packet(self, side: int, payload: bytes, flags: int) -> bytes:
        source, target, source_port, target_port = self._ends[side]
        seq, ack = self._next[side] & 0xFFFFFFFF, self._next[1 - side] & 0xFFFFFFFF
        tcp = pack(">HHIIHHHH", source_port, target_port, seq, ack, 0x5000 | flags, 0xFFFF, 0, 0)
        ip = pack(">BBHHHBBH", 0x45, 0, 40 + len(payload), seq & 0xFFFF, 0x4000, 64, 6, 0) + source + target
        return bytes(12) + b"\x08\x00" + ip + tcp + payload


def generate(kind: Kind, file: BinaryIO, exchanges: int) -> int:
    """Write a capture; returns the number of packets. Without exchanges it is one handshake."""
    file.write(pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262_144, 1))
    connections = [Connection(number, kind.segment_bytes) for number in range(kind.connections if exchanges else 1)]
    packets = 0
    micros = _TIMESTAMP * 1000

    dice = Random(7)
    late: list[bytes] = []

    def record(packet: bytes) -> None:
        nonlocal packets, micros
        micros += 3
        packets += 1
        file.write(_RECORD.pack(micros // 1_000_000, micros % 1_000_000, len(packet), len(packet)) + packet)

    def write(parts: Iterator[bytes]) -> None:
        for packet in parts:
            number = dice.randrange(1000) if kind.dirty else -1
            if number == 0:  # lost
                continue
            if number == 1:
                late.append(packet)
                continue
            record(packet)
            if number == 2:
                record(packet)
            while late:
                record(late.pop())

    for connection in connections:
        write(connection.shake())
    frames = _Frames(kind.value_bytes)
    for number in range(exchanges):
        connection = connections[number % kind.connections]
        asked, answered = frames.exchange(number // kind.connections)
        write(connection.send(0, asked))
        write(connection.send(1, answered))
    return packets


class _Frames:
    """The frames of both APIs, encoded once; only the correlation id differs."""

    def __init__(self, value_bytes: int) -> None:
        value = bytes(i * i * 31 >> 3 & 0xFF for i in range(value_bytes // 5))
        batch = records.write_batch([records.Record(offset, _TIMESTAMP, None, value) for offset in range(5)])
        partition = {"index": 0, "records": batch}
        asked = {"acks": -1, "timeoutMs": 30_000, "topicData": [{"name": "bench", "partitionData": [partition]}]}
        answered = {"responses": [{"name": "bench", "partitionResponses": [{"index": 0, "baseOffset": 7}]}]}
        fetch = {"maxWaitMs": 500, "topics": [{"topic": "bench", "partitions": [{"partition": 0, "fetchOffset": 7}]}]}
        fetched = {"partitionIndex": 0, "highWatermark": 12, "lastStableOffset": 12, "records": batch}
        self._frames = [
            (_request(0, 9, asked), _answer(0, 9, answered)),
            (_request(1, 12, fetch), _answer(1, 12, {"responses": [{"topic": "bench", "partitions": [fetched]}]})),
        ]

    def exchange(self, number: int) -> tuple[bytes, bytes]:
        asked, answered = self._frames[number % 2]
        correlation_id = number.to_bytes(4)
        return asked[:8] + correlation_id + asked[12:], answered[:4] + correlation_id + answered[8:]


def _request(key: int, version: int, body: dict[str, object]) -> bytes:
    header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": 0, "clientId": "load"}
    frame = codec.encode_request(header, body)
    return len(frame).to_bytes(4) + frame


def _answer(key: int, version: int, body: dict[str, object]) -> bytes:
    frame = codec.encode_response(key, version, {"correlationId": 0}, body)
    return len(frame).to_bytes(4) + frame


def environment(bytecode: Path) -> dict[str, str]:
    """The environment of this process, for Python programs that keep their bytecode in a folder.

    With PYTHONDONTWRITEBYTECODE each start would compile every module: 0.2 s of CPU time that an installed kproxy does
    not use.
    """
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**ours, "PYTHONPYCACHEPREFIX": str(bytecode)}


def measured(command: list[str], bytecode: Path) -> tuple[float, int]:
    """(CPU seconds, peak memory in bytes) of a command and its children."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment(bytecode))
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise click.ClickException(f"{' '.join(command)} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def _warm(path: Path) -> None:
    """Read a file into the page cache: neither disks nor the kernel's cache are compared."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while file.readinto(buffer):
            pass


def run(kind: Kind, folder: Path, scale: float, rounds: int) -> list[Cost]:
    """Run tshark, then kproxy at each detail, on a new capture."""
    tshark = shutil.which("tshark")
    if tshark is None:
        raise click.ClickException("tshark is not installed: apt install tshark, or ./dev bench offline, which does")
    path, smallest = folder / f"{kind.name}.pcap", folder / f"{kind.name}-smallest.pcap"
    with path.open("wb") as file:
        packets = generate(kind, file, int(kind.exchanges * scale) * kind.longer)
    with smallest.open("wb") as file:  # one exchange: the cost of starting
        generate(kind, file, 1)
    fields = [word for field in _FIELDS for word in ("-e", field)]
    first = packets // kind.longer
    reading = [tshark, "-d", f"tcp.port=={PORT},kafka", "-T", "fields", *fields, "-c", str(first), "-r"]
    kproxy = [sys.executable, "-c", "from kproxy.cli import main; main()"]
    converting = [*kproxy, "convert", "--quiet", "--append", "--processes", "1"]
    programs: list[tuple[str, float | None, int, list[str]]] = [("tshark", None, first, reading)]
    for detail, limit in zip(DETAILS, kind.limits, strict=True):
        command = [*converting, "--detail", detail, "--out", str(folder / detail)]
        programs.append((f"kproxy, {detail}", limit, packets, command))
    bytecode = folder / "bytecode"
    for *_, command in programs:  # not counted: this run writes the bytecode
        measured([*command, str(smallest)], bytecode)
    _warm(path)
    took: dict[str, list[tuple[float, float, int]]] = {program: [] for program, *_ in programs}
    for _ in range(rounds):  # in turns, so that other load affects all programs
        for program, *_, command in programs:
            startup_s = measured([*command, str(smallest)], bytecode)[0]
            cpu_s, rss_bytes = measured([*command, str(path)], bytecode)
            took[program].append((cpu_s, startup_s, rss_bytes))
    costs: list[Cost] = []
    for program, limit, count, _command in programs:
        cpu_s, startup_s, rss_bytes = zip(*took[program], strict=True)
        reading_s = max(median(whole - start for whole, start in zip(cpu_s, startup_s, strict=True)), 0.001)
        rate = count / reading_s
        bytes_per_s = path.stat().st_size * count / packets / reading_s
        base = costs[0].packets_per_s if costs else rate
        costs.append(
            Cost(program, median(cpu_s), median(startup_s), min(rss_bytes), rate, bytes_per_s, rate / base, limit)
        )
    path.unlink()
    return costs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--scale", default=1.0, show_default=True, help="Scale of the captures' sizes; 1: 450 MB and 10 GB.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of each program; the median counts.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of the table.")
def main(scale: float, rounds: int, as_json: bool) -> None:
    """CPU time and memory of `kproxy convert` and tshark on the same captures."""
    results = {}
    with TemporaryDirectory(prefix="kproxy-bench-") as folder:
        for kind in KINDS:
            results[kind.name] = run(kind, Path(folder), scale, rounds)
    if as_json:
        print(json.dumps({name: [asdict(cost) for cost in costs] for name, costs in results.items()}, indent=2))
    else:
        show(results, Console(width=max(_MIN_WIDTH, Console().width)))
    sys.exit(0 if all(cost.passed for costs in results.values() for cost in costs) else 1)


def show(results: dict[str, list[Cost]], console: Console) -> None:
    table = Table(
        title="Packets per CPU second after start-up; ratios to tshark on the same capture", title_justify="left"
    )
    for name in ("capture", "program"):
        table.add_column(name, no_wrap=True)
    for name in ("packets/s", "MB/s", "CPU s", "start-up", "memory", "ratio", "limit", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for kind in KINDS:
        for cost in results[kind.name]:
            table.add_row(
                kind.title,
                cost.program,
                f"{cost.packets_per_s:,.0f}",
                f"{cost.bytes_per_s / 1e6:,.0f}",
                f"{cost.cpu_s:.2f}",
                f"{cost.startup_s:.2f}",
                f"{cost.rss_bytes / 1e6:,.0f} MB",
                f"{cost.ratio:.1f}",
                "" if cost.limit is None else f"{cost.limit:.0f}",
                "" if cost.limit is None else "kept" if cost.passed else "[red]not kept[/]",
            )
    console.print(table)


if __name__ == "__main__":
    main()
