"""Queries and actions of an operator over HTTP, on a kproxy with open connections."""

import json
import logging
import re
from base64 import b64encode
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kproxy.protocol.apis import ALTER_CONFIGS, API_VERSIONS, HEARTBEAT, PRODUCE, PUSH_TELEMETRY
from kproxy.proxy import log_lines
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.filters import tracing
from kproxy.wire.session import Session
from tests.project import ROOT
from tests.proxy.live import HOST, kproxy, live, request, response

HANDSHAKE, AUTHENTICATE = 17, 36
POST = {"X-Kproxy": "yes"}
SECRET = b"\0alice\0hunter2-secret"
VALUE = b"value-of-a-record"


@asynccontextmanager
async def operated(**flags):
    async with kproxy(admin=f"{HOST}:0", **flags) as here:
        url = f"http://{here.server.admin_address}"
        async with aiohttp.ClientSession(url, headers=POST) as http:
            yield here, http


async def asked(http, path, **parameters):
    async with http.get(path, params=parameters) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def the_connection(here, http):
    await here.until(lambda: here.relays == 1)
    (row,) = await asked(http, "/api/connections")
    return row


async def done(http, path, status=200, **parameters):
    async with http.post(path, json=parameters) as answer:
        text = await answer.text()
        assert answer.status == status, text
        return json.loads(text) if status in (200, 404) and text.startswith("{") else text


def test_the_documentation_lists_every_query_and_action():
    async def test():
        async with operated() as (here, http):
            queries = {f"GET {path}" for path in (await asked(http, "/api")).values()}
            admin = here.server._admin
            actions = {f"POST /api/{name}" for name in (*admin._actions, *admin._streams)}
        page = (ROOT / "docs/admin.md").read_text()
        queries.add("GET /api/findings")  # added by `kproxy run`
        assert set(re.findall(r"`((?:GET|POST) /api/[\w-]+)", page)) == queries | actions

    live(test())


def test_connections_show_their_client_and_their_counts():
    async def test():
        async with operated() as (here, http):
            client, broker = await here.connect()
            named = {"clientSoftwareName": "tester", "clientSoftwareVersion": "1.2"}
            await client.send(request(API_VERSIONS, 3, 1, named, client="orders-7"))
            first = await broker.frame()
            await broker.send(response(API_VERSIONS, 3, 1, {"apiKeys": []}))
            await client.frame()
            await client.send(request(HEARTBEAT, 4, 2))
            await broker.frame()
            row = await the_connection(here, http)
            assert (
                row
                | {
                    "listener": "bootstrap",
                    "principal": "User:ANONYMOUS",
                    "client_id": "orders-7",
                    "software": "tester 1.2",
                    "tls": None,
                    "requests": 2,
                    "requests_pending": 1,
                    "bytes_in": len(first) + len(request(HEARTBEAT, 4, 2)),
                }
                == row
            )
            assert row["bytes_out"] > 0
            (waiting,) = await asked(http, "/api/requests", connection=row["number"])
            assert waiting["api"] == "Heartbeat" and waiting["correlation_id"] == 2 and waiting["version"] == 4
            assert 0 <= waiting["pending_s"] < 60 and waiting["is_whole"] and not waiting["answer_begun"]
            status = await asked(http, "/api/status")
            assert status["ready"] and status["connections"] == 1
            async with http.get("/api/requests", params={"connection": 99}) as answer:
                assert answer.status == 400 and "connection=99 is not open" in await answer.text()

    live(test())


def test_an_unknown_parameter_is_an_error():
    """An unsupported filter, for example by client, must not silently return all connections."""

    async def test():
        async with operated() as (here, http):
            _ends = await here.connect()
            row = await the_connection(here, http)
            for path, said in (
                ("connections?limit=9&client=10.0.0.7", "'client' is no parameter here: there are after, limit"),
                (f"requests?connection={row['number']}&x=", "'x' is no parameter here: there are connection"),
                ("clusters?cluster=x", "'cluster' is no parameter here: there is none"),
                ("live?afte=5", "'afte' is no parameter here: there are after, groups, series, slow_after"),
            ):
                async with http.get(f"/api/{path}") as answer:
                    assert (answer.status, await answer.text()) == (400, f"{said}\n")

    live(test())


