"""Dumps of a running kproxy, on request or by a trigger: they have no secrets, and at most `keep` of them stay."""

import asyncio
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kproxy.admin import operator
from kproxy.admin.operator import Operator, _windows
from kproxy.convert.reading import exchanges
from kproxy.errors import ConfigError
from kproxy.flight import sending
from kproxy.metrics import Metrics
from kproxy.protocol.apis import ALTER_CONFIGS, FETCH, HEARTBEAT, PRODUCE
from kproxy.proxy.config.flight import Flight
from kproxy.proxy.connection.operating import OPERATIONS
from kproxy.proxy.filters import flight
from kproxy.proxy.filters.flight import FindingsTrigger, FlightRecorder, folder_name
from kproxy.proxy.process.embedded import Proxy
from tests.admin.test_operator import AUTHENTICATE, HANDSHAKE, SECRET, done, operated
from tests.ports import free_ports
from tests.proxy.live import HOST, Broker, Wire, live, request, response


async def asks(client, broker, key, version, number, body=None, answer=None):
    await client.send(request(key, version, number, body or {}))
    await broker.frame()
    await broker.send(response(key, version, number, answer or {}))
    await client.frame()


def dumps(folder):
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_a_dump_on_request_is_written_without_secrets(tmp_path):
    async def test():
        async with operated(flight=str(tmp_path / "dumps"), detail="batches") as (here, http):
            client, broker = await here.connect()
            await asks(client, broker, HANDSHAKE, 1, 1, {"mechanism": "PLAIN"}, {"mechanisms": ["PLAIN"]})
            await asks(client, broker, AUTHENTICATE, 2, 2, {"authBytes": SECRET}, {"authBytes": SECRET})
            configs = [
                {"name": "sasl.jaas.config", "value": "hunter2"},
                {"name": "retention.ms", "value": "1000"},
            ]
            resources = [{"resourceType": 2, "resourceName": "orders", "configs": configs}]
            await asks(client, broker, ALTER_CONFIGS, 2, 3, {"resources": resources})
            await asks(client, broker, HEARTBEAT, 4, 4)
            result = await done(http, "/api/dump")
            assert {"tables_from", "frames_from"} <= set(result)  # they have memory of their own
            assert result["exchanges"] == 4 and result["frames"] == 8 and not result["left_out"]
            client.close()
            await broker.rest()
            broker.close()
            await here.until(lambda: here.relays == 0)
            result = await done(http, "/api/dump")
            found.append(Path(result["folder"]))

    found = []
    live(test(), 120)
    (folder,) = found
    packets = folder / "frames.pcapng"
    data = packets.read_bytes()
    assert packets.stat().st_mode & 0o077 == 0
    assert b"hunter2" not in data and SECRET not in data and b"1000" in data
    read = list(exchanges(packets))
    assert [each["api"] for each in read] == ["SaslHandshake", "SaslAuthenticate", "AlterConfigs", "Heartbeat"]
    (connection,) = pq.read_table(folder / "connections").to_pylist()
    assert connection["end_seen"] and connection["requests"] == 4


@pytest.mark.parametrize("trigger", ["slow", "error", "disconnect"])
def test_a_trigger_that_fires_again_soon_writes_no_second_dump(tmp_path, trigger, monkeypatch):
    monkeypatch.setattr(flight, "_AFTER_S", 0.1)
    folder = tmp_path / "dumps"
    settings = {"folder": str(folder), "triggers": trigger, "slow_s": 1.0}

    async def test():
        async with operated(flight=settings) as (here, _):
            for before in range(2):
                client, broker = await here.connect()
                await asks(client, broker, HEARTBEAT, 4, 1)
                await client.send(request(FETCH, 12, 2, {"maxWaitMs": 50}))
                await broker.frame()
                if trigger == "slow":
                    await asyncio.sleep(1.3)
                if trigger == "disconnect":
                    broker.close()
                    await client.rest()
                else:
                    await broker.send(response(FETCH, 12, 2, {"errorCode": 56 if trigger == "error" else 0}))
                    await client.frame()
                counts = here.server.metrics.flight_dumps[trigger]
                expected = {"written": 1, "failed": 0, "skipped": before}
                await here.until(lambda counts=counts, expected=expected: counts == expected)

    live(test(), 120)
    (dump,) = dumps(folder)
    assert dump.name.endswith(f"Z-{trigger}")
    assert "Fetch" in {row["api"] for row in pq.read_table(dump / "exchanges").to_pylist()}


