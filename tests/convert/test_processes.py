"""`kproxy convert` turns captures into tables, as a user runs it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.convert import machine
from kproxy.convert import processes as conversion
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.convert.workers import Workers
from kproxy.errors import KproxyError
from kproxy.tables import writer
from kproxy.tables.dataset import refuse_unfinished
from kproxy.tables.records import chosen
from kproxy.tables.schema import TABLES
from tests import captures

KPROXY = [sys.executable, "-c", "from kproxy.cli import main; main()"]


def rows(out, table, source):
    return pq.read_table(out / table / f"{source}.parquet").to_pylist()


def test_a_capture_becomes_tables_with_exactly_its_exchanges(tmp_path):
    names = ("k41_sasl_plain", "k0102_sasl_plain")
    result = CliRunner().invoke(
        cli,
        ["convert", *(str(captures.capture(name)) for name in names), "--out", str(tmp_path)],
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    assert "Complete: every byte" in result.stdout
    for name in names:
        exchanges = rows(tmp_path, "exchanges", f"{name}.pcap")
        asked = [row for row in exchanges if row["number"] is not None]
        assert captures.counted(map(captures.top_level, asked)) == captures.counted(
            map(captures.line, captures.expected(name))
        )
        assert [row["time"] for row in exchanges] == sorted(row["time"] for row in exchanges)
        for table in TABLES.values():
            assert pq.read_schema(tmp_path / table.name / f"{name}.pcap.parquet").equals(table.schema)
        connections = {row["connection"]: row for row in rows(tmp_path, "connections", f"{name}.pcap")}
        assert {row["connection"] for row in exchanges} <= connections.keys()
        for connection, row in connections.items():
            assert row["requests"] == sum(exchange["connection"] == connection for exchange in asked)
            assert row["end_ns"] >= row["start_ns"]
            assert row["tls"] == "plain"
    assert {row["sasl_mechanism"] for row in connections.values()} == {"PLAIN"}
    quality = {row["kind"]: row for row in rows(tmp_path, "quality", f"{name}.pcap")}
    assert quality["raw_sasl"]["count"] == sum(row["sasl_tokens"] for row in connections.values()) == 70
    manifest = json.loads((tmp_path / "_kproxy.json").read_text())
    assert manifest["rows"]["exchanges"] == 781 + 551
    assert str(captures.folder("captures")) not in json.dumps(manifest)


@pytest.mark.parametrize("detail", ("headers", "batches"))
def test_a_broker_is_identified_by_its_advertised_address(tmp_path, detail):
    """Any response on any connection may name it, later ones too; none names the controllers' ports."""
    names = ("k41_java_cluster", "k0822_python147", "k41_ipv6")  # in the last capture no broker knows the addresses
    convert([captures.capture(name) for name in names], tmp_path, Settings(detail=detail))
    brokers = {9091: 1, 9092: 2, 9093: 3}
    for name in names:
        for table in ("exchanges", "connections"):
            found = {(row["broker_port"], row["broker_id"]) for row in rows(tmp_path, table, f"{name}.pcap")}
            want = {(port, brokers.get(port) if name != "k41_ipv6" else None) for port, _ in found}
            assert found == want and len(found) >= (1 if name == "k41_ipv6" else 3)


@pytest.mark.parametrize(("memory", "started"), ((1 << 40, 8), (700 << 20, 2), (300 << 20, 0), (0, 0)))
def test_cores_and_memory_limit_the_number_of_processes(tmp_path, monkeypatch, memory, started):
    """For example in a container on a large machine; work for one process starts no second one."""
    shares = []

    class Started(Exception):
        pass

    def start(self, job, function, work):
        shares.extend(work)
        raise Started

    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "memory_bytes", lambda: memory)
    monkeypatch.setattr(conversion, "SMALL_BYTES", 0)
    monkeypatch.setattr(Workers, "each", start)
    with pytest.raises(Started) if started else nullcontext():
        convert([captures.capture("k41_BASE")], tmp_path)
    assert len(shares) == started