def test_one_connection_is_closed_another_drained_and_the_rest_continue(caplog):
    async def test():
        async with operated() as (here, http):
            pairs = [await here.connect() for _ in range(3)]
            await here.until(lambda: here.relays == 3)
            rows = await asked(http, "/api/connections")
            ports = {row["number"]: row["client"] for row in rows}
            order = {f"{HOST}:{wire.sock.getsockname()[1]}": (wire, broker) for wire, broker in pairs}
            one, two, three = (order[ports[number]] for number in sorted(ports))
            numbers = sorted(ports)
            assert await done(http, "/api/close", connection=numbers[0]) == {"closed": 1}
            assert await one[0].rest() == b""
            assert await done(http, "/api/close", 404, connection=numbers[0]) == {"closed": 0}
            await two[0].send(request(HEARTBEAT, 4, 1))
            await two[1].frame()
            assert await done(http, "/api/drain", connection=numbers[1]) == {"draining": 1}
            await two[1].send(response(HEARTBEAT, 4, 1))
            assert await two[0].rest() == response(HEARTBEAT, 4, 1)
            two[0].close()
            await here.until(lambda: here.relays == 1)
            await three[0].send(request(HEARTBEAT, 4, 1))
            assert await three[1].frame() == request(HEARTBEAT, 4, 1)
            await three[1].send(response(HEARTBEAT, 4, 1))
            assert await three[0].frame() == response(HEARTBEAT, 4, 1)
            assert here.counted.disconnects == {"operator": 2}
            assert f"operator closed=1 connection={numbers[0]}" in caplog.text
            for wrong in ({}, {"connection": "x"}, {"cluster": "none"}, {"connection": 1, "all": "yes"}):
                await done(http, "/api/drain", 400, **wrong)
            assert await done(http, "/api/drain", all="yes") == {"draining": 1}
            assert await three[0].rest() == b""

    live(test())


def test_the_log_level_is_changed_while_it_runs():
    before = log_lines.level()

    async def test():
        async with operated() as (_, http):
            assert await done(http, "/api/log-level", level="debug") == {"level": "debug"}
            assert logging.getLogger("kproxy.x").isEnabledFor(logging.DEBUG)
            assert await asked(http, "/api/log-level") == {"level": "debug"}
            assert "none of debug, info" in await done(http, "/api/log-level", 400, level="loud")

    try:
        live(test())
    finally:
        log_lines.set_level(before)


async def lines_of(answer):
    async for line in answer.content:
        if line.strip():
            yield json.loads(line)


async def traced(http, number_of_frames, talk, **parameters):
    """Return (first line, other lines) of a trace during `talk`."""
    parameters |= {"frames": number_of_frames, "seconds": 15}
    async with http.post("/api/trace", json=parameters) as answer:
        assert answer.status == 200, await answer.text()
        lines = lines_of(answer)
        begin = await anext(lines)
        await talk()
        return begin, [line async for line in lines]


def test_a_trace_shows_requests_and_responses_and_no_secret():
    async def test():
        async with operated() as (here, http):
            client, broker = await here.connect()

            async def talks(api, version, number, ask, answer):
                await client.send(request(api, version, number, ask, client="orders-7"))
                await broker.frame()
                await broker.send(response(api, version, number, answer))
                await client.frame()

            async def talk():
                await talks(AUTHENTICATE, 1, 1, {"authBytes": SECRET}, {"authBytes": SECRET})
                entry = {"name": "ssl.keystore.password", "value": "hunter2-secret"}
                plain = {"name": "retention.ms", "value": "1000"}
                resources = [{"resourceType": 2, "resourceName": "t", "configs": [entry, plain]}]
                await talks(ALTER_CONFIGS, 1, 2, {"resources": resources}, {"responses": []})
                partitions = [{"index": 0, "records": batch()}]
                topics = [{"name": "orders", "partitionData": partitions}]
                await talks(PRODUCE, 8, 3, {"acks": 1, "topicData": topics}, {"responses": []})
                unknown = {"_tags": {99: SECRET}, "_trailing": SECRET}
                await talks(AUTHENTICATE, 2, 4, unknown, unknown)
                await talks(PUSH_TELEMETRY, 0, 5, {"metrics": SECRET}, {})

            row = await the_connection(here, http)
            begin, lines = await traced(http, 10, talk, connection=row["number"])
            assert begin == {"tracing": row["number"], "connections": 1}
            *frames, end = lines
            assert [(frame["api"], frame["kind"]) for frame in frames] == [
                (api, kind)
                for api in ("SaslAuthenticate", "AlterConfigs", "Produce", "SaslAuthenticate", "PushTelemetry")
                for kind in ("request", "response")
            ]
            assert end["left_out"] == 0
            text = json.dumps(lines)
            assert "hunter2" not in text and "alice" not in text and VALUE.decode() not in text
            assert (
                SECRET.hex() not in text
                and b64encode(SECRET).decode() not in text
                and "(masked)" in text
                and "retention.ms" in text
                and "1000" in text
            )
            assert frames[0]["header"]["clientId"] == "orders-7"
            records = frames[4]["body"]["topicData"][0]["partitionData"][0]["records"]
            assert records == {"bytes": len(batch()), "batches": 1, "records": 1, "codecs": ["none"]}
            assert frames[8]["body"]["metrics"] == {"bytes": len(SECRET)}
            assert not here.server.relays.worker.traces
            (relay,) = here.server.relays.worker.relays.values()
            assert type(relay.session) is Session, "the session is still traced"

    live(test())