# Of one kind of finding: others depend on how busy the machine is.
FOLLOWS_OFTEN = """
from kproxy.analysis.findings import following, of_metrics
following.EVERY_S, following.KEPT = 0.1, 10_000
found = of_metrics.found_between
of_metrics.found_between = lambda *asked: [one for one in found(*asked) if one.kind == "old_versions"]
from kproxy.cli import main
main()
"""


@pytest.mark.ring2
def test_all_workers_dump_a_finding_once(tmp_path):
    folder = tmp_path / "dumps"
    file = tmp_path / "kproxy.toml"
    port = free_ports(8)

    async def test():
        broker = Broker()
        file.write_text(f"""
workers = 2
admin = "{HOST}:{port + 1}"
[flight]
folder = "{folder}"
triggers = ["findings"]
findings_severity = "note"
pause_s = 1.0
[[cluster]]
listen = "{HOST}:{port}"
broker_port_base = {port + 2}
bootstrap = ["{HOST}:{broker.port}"]
""")
        command = (sys.executable, "-c", FOLLOWS_OFTEN, "run", "--config", str(file))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            await broker.answer_kproxy()
            while b"ready cluster=" not in (line := await process.stderr.readline()):
                assert line, "it has ended"
            client, behind = await Wire.dial(port), await broker.accept()
            before = await asyncio.to_thread(dumps_counted, port + 1)
            for number in range(2):  # the second has no new finding
                await asks(client, behind, PRODUCE, 2, number, {"acks": 1, "timeoutMs": 1000})
                counted = before
                while sum(counted.values()) < 2:
                    counted = await asyncio.to_thread(dumps_counted, port + 1)
                await asyncio.sleep(1.1)  # a pause and some looks
            client.close()
            assert before == {"written": 0, "failed": 0, "skipped": 0}
            assert await asyncio.to_thread(dumps_counted, port + 1) == {"written": 2, "failed": 0, "skipped": 0}
        finally:
            process.terminate()
            said = (await process.communicate())[1].decode()
            broker.close()
        lines = [line for line in said.splitlines() if "dump cause=findings" in line]
        assert len(lines) == 2 and all("note old_versions: " in line for line in lines), said

    live(test(), 120)
    (dump,) = dumps(folder)
    assert {path.name for path in dump.glob("*.pcapng")} == {f"frames-worker-{number}.pcapng" for number in (1, 2)}
    assert [row["api"] for row in pq.read_table(dump / "exchanges").to_pylist()] == ["Produce"]