@pytest.mark.ring2
def test_the_number_of_processes_changes_nothing(tmp_path):
    path = captures.capture("k41_java_cluster")
    counts = (1, 2, 17)  # 17 is one more than there are shards
    folders = [tmp_path / str(processes) for processes in counts]
    for processes, folder in zip(counts, folders, strict=True):
        convert([path], folder, processes=processes)
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert files[0] == files[1] == files[2]
    assert len(files[0]) == len(TABLES) + 1
    for name in files[0]:
        assert len({(folder / name).read_bytes() for folder in folders}) == 1


def test_small_captures_are_submitted_before_the_first_one_is_awaited(tmp_path, monkeypatch):
    """Otherwise the processes would read one after the other."""
    steps = []

    def submit(self, function, *arguments):
        steps.append("submitted")
        return partial(function, *arguments, lambda size: None)

    def result(self, source, future):
        steps.append("awaited")
        return future()

    monkeypatch.setattr(Workers, "submit", submit)
    monkeypatch.setattr(Workers, "result", result)
    paths = [captures.capture(name) for name in ("k41_sasl_plain", "k41_midstream", "k0102_sasl_plain")]
    summary = convert(paths, tmp_path, processes=2)
    assert list(summary.quality) == [path.name for path in paths] and not summary.failed
    assert steps == ["submitted"] * 3 + ["awaited"] * 3


@pytest.mark.ring2
def test_small_captures_read_in_parallel_give_the_same_files(tmp_path, monkeypatch):
    paths = [captures.capture(name) for name in ("k41_sasl_plain", "k41_midstream", "k0102_sasl_plain", "k41_quota")]
    nothing = tmp_path / "nothing.pcap"
    nothing.write_bytes(b"nothing")
    paths.insert(2, nothing)
    convert(paths, tmp_path / "one", processes=1)
    shares = []
    read = conversion._read
    monkeypatch.setattr(conversion, "_read", lambda *given: shares.append(given[0].source) or read(*given))
    summary = convert(paths, tmp_path / "two", processes=2)
    assert shares == ["nothing.pcap"] or shares == []
    assert [fault.name for fault in summary.failed] == [str(nothing)]
    assert list(summary.quality) == [path.name for path in paths if path != nothing]
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) > 4 * len(TABLES)
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file


@pytest.mark.ring2
def test_records_are_written_only_on_request(tmp_path):
    path = captures.capture("k41_librdkafka")
    folders = [tmp_path / str(processes) for processes in (1, 3)]
    for folder in folders:
        arguments = ["--processes", folder.name, "--records", "rdk2,__trans*", "--record-values", "5"]
        CliRunner().invoke(cli, ["convert", str(path), "--out", str(folder), *arguments], catch_exceptions=False)
    file = Path("records") / f"{path.name}.parquet"
    assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    kept = rows(folders[0], "records", path.name)
    assert {row["topic"] for row in kept} == {"rdk2", "__transaction_state"}
    assert max(len(row["value"] or b"") for row in kept) == 5 < max(row["value_bytes"] or 0 for row in kept)
    assert json.loads((folders[0] / "_kproxy.json").read_text())["rows"]["records"] == len(kept)
    convert([path], folders[0])
    assert not (folders[0] / file).exists()
    for wrong in (
        ["--records", "a", "--detail", "topics"],
        ["--records", ","],
        ["--checksums", "--detail", "topics"],
        ["--record-values", "x", "--records", "a"],
    ):
        result = CliRunner().invoke(cli, ["convert", str(path), "--out", str(folders[0]), *wrong])
        assert isinstance(result.exception, KproxyError)


def test_a_run_that_cannot_be_published_leaves_an_earlier_runs_records(tmp_path):
    path = captures.capture("k41_librdkafka")
    convert([path], tmp_path, Settings(records=chosen("rdk2", "5")))
    shutil.rmtree(tmp_path / "quality")
    (tmp_path / "quality").write_text("a file where a folder is to be")
    with pytest.raises(KproxyError, match="cannot be written to"):
        convert([path], tmp_path)
    assert rows(tmp_path, "records", path.name)