def batch():
    """A batch v2 with one record."""
    from crc32c import crc32c

    record = b"\0\0\0\x01" + bytes((2 * len(VALUE),)) + VALUE + b"\0"
    record = bytes((2 * len(record),)) + record
    body = (0).to_bytes(2) + bytes(4) + bytes(16) + b"\xff" * 14 + (1).to_bytes(4) + record
    body = crc32c(body).to_bytes(4) + body
    return bytes(8) + (len(body) + 5).to_bytes(4) + bytes(4) + b"\x02" + body


def test_a_trace_of_an_address_follows_new_connections_and_may_begin_inside_a_frame():
    async def test():
        async with operated() as (here, http):
            old, old_broker = await here.connect()
            begun = request(HEARTBEAT, 4, 1)
            await old.send(begun[:-3])
            await old_broker.read(len(begun) - 3)
            pairs = []

            async def talk():
                await old.send(begun[-3:] + request(HEARTBEAT, 4, 2))
                await old_broker.read(3 + len(begun))
                await old_broker.send(response(HEARTBEAT, 4, 1) + response(HEARTBEAT, 4, 2))
                pairs.append(await here.connect())
                await pairs[0][0].send(request(HEARTBEAT, 4, 7))

            begin, (*frames, end) = await traced(http, 4, talk, client=HOST)
            assert begin["connections"] == 1
            seen = {(frame["kind"], frame["header"]["correlationId"]) for frame in frames}
            assert seen == {("request", 2), ("response", 1), ("response", 2), ("request", 7)}
            assert {frame["connection"] for frame in frames} == {1, 2}
            assert "number of frames" in end["ended"]

    live(test())


def test_a_trace_shows_frames_of_one_read_in_order():
    async def test():
        async with operated() as (here, http):
            client, broker = await here.connect()
            asks = [request(HEARTBEAT, 4, number, client="a" * (9 - number)) for number in range(1, 4)]

            async def talk():
                await client.send(b"".join(asks))
                await broker.read(len(b"".join(asks)))
                client.close()
                broker.close()

            row = await the_connection(here, http)
            _, (*frames, _end) = await traced(http, 100, talk, connection=row["number"])
            assert [frame["header"]["correlationId"] for frame in frames] == [1, 2, 3]

    live(test())


@pytest.mark.parametrize("pipelined", [False, True])
def test_tokens_without_a_header_are_only_counted(pipelined):
    token = len(SECRET).to_bytes(4) + SECRET

    async def test():
        async with operated() as (here, http):
            client, broker = await here.connect()
            handshake = request(HANDSHAKE, 0, 1, {"mechanism": "PLAIN"})

            async def talk():
                await client.send(handshake + (token if pipelined else b""))
                await broker.read(len(handshake))
                await broker.send(response(HANDSHAKE, 0, 1, {"mechanisms": ["PLAIN"]}))
                await client.frame()
                if not pipelined:
                    await client.send(token)
                assert await broker.read(len(token)) == token
                await broker.send(bytes(4))
                await client.read(4)
                await client.send(request(HEARTBEAT, 4, 2))
                await broker.frame()
                await broker.send(response(HEARTBEAT, 4, 2))
                await client.frame()

            row = await the_connection(here, http)
            _, (*lines, end) = await traced(
                http, 100, lambda: _and_close(talk, client, broker), connection=row["number"]
            )
            assert end["ended"] == "the connection has ended"
            assert "hunter2" not in json.dumps(lines) and "alice" not in json.dumps(lines)
            shown = [line["api"] for line in lines if "left_out" not in line]
            assert shown[-2:] == ["Heartbeat", "Heartbeat"], "frames after the login are shown"
            assert sum(line["bytes"] for line in lines if "left_out" in line) >= len(token)

    live(test())