def dumps_counted(admin):
    with urllib.request.urlopen(f"http://{HOST}:{admin}/metrics", timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    named = [one for one in samples if one.name == "kproxy_flight_dumps_total" and one.labels["cause"] == "findings"]
    return {one.labels["outcome"]: int(one.value) for one in named}


def test_the_trigger_findings_is_refused_for_a_proxy_inside_a_program(tmp_path):
    with pytest.raises(ConfigError, match="use kproxy run"):
        Proxy(bootstrap="localhost:1", flight={"folder": tmp_path, "triggers": "findings"})


class Look(NamedTuple):
    kind: str
    severity: str
    cluster: str | None
    where: str


def test_a_finding_is_new_if_the_previous_evaluation_did_not_have_it(tmp_path):
    asked = []

    async def operate(operation, name, text):
        assert operation == "dump_found" and flight._NAME.fullmatch(name)
        asked.append(text)
        return []

    async def test():
        trigger = FindingsTrigger(Flight(folder=tmp_path, findings_severity="warning"), operate)
        lag, note = Look("lag", "critical", "c", "x" * 999), Look("idle", "note", "c", "b")
        for look in ((), (note,), (note, lag), (lag,), (lag._replace(cluster="d"), lag), (), (lag,)):
            await trigger.update(look)

    live(test())
    assert asked == ["critical lag: " + "x" * 200] * 3


def test_the_oldest_dumps_are_removed(tmp_path):
    folder = tmp_path / "dumps"
    settings = {"folder": str(folder), "keep": 2}
    folder.mkdir()
    (folder / "mine").mkdir()
    old = folder / "20200101T000000.000Z-slow"
    old.mkdir()

    async def test():
        async with operated(flight=settings) as (here, http):
            client, broker = await here.connect()
            await asks(client, broker, HEARTBEAT, 4, 1)
            first = await done(http, "/api/dump")
            second = asyncio.create_task(done(http, "/api/dump"))
            await here.until(lambda: here.server.relays.flight._is_dumping)
            assert "try again" in await done(http, "/api/dump", 409)
            third = [await second, await done(http, "/api/dump")]
            made.extend(Path(each["folder"]).name for each in [first, *third])

    made = []
    live(test(), 120)
    assert [path.name for path in dumps(folder)] == [*made[1:], "mine"]


def test_dumps_dated_in_the_future_are_removed_first_and_the_one_just_written_stays(tmp_path):
    for name in ("20200101T000000.000Z-slow", "29990101T000000.000Z-slow", "29990102T000000.000Z-asked"):
        (tmp_path / name).mkdir()

    async def test():
        async with operated(flight={"folder": str(tmp_path), "keep": 2}) as (_, http):
            made.append(Path((await done(http, "/api/dump"))["folder"]).name)

    made = []
    live(test(), 60)
    assert [path.name for path in dumps(tmp_path)] == ["20200101T000000.000Z-slow", *made]


def test_a_dump_waits_for_a_worker_that_writes_a_dump_of_its_own(tmp_path):
    async def test():
        recorders = [FlightRecorder(Flight(folder=tmp_path), {}, Metrics(), number) for number in range(2)]

        class Kproxy:
            config = SimpleNamespace(flight=Flight(folder=tmp_path))

            async def operate(self, operation, *arguments):
                workers = [SimpleNamespace(flight=recorder) for recorder in recorders]
                return [OPERATIONS[operation](worker, *arguments) for worker in workers]

        assert recorders[0].ask("20200101T000000.000Z-asked")
        status, result = await Operator(Kproxy()).actions["dump"]({})
        assert status == 200 and result["files"] == ["frames-worker-0.pcapng", "frames-worker-1.pcapng"]
        assert recorders[0]._counts["asked"] == {"written": 2, "failed": 0, "skipped": 1}
        assert recorders[1]._counts["asked"] == {"written": 1, "failed": 0, "skipped": 0}
        for recorder in recorders:
            assert recorder.ask("20200101T000000.001Z-asked")
        assert (await Operator(Kproxy()).actions["dump"]({}))[0] == 409
        for recorder in recorders:
            await recorder.stop()

    live(test(), 120)


def test_a_dump_reports_which_memory_was_too_small():
    """Tables of two workers, and frames that begin 40 s later since there are many bytes of them."""
    start = 1_700_000_000 * 10**9
    processes = [{"tables_from_ns": start + n * 10**9, "frames_from_ns": start + 40 * 10**9} for n in range(2)]
    with_room = _windows(
        [{**one, "frames_full": False, "tables_full": True} for one in processes], Flight(folder="dumps")
    )
    windows = _windows([{**processes[0], "frames_full": True}, processes[1]], Flight(folder="dumps"))
    assert with_room == {name: windows[name] for name in ("tables_from", "frames_from")}, "nothing was dropped"
    assert windows["tables_from"] == "2023-11-14T22:13:21.000Z" and windows["frames_from"] == "2023-11-14T22:14:00.000Z"
    assert windows["shorter"].startswith("frames begin 39.0 s later: [flight] frame_memory of 64 MiB")
    (nothing,) = [_windows([{"tables_from_ns": None, "frames_from_ns": start}], Flight(folder="dumps"))]
    assert nothing == {"frames_from": "2023-11-14T22:13:20.000Z"}


def test_without_a_flight_recorder_the_error_names_the_option_that_sets_its_folder(tmp_path):
    async def test():
        async with operated() as (_, http):
            assert "--flight DIR" in await done(http, "/api/dump", 400)

    live(test())


def test_a_dump_that_fails_leaves_no_files_and_the_oldest_dumps_are_removed_anyway(tmp_path, monkeypatch):
    folder = tmp_path / "dumps"
    for number in range(4):
        (folder / f"2020010{number + 1}T000000.000Z-slow").mkdir(parents=True)
    half = "import os, sys, pickle; to = pickle.load(sys.stdin.buffer)[0]; (to / 'half').touch(); os._exit(3)"
    monkeypatch.setattr(sending, "command", lambda: [sys.executable, "-c", half])

    async def test():
        async with operated(flight={"folder": str(folder), "keep": 2}) as (here, http):
            assert "status 3" in await done(http, "/api/dump", 500)
            assert here.server.metrics.flight_dumps["asked"] == {"written": 0, "failed": 1, "skipped": 0}

    live(test())
    assert [path.name[:8] for path in dumps(folder)] == ["20200103", "20200104"]


def test_a_worker_removes_only_its_own_files_of_a_failed_dump(tmp_path):
    async def test():
        details = {"default": "metadata"}
        one = FlightRecorder(Flight(folder=tmp_path), details, Metrics(), 1)
        try:
            dump = tmp_path / folder_name("asked")
            (dump / "exchanges").mkdir(parents=True)
            (dump / "batches").mkdir()
            for name in ("exchanges/x-worker-1-000000.parquet", "batches/x-worker-1-000000.parquet"):
                (dump / name).touch()
            (dump / "frames-worker-1.pcapng").touch()
            (dump / "frames-worker-12.pcapng").touch()
            (dump / "exchanges/x-worker-12-000000.parquet").touch()
            one._discard(dump)
            left = sorted(str(path.relative_to(dump)) for path in dump.rglob("*"))
            assert left == ["exchanges", "exchanges/x-worker-12-000000.parquet", "frames-worker-12.pcapng"]
        finally:
            await one.stop()

    live(test())


def test_a_stop_waits_a_limited_time_for_a_dump_and_leaves_no_process_or_file(tmp_path, monkeypatch):
    monkeypatch.setattr(flight, "STOP_S", 0.1)
    monkeypatch.setattr(sending, "command", lambda: ["sleep", "1000"])
    folder = tmp_path / "dumps"

    async def test():
        async with operated(flight=str(folder)) as (here, _):
            recorder = here.server.relays.flight
            assert recorder.ask("20200101T000000.000Z-asked")
            await here.until(lambda: recorder._process is not None)
            process = recorder._process
        assert process.wait() != 0

    live(test())
    assert not dumps(folder)


def test_a_request_for_a_dump_reports_a_process_that_ended_and_does_not_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(operator, "_DUMP_SILENT", 2)
    monkeypatch.setattr(flight, "STOP_S", 0.1)
    monkeypatch.setattr(sending, "command", lambda: ["sleep", "1000"])

    async def test():
        async with operated(flight=str(tmp_path)) as (here, http):
            asked = asyncio.create_task(done(http, "/api/dump", 500))
            await here.until(lambda: here.server.relays.flight._results)
            here.server.relays.flight._results.clear()  # as after a restart of the process, whose successor has no dump
            assert "1 of 1 processes ended" in await asked

    live(test())


def test_two_requests_for_dumps_in_a_row_both_get_an_answer(tmp_path):
    async def test():
        async with operated(flight=str(tmp_path)) as (here, _):
            recorder = here.server.relays.flight
            for name in ("20200101T000000.000Z-asked", "20200101T000000.001Z-asked"):
                assert recorder.ask(name) and recorder.result(name) == {"writing": True}
                await here.until(lambda: not recorder._is_dumping)
            assert recorder.result("20200101T000000.000Z-asked")["frames"] == 0

    live(test(), 60)


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    folder = tmp_path / "dumps"

    async def test():
        async with operated(flight=str(folder)) as (_, http):
            folder.rmdir()
            assert Path((await done(http, "/api/dump"))["folder"]).parent == folder

    live(test(), 60)


@pytest.mark.parametrize("memory", ["header_memory", "frame_memory"])
def test_a_memory_counts_as_full_once_more_than_half_of_it_is_used(tmp_path, monkeypatch, memory):
    """A dump names only a full memory as too small: the other one has dropped nothing."""
    limit_bytes = getattr(settings := Flight(folder=tmp_path), memory)
    monkeypatch.setattr(sending, "send", lambda *_, **__: {"exchanges": 0, "frames": 0})

    async def test():
        for held_bytes in (limit_bytes // 2, limit_bytes // 2 + 1):
            recorder = FlightRecorder(settings, {}, Metrics(), None)
            held = {"header_memory": 0, "frame_memory": 0, memory: held_bytes}
            headers = SimpleNamespace(taken=lambda: ([], []), held_bytes=held["header_memory"])
            monkeypatch.setattr(recorder, "_headers", headers)
            monkeypatch.setattr(recorder, "_frames", SimpleNamespace(chunks=(), held_bytes=held["frame_memory"]))
            assert recorder.ask("20200101T000000.000Z-asked")
            await recorder.stop()
            result = recorder.result("20200101T000000.000Z-asked")
            is_full = held_bytes > limit_bytes // 2
            assert result["tables_full"] == (is_full and memory == "header_memory")
            assert result["frames_full"] == (is_full and memory == "frame_memory")

    live(test())