@pytest.mark.ring2
def test_checksums_are_checked_on_request(tmp_path):
    path = captures.capture("k41_librdkafka")
    for checked, arguments in ((None, []), (True, ["--checksums"])):
        CliRunner().invoke(cli, ["convert", str(path), "--out", str(tmp_path), *arguments], catch_exceptions=False)
        batches = rows(tmp_path, "batches", path.name)
        assert len(batches) > 300
        assert {row["crc_valid"] for row in batches if not row["partial"]} == {checked}


def test_rotated_files_are_one_source(tmp_path):
    whole = captures.capture("k41_BASE").read_bytes()
    position, cut = 24, len(whole) // 2
    while position < cut:
        position += 16 + int.from_bytes(whole[position + 8 : position + 12], "little")
    (tmp_path / "part0").write_bytes(whole[:position])
    (tmp_path / "part1").write_bytes(whole[:24] + whole[position:])
    for order in ((0, 1), (1, 0)):  # by their packets' times: `ls` sorts tcpdump's tenth file before the second
        convert([tmp_path / f"part{number}" for number in order], tmp_path / "out", Settings(rotated=True))
        assert len(rows(tmp_path / "out", "exchanges", "part0")) == len(captures.expected("k41_BASE"))
        assert "clock_back" not in {row["kind"] for row in rows(tmp_path / "out", "quality", "part0")}


def test_file_names_may_be_undecodable(tmp_path):
    path = tmp_path / os.fsdecode(b"\xff.pcap")
    path.write_bytes(captures.capture("k41_midstream").read_bytes())
    summary = convert([path, "x" * 300], tmp_path / "out")
    assert {row["source"] for row in rows(tmp_path / "out", "exchanges", "~5cxff.pcap")} == {r"\xff.pcap"}
    assert [fault.text for fault in summary.failed] == ["cannot be opened: File name too long"]


