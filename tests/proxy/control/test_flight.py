"""Dumps of a running kproxy: asked for or by themselves, without secrets, never more than may stay."""

import asyncio
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kproxy.convert.reading import exchanges
from kproxy.proxy.control import flight
from tests.proxy.control.operators.test_operator import (
    ALTER_CONFIGS,
    AUTHENTICATE,
    FETCH,
    HANDSHAKE,
    HEARTBEAT,
    SECRET,
    done,
    operated,
)
from tests.proxy.live import live, request, response


async def asks(client, broker, key, version, number, body=None, answer=None):
    await client.send(request(key, version, number, body or {}))
    await broker.frame()
    await broker.send(response(key, version, number, answer or {}))
    await client.frame()


def dumps(folder):
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_what_is_asked_for_is_written_without_secrets(tmp_path):
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
            told = await done(http, "/api/dump")
            assert told["exchanges"] == 4 and told["frames"] == 8 and not told["left_out"]
            client.close()
            await here.until(lambda: here.relays == 0)
            told = await done(http, "/api/dump")
            found.append(Path(told["folder"]))

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
def test_what_goes_wrong_is_dumped_once(tmp_path, trigger, monkeypatch):
    monkeypatch.setattr(flight, "_AFTER_S", 0.1)
    folder = tmp_path / "dumps"
    settings = {"folder": str(folder), "triggers": trigger, "slow_s": 0.2}

    async def test():
        async with operated(flight=settings) as (here, _):
            for _ in range(2):
                client, broker = await here.connect()
                await asks(client, broker, HEARTBEAT, 4, 1)
                await client.send(request(FETCH, 12, 2, {"maxWaitMs": 50}))
                await broker.frame()
                if trigger == "slow":
                    await asyncio.sleep(0.5)
                if trigger == "disconnect":
                    broker.close()
                    await client.rest()
                else:
                    await broker.send(response(FETCH, 12, 2, {"errorCode": 56 if trigger == "error" else 0}))
                    await client.frame()
                counts = here.server.metrics.flight_dumps[trigger]
                await here.until(lambda counts=counts: counts["written"] == 1)
            assert counts == {"written": 1, "failed": 0, "skipped": 1}

    live(test(), 120)
    (dump,) = dumps(folder)
    assert dump.name.endswith(f"Z-{trigger}")
    assert "Fetch" in {row["api"] for row in pq.read_table(dump / "exchanges").to_pylist()}


def test_the_oldest_dumps_go(tmp_path):
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
            await here.until(lambda: here.server._flight._is_dumping)
            assert "try again" in await done(http, "/api/dump", 409)
            third = [await second, await done(http, "/api/dump")]
            made.extend(Path(told["folder"]).name for told in [first, *third])

    made = []
    live(test(), 120)
    assert [path.name for path in dumps(folder)] == [*made[1:], "mine"]


def test_without_a_recorder_and_without_a_folder_the_mend_is_told(tmp_path):
    async def test():
        async with operated() as (_, http):
            assert "--flight DIR" in await done(http, "/api/dump", 400)

    live(test())