async def _and_close(talk, *wires):
    await talk()
    for wire in wires:
        wire.close()


def test_a_trace_that_cannot_keep_up_drops_frames_and_the_relay_continues(monkeypatch):
    monkeypatch.setattr(tracing, "MAX_HELD_BYTES", 3 * (tracing._OVERHEAD + len(request(HEARTBEAT, 4, 0))))

    async def test():
        async with operated() as (here, http):
            client, broker = await here.connect()

            async def talk():
                for number in range(20):
                    await client.send(request(HEARTBEAT, 4, number))
                await broker.read(20 * len(request(HEARTBEAT, 4, 0)))
                client.close()
                broker.close()

            row = await the_connection(here, http)
            _, (*frames, end) = await traced(http, 100, talk, connection=row["number"])
            assert end["left_out"] > 0 and len(frames) + end["left_out"] == 20

    live(test())


def test_a_reader_that_disconnects_ends_its_trace():
    async def test():
        async with operated() as (here, http):
            _ends = await here.connect()
            row = await the_connection(here, http)
            async with http.post("/api/trace", json={"connection": row["number"]}) as answer:
                await anext(lines_of(answer))
                assert here.server.relays.worker.traces
                answer.close()
            await here.until(lambda: not here.server.relays.worker.traces)
            assert all(
                type(relay.session) is Session for relay in here.server.relays.worker.relays.values()
            )  # no longer traced

    live(test())


@pytest.mark.parametrize(
    "parameters",
    [{}, {"connection": 1, "client": HOST}, {"client": "nobody"}, {"connection": 77}, {"client": 1, "x": 2}],
)
def test_a_trace_that_matches_no_connection_is_refused(parameters):
    async def test():
        async with operated() as (_, http):
            text = await done(http, "/api/trace", 400, **parameters)
            assert "trace" in text or "no address" in text or "not open" in text

    live(test())


def test_the_end_of_a_connection_is_logged_with_its_counts(caplog):
    caplog.set_level(logging.INFO)

    async def test():
        async with kproxy(log_connections=True) as here:
            client, broker = await here.connect()
            await client.send(request(HEARTBEAT, 4, 1))
            await broker.frame()
            await broker.send(response(HEARTBEAT, 4, 1, {"errorCode": 25}))
            await client.frame()
            client.end()
            broker.end()
            await here.until(lambda: here.relays == 0)

    live(test())
    (line,) = [record for record in caplog.records if record.getMessage().startswith("ended")]
    logged = log_lines.fields(line)
    assert logged.pop("duration_s") > 0 and logged.pop("client").startswith(HOST)
    assert logged == {
        "cause": "client_closed",
        "cluster": "default",
        "listener": "bootstrap",
        "broker": "bootstrap",
        "principal": "User:ANONYMOUS",
        "client_id": None,
        "software": None,
        "tls": None,
        "requests": 1,
        "errors": 1,
        "bytes_in": len(request(HEARTBEAT, 4, 1)),
        "bytes_out": len(response(HEARTBEAT, 4, 1)),
    }


def test_the_active_policy_is_shown_and_rendered_once():
    async def test():
        rules = (Rule(action="deny", group="secret-*"),)
        async with operated(cluster={"policy": rules}) as (here, http):
            (shown,) = await asked(http, "/api/policy")
            assert shown["policy"] == [rule.model_dump(mode="json", exclude_unset=True) for rule in rules]
            operator = here.server._admin._api["policy"].__self__
            assert operator._policy({}) is operator._policy({})
            (cluster,) = here.server.config.clusters
            other = cluster.model_copy(update={"policy": ()})
            here.server.config = here.server.config.model_copy(update={"clusters": (other,)})
            (shown,) = await asked(http, "/api/policy")
            assert shown["policy"] == []

    live(test())