def test_standard_input_is_a_capture(tmp_path):
    with captures.capture("k41_gz").open("rb") as stream:
        subprocess.run([*KPROXY, "convert", "-", "--out", tmp_path], stdin=stream, check=True, capture_output=True)
    assert len(rows(tmp_path, "exchanges", "stdin")) == len(captures.expected("k41_BASE"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ending", (signal.SIGINT, signal.SIGTERM))
def test_a_file_that_grows_is_followed_until_interrupted(tmp_path, ending):
    path, out = tmp_path / "growing.pcap", tmp_path / "out"
    whole = captures.capture("k41_BASE").read_bytes()
    path.write_bytes(whole[:200_001])
    process = subprocess.Popen([*KPROXY, "convert", path, "--out", out, "--follow"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(out.glob(".unfinished-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    with path.open("ab") as file:
        file.write(whole[200_001:])
    read = Path(f"/proc/{process.pid}/fdinfo")
    while not any(at_end(info, len(whole)) for info in read.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(ending)
    assert process.wait(timeout=60) == 0
    assert len(rows(out, "exchanges", "growing.pcap")) == len(captures.expected("k41_BASE"))


@pytest.mark.ring2
def test_a_followed_file_that_is_rewritten_ends_as_incomplete(tmp_path):
    """As by rotation in place: later packets are at other positions, so waiting for them would never end."""
    path = tmp_path / "growing.pcap"
    whole = captures.capture("k41_BASE").read_bytes()
    path.write_bytes(whole)
    process = subprocess.Popen(
        [*KPROXY, "convert", path, "--out", tmp_path / "out", "--follow"], stdout=subprocess.PIPE
    )
    read = Path(f"/proc/{process.pid}/fdinfo")
    deadline = time.monotonic() + 60
    while not any(at_end(info, len(whole)) for info in read.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    path.write_bytes(whole[:100_000])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Not complete: the file is cut" in output
    assert len(rows(tmp_path / "out", "exchanges", "growing.pcap")) == len(captures.expected("k41_BASE"))


def at_end(info, size):
    """Whether the process's position in the file is `size`."""
    try:
        return f"pos:\t{size}\n" in info.read_text()
    except OSError:
        return False


def test_starting_processes_ignore_an_interrupt():
    """A terminal sends SIGINT to them too; otherwise each would print a traceback."""
    with Workers(1) as workers:
        future = workers.submit(_after_all)
        (started,) = workers._pool._processes
        os.kill(started, signal.SIGINT)
        assert workers.result("it", future) == "read"
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def _after_all(seen):
    return "read"


def test_an_unreadable_capture_does_not_stop_the_others(tmp_path):
    bad = tmp_path / "notes.txt"
    bad.write_text("not packets at all")
    out = tmp_path / "out"
    arguments = ["convert", str(bad), str(tmp_path / "gone"), str(captures.capture("k41_midstream")), "--out", str(out)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert "notes.txt: at byte 0: no capture file" in result.stderr
    assert "gone: cannot be opened" in result.stderr
    assert rows(out, "exchanges", "k41_midstream.pcap")


def test_captures_that_all_fail_leave_nothing(tmp_path):
    bad = tmp_path / "notes.txt"
    bad.write_text("not packets at all")
    assert CliRunner().invoke(cli, ["convert", str(bad), "--out", str(tmp_path / "out")]).exit_code == 1
    assert not (tmp_path / "out").exists()


def test_two_captures_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.pcap").write_bytes(captures.capture("k41_midstream").read_bytes())
    with pytest.raises(KproxyError, match="same name"):
        convert([tmp_path / "a" / "same.pcap", tmp_path / "b" / "same.pcap"], tmp_path / "out")


@pytest.mark.parametrize("processes", ("1", "2"))
def test_a_run_killed_midway_leaves_no_table_and_can_be_repeated(tmp_path, processes):
    """The capture arrives slowly through a pipe; the process is killed while it reads."""
    fifo = tmp_path / "slow.pcap"
    os.mkfifo(fifo)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*KPROXY, "convert", fifo, "--out", out, "--processes", processes], stderr=subprocess.DEVNULL
    )
    capture = captures.capture("k41_librdkafka").read_bytes()
    with fifo.open("wb") as pipe:
        pipe.write(capture[:900_000])
        pipe.flush()
        deadline = time.monotonic() + 60
        while not list(out.glob(".unfinished-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not list(out.rglob("*.parquet")) and not (out / "_kproxy.json").exists()
    fifo.unlink()
    fifo.write_bytes(capture)
    convert([fifo], out)
    assert len(rows(out, "exchanges", "slow.pcap")) == len(captures.expected("k41_librdkafka"))
    assert not list(out.glob(".unfinished-*"))


def test_a_capture_without_kafka_is_reported(tmp_path):
    for name, words in (("k39_zookeeper", "No Kafka in it"), ("k41_tls13_keys", "with --key-log FILE")):
        result = CliRunner().invoke(cli, ["convert", str(captures.capture(name)), "--out", str(tmp_path / name)])
        assert words in result.stdout
        assert not rows(tmp_path / name, "exchanges", f"{name}.pcap")


def test_a_run_that_ends_amid_its_publication_is_refused_by_questions_and_finished_by_the_next_run(
    tmp_path, monkeypatch
):
    def ends(self, publication):
        raise KeyboardInterrupt

    def run():
        return convert([captures.capture("k41_midstream")], tmp_path, Settings(), processes=1)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.Dataset, "_move", ends)
        run()
    assert not (tmp_path / "exchanges").exists()
    with pytest.raises(KproxyError, match="start it again, which first finishes what was begun"):
        refuse_unfinished(tmp_path)
    dataset = writer.Dataset(tmp_path)
    dataset.begin("convert")  # as the next run does
    dataset.abandon()
    refuse_unfinished(tmp_path)
    assert rows(tmp_path, "exchanges", "k41_midstream.pcap") and rows(tmp_path, "quality", "k41_midstream.pcap")
