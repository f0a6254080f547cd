"""Sessions of clients that kproxy authenticated, and logins that it answers, on live connections."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy.errors import ConfigError
from kproxy.metrics.counters.cells import ClusterCells
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.admission import authentication, failed_logins, renewals
from kproxy.proxy.admission.logins import Logins
from kproxy.proxy.config.load import load
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.connection.operating import connection_row
from kproxy.proxy.process.changing.changes import changes
from kproxy.proxy.process.server import Server
from kproxy.proxy.sasl.checks import PlainCheck, TokenCheck
from kproxy.proxy.sasl.clients import MAX_FRAME
from kproxy.proxy.sasl.users import change
from kproxy.proxy.upstream.loops import LoopGuard
from kproxy.wire import interest
from tests.proxy.live import HOST, Broker, Live, Wire, free_ports, live, request, response
from tests.proxy.sasl.test_tokens import OTHER, RSA, jwk, jwks, token
from tests.pushed import counter, pushed

HANDSHAKE, AUTHENTICATE, SUBSCRIPTIONS = 17, 36, 71
OFFERS = [{"apiKey": key, "minVersion": 0, "maxVersion": newest} for key, newest in ((3, 12), (17, 1), (36, 2))]


def written(folder: Path, broker: Broker, settings: str) -> Path:
    for name in ("alice", "bob"):
        change(folder / "users", name, f"pass of {name}")
    (folder / "password").write_text("pass of kproxy")
    file = folder / "kproxy.toml"
    file.write_text(
        f"drain_timeout_s = 0.2\n[[cluster]]\nlisten = '{HOST}:{free_ports(6)}'\nbootstrap = '{HOST}:{broker.port}'\n"
        + settings.format(folder=folder)
    )
    return file


PUSHED = pushed(counter("org.apache.kafka.producer.connection.creation.total", 3))
SESSION_S = 3
AUTHENTICATION = """
[cluster.authentication]
mechanisms = ["PLAIN", "SCRAM-SHA-256"]
users_file = "{folder}/users"
failure_delay_s = 0
"""
LOGIN = """
[cluster.login]
mechanism = "PLAIN"
username = "kproxy"
password_file = "{folder}/password"
"""


@asynccontextmanager
async def served(folder: Path, settings: str) -> AsyncIterator[Live]:
    broker = Broker()
    server = Server(load(written(folder, broker, settings)))
    here = Live(server, broker)
    try:
        await server.start()
        yield here
    finally:
        await server.stop()
        broker.close()


async def asked(wire: Wire, key: int, version: int, body: dict[str, Any], number: int = 1) -> dict[str, Any]:
    await wire.send(request(key, version, number, body))
    header, answer = codec.decode_response((await wire.frame())[4:], key, version)
    assert header["correlationId"] == number
    return answer


async def logged_in(wire: Wire, name: str = "alice", number: int = 1) -> dict[str, Any]:
    assert (await asked(wire, HANDSHAKE, 1, {"mechanism": "PLAIN"}))["errorCode"] == 0
    token = f"\0{name}\0pass of {name}".encode()
    return await asked(wire, AUTHENTICATE, 2, {"authBytes": token}, number)


async def answers(broker: Broker) -> Wire:
    """The broker's end of a connection, which answers each Metadata request."""
    wire = await broker.accept()

    async def serve() -> None:
        while True:
            frame = (await wire.frame())[4:]
            if not frame:
                return
            header, _ = codec.decode_request(frame)
            key, version = header["requestApiKey"], header["requestApiVersion"]
            assert key in (METADATA, API_VERSIONS)
            body = {"apiKeys": OFFERS} if key == API_VERSIONS else {"brokers": broker.brokers()}
            await wire.send(response(key, version, header["correlationId"], body))

    wire.serving = asyncio.ensure_future(serve())  # type: ignore[attr-defined]
    return wire


async def ready(here: Live) -> None:
    await answers(here.broker)
    await here.until(lambda: not here.server.not_ready())


async def dialled(here: Live) -> Wire:
    """A client's end, once there are brokers."""
    await ready(here)
    return await Wire.dial(here.port)


async def entered(here: Live) -> Wire:
    """A client's end that has logged in, and is answered."""
    client = await dialled(here)
    await logged_in(client)
    await answers(here.broker)
    return client


def counted(here: Live) -> dict[tuple[str, str, str], int]:
    (cells,) = here.server.metrics.clusters.values()
    return {key: count for key, count in cells.authentications.items() if count}


def test_kproxy_knows_a_client_id_from_the_login_on(tmp_path: Path) -> None:
    """The client only sends Metadata requests, of which kproxy reads no client id."""

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await entered(here)
            (row,) = map(connection_row, here.server.relays.worker.relays.values())
            assert (row["principal"], row["client_id"]) == ("User:alice", "c")
            client.close()

    live(test())


def test_clients_that_stop_within_large_requests_are_closed_to_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(authentication, "MAX_HELD_TOGETHER", 2 * MAX_FRAME)
    monkeypatch.setattr(interest, "HELD_PATIENCE_NS", 0)
    password = "p" * (authentication.SMALL_FRAME + 1)
    change(tmp_path / "users", "carol", password)

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await dialled(here)
            held = here.server.clusters[0]._authentication._held
            silent = [await Wire.dial(here.port) for _ in range(2)]
            for count, wire in enumerate(silent, 1):
                await wire.send(MAX_FRAME.to_bytes(4, "big"))
                await here.until(lambda count=count: held.held_bytes == count * MAX_FRAME)
            assert (await asked(client, HANDSHAKE, 1, {"mechanism": "PLAIN"}))["errorCode"] == 0
            answer = await asked(client, AUTHENTICATE, 2, {"authBytes": f"\0carol\0{password}".encode()})
            assert answer["errorCode"] == 0
            assert await silent[0].rest() == b"" and held.held_bytes == MAX_FRAME
            silent[1].close()
            await here.until(lambda: not held.held_bytes and not held._requests)

    live(test())
    assert "did not go on with a large request before its login" in caplog.text


def test_a_client_newer_than_its_broker_gets_the_answer_that_a_broker_gives(tmp_path: Path) -> None:
    """KIP-511: an ApiVersions that the broker does not know is answered in version 0, and the client asks again."""

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await dialled(here)
            named = {"clientSoftwareName": "franz-go", "clientSoftwareVersion": "1"}
            await client.send(request(API_VERSIONS, 5, 1, named))
            broker = await here.broker.accept()
            header, _ = codec.decode_request((await broker.frame())[4:])
            served_versions = [{"apiKey": API_VERSIONS, "minVersion": 0, "maxVersion": 4}]
            body = {"errorCode": 35, "apiKeys": served_versions}
            await broker.send(response(API_VERSIONS, 0, header["correlationId"], body))
            header, answer = codec.decode_response((await client.frame())[4:], API_VERSIONS, 0)
            assert (header["correlationId"], answer["errorCode"], answer["apiKeys"]) == (1, 35, served_versions)
            assert (await logged_in(client))["errorCode"] == 0

    live(test())


class Timers:
    """The event loop, with timers whose clock the test advances."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._set: list[tuple[float, Callable[..., Any], tuple[Any, ...]]] = []

    def call_later(self, delay_s: float, call: Callable[..., Any], *arguments: Any) -> SimpleNamespace:
        timer = (self._now_s + delay_s, call, arguments)
        self._set.append(timer)
        return SimpleNamespace(cancel=lambda: self._set.remove(timer) if timer in self._set else None)

    def passes(self, seconds: float) -> None:
        self._now_s += seconds
        for timer in [timer for timer in self._set if timer[0] <= self._now_s]:
            self._set.remove(timer)
            timer[1](*timer[2])

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)


def test_a_renewed_session_goes_on_and_an_expired_one_ends_with_its_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = Timers()
    monkeypatch.setattr("kproxy.proxy.admission.logins.asyncio", SimpleNamespace(get_running_loop=lambda: timers))

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION + f"session_lifetime_s = {SESSION_S}\n") as here:
            client = await dialled(here)
            assert (await logged_in(client))["sessionLifetimeMs"] == SESSION_S * 1000
            await answers(here.broker)
            for number in range(4):
                timers.passes(0.3 * SESSION_S)  # together more than one lasts
                assert (await asked(client, METADATA, 12, {"topics": []}, number))["brokers"]
                assert (await logged_in(client, number=number))["sessionLifetimeMs"] == SESSION_S * 1000
            timers.passes(1.1 * SESSION_S)  # expired: the client may only log in again, and that renews the session
            assert (await logged_in(client))["errorCode"] == 0
            assert (await asked(client, METADATA, 12, {"topics": []}))["brokers"]
            timers.passes(1.1 * SESSION_S)
            await client.send(request(METADATA, 12, 9, {"topics": []}))
            assert await client.rest() == b""
            await here.until(lambda: not here.relays)
            assert counted(here) == {
                ("client", "PLAIN", "success"): 1,
                ("client", "PLAIN", "renewed"): 5,
                ("client", "PLAIN", "expired"): 1,
            }
            assert here.counted.disconnects == {"fault": 1}

    live(test())


@pytest.mark.parametrize(
    ("mechanism", "token", "said"),
    [
        ("PLAIN", b"\0bob\0pass of bob", "Cannot change principals during re-authentication from User.alice: User.bob"),
        ("PLAIN", b"\0alice\0guessed", "Invalid username or password"),
        ("SCRAM-SHA-256", b"n,,n=alice,r=x", "is not supported for re-authentication of mechanism 'PLAIN'"),
    ],
)
def test_a_login_in_the_middle_must_be_the_same_users(tmp_path: Path, mechanism: str, token: bytes, said: str) -> None:
    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await entered(here)
            assert (await asked(client, HANDSHAKE, 1, {"mechanism": mechanism}))["errorCode"] == 0
            refused = await asked(client, AUTHENTICATE, 2, {"authBytes": token})
            assert refused["errorCode"] == 58 and said in refused["errorMessage"]
            assert await client.rest() == b""
            client.close()
            await here.until(lambda: not here.relays)
            assert here.counted.disconnects == {"authentication": 1}

    live(test())


def test_a_removed_user_cannot_renew_a_session(tmp_path: Path) -> None:
    """This holds though no other login makes kproxy read the file."""

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await entered(here)
            assert (await logged_in(client))["errorCode"] == 0
            change(tmp_path / "users", "alice", None)
            assert (await logged_in(client))["errorCode"] == 58
            assert await client.rest() == b""

    live(test())


def test_a_token_signed_by_a_withdrawn_key_renews_no_session(tmp_path: Path) -> None:
    settings = """
[cluster.authentication]
mechanisms = ["OAUTHBEARER"]
jwks_file = "{folder}/keys"
jwks_refresh_s = 0.05
audience = "kafka"
issuer = "https://issuer"
failure_delay_s = 0
"""
    keys = tmp_path / "keys"
    keys.write_bytes(jwks(jwk(RSA, kid="one")))
    bearer = f"n,,\x01auth=Bearer {token(kid='one')}\x01\x01".encode()

    async def logged_in(wire: Wire) -> bytes:
        assert (await asked(wire, HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"}))["errorCode"] == 0
        answer = await asked(wire, AUTHENTICATE, 2, {"authBytes": bearer})
        assert answer["errorCode"] == 0
        return bytes(answer["authBytes"])

    async def test() -> None:
        async with served(tmp_path, settings) as here:
            client = await dialled(here)
            assert await logged_in(client) == b""
            await answers(here.broker)
            assert await logged_in(client) == b""
            keys.write_bytes(jwks(jwk(OTHER, kid="one")))
            while await logged_in(client) == b"":  # noqa: ASYNC110 - keys are loaded in the background
                await asyncio.sleep(0.05)

    live(test(), within_s=20)


def test_a_refused_login_within_a_session_stops_the_checks_of_later_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await dialled(here)
            await logged_in(client)
            pair = request(HANDSHAKE, 1, 1, {"mechanism": "PLAIN"}) + request(
                AUTHENTICATE, 2, 2, {"authBytes": b"\0alice\0guessed"}
            )
            await client.send(pair * 300)  # a check takes milliseconds of the event loop
            await client.rest()
            client.close()
            await here.until(lambda: not here.relays)
            assert counted(here)["client", "PLAIN", "failed"] == 1

    live(test())


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("sent", ["together", "in two reads", "after the answer"])
def test_after_a_login_that_was_refused_nothing_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str, is_slow: bool
) -> None:
    """However long its connection stays open for the delay of failures, and also what was sent right behind it."""
    monkeypatch.setattr(PlainCheck, "is_slow", lambda *_: is_slow)

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION.replace("failure_delay_s = 0", "failure_delay_s = 60")) as here:
            client = await dialled(here)
            await logged_in(client)
            broker = await here.broker.accept()
            wrong = request(HANDSHAKE, 1, 1, {"mechanism": "PLAIN"})
            wrong += request(AUTHENTICATE, 2, 2, {"authBytes": b"\0alice\0guessed"})
            behind = request(METADATA, 12, 3, {"topics": []})
            if sent == "in two reads":
                await client.send(wrong[:-3])
                await client.frame()  # waits until kproxy has read the first part
                await client.send(wrong[-3:] + behind)
            else:
                await client.send(wrong + behind if sent == "together" else wrong)
                await client.frame()
            refused = codec.decode_response((await client.frame())[4:], AUTHENTICATE, 2)[1]
            assert refused["errorCode"] == 58
            if sent == "after the answer":
                await client.send(behind)
            assert await client.rest() == b""
            assert await broker.rest() == b""
            client.close()
            broker.close()
            await here.until(lambda: not here.relays)
            assert here.counted.disconnects == {"fault": 1}

    live(test())


def test_a_client_that_logs_in_during_a_change_of_policy_is_drained(tmp_path: Path) -> None:
    """kproxy accepted it under the former settings. Like a consumer, it always has one more request in flight."""

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await dialled(here)
            assert (await asked(client, HANDSHAKE, 1, {"mechanism": "PLAIN"}))["errorCode"] == 0
            now = here.server.config
            cluster = now.clusters[0].model_copy(update={"policy": (Rule(action="deny", topic="secret-*"),)})
            new = now.model_copy(update={"clusters": (cluster,)})
            await here.server.reconfigure(new, changes(now, new))
            await answers(here.broker)  # after the reload kproxy asks it for the brokers again
            token = await asked(client, AUTHENTICATE, 2, {"authBytes": b"\0alice\0pass of alice"})
            assert token["errorCode"] == 0
            await answers(here.broker)
            ask = request(METADATA, 12, 2, {"topics": []})
            await client.send(ask * 3)
            with suppress(OSError):
                while await client.frame():
                    await client.send(ask)
            await here.until(lambda: not here.relays)

    live(test())


def test_clients_get_the_versions_of_the_broker_before_their_login_and_kproxy_asks_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            await ready(here)
            clients = [await Wire.dial(here.port) for _ in range(3)]
            for client in clients:
                await client.send(
                    request(API_VERSIONS, 3, 4, {"clientSoftwareName": "a", "clientSoftwareVersion": "1"})
                )
            await answers(here.broker)  # one question for all of them
            for client in clients:
                _, body = codec.decode_response((await client.frame())[4:], API_VERSIONS, 3)
                offers = {offer["apiKey"]: offer["maxVersion"] for offer in body["apiKeys"]}
                assert offers == {METADATA: 12, HANDSHAKE: 1, AUTHENTICATE: 2}
            newer = await Wire.dial(here.port)
            await newer.send(request(METADATA, 12, 1)[:4] + b"\0\x12\0\x63\0\0\0\x07" + b"\0" * 15)
            await newer.send(b"\0" * 50)
            assert (await newer.read(10))[8:10] == b"\0\x23"  # UNSUPPORTED_VERSION, in version 0
            for client in clients:
                client.close()

    live(test())


@pytest.mark.parametrize(
    ("rules", "client_id", "newest"),
    [
        ([{"action": "deny", "version": "9-"}], "any", 8),
        ([{"action": "deny", "version": "9-", "principal": "*"}], "any", 8),
        ([{"action": "deny", "version": "9-", "principal": "User:alice"}], "any", 12),  # another one may log in
        ([{"action": "allow", "principal": "User:alice"}, {"action": "deny", "version": "9-"}], "any", 12),
        ([{"action": "allow", "principal": "*", "version": "0-8"}, {"action": "deny", "version": "3-"}], "any", 8),
        ([{"action": "deny", "version": "9-", "client_id": "old-*"}], "old-1", 8),
        ([{"action": "deny", "version": "9-", "client_id": "old-*"}], "new-1", 12),
        ([{"action": "deny", "version": "9-", "address": "192.0.2.0/24"}], "any", 12),
    ],
)
def test_versions_that_no_principal_may_use_are_not_offered_before_the_login(
    tmp_path: Path, rules: list[dict[str, str]], client_id: str, newest: int
) -> None:
    """librdkafka asks once, before its login."""
    settings = AUTHENTICATION
    for rule in rules:
        settings += "\n".join(
            ["[[cluster.policy]]", 'api = "Metadata"', *(f'{name} = "{value}"' for name, value in rule.items()), ""]
        )

    async def test() -> None:
        async with served(tmp_path, settings) as here:
            await ready(here)
            client = await Wire.dial(here.port)
            named = {"clientSoftwareName": "a", "clientSoftwareVersion": "1"}
            await client.send(request(API_VERSIONS, 3, 4, named, client_id))
            await answers(here.broker)
            _, body = codec.decode_response((await client.frame())[4:], API_VERSIONS, 3)
            assert {offer["apiKey"]: offer["maxVersion"] for offer in body["apiKeys"]}[METADATA] == newest
            client.close()

    live(test())


@pytest.mark.parametrize("broker_takes_pushes", [False, True])
def test_pushes_of_metrics_are_offered_before_the_login_and_taken_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker_takes_pushes: bool
) -> None:
    """librdkafka asks for versions once, before its login. A broker that takes pushes itself gets them."""
    if broker_takes_pushes:
        own = [{"apiKey": key, "minVersion": 0, "maxVersion": 0} for key in (SUBSCRIPTIONS, 72)]
        monkeypatch.setattr(sys.modules[__name__], "OFFERS", [*OFFERS, *own])

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION + "[cluster.telemetry]\n") as here:
            client = await dialled(here)
            asking = asyncio.ensure_future(answers(here.broker))
            named = {"clientSoftwareName": "librdkafka", "clientSoftwareVersion": "2.6"}
            offers = (await asked(client, API_VERSIONS, 3, named))["apiKeys"]
            assert {SUBSCRIPTIONS, 72} <= {offer["apiKey"] for offer in offers}
            await asking
            assert (await logged_in(client))["errorCode"] == 0
            broker = await here.broker.accept()
            if broker_takes_pushes:
                await client.send(request(SUBSCRIPTIONS, 0, 7, {}))
                assert codec.decode_request((await broker.frame())[4:])[0]["requestApiKey"] == SUBSCRIPTIONS
            else:
                subscription = await asked(client, SUBSCRIPTIONS, 0, {}, 7)
                instance = subscription["clientInstanceId"]
                push = {
                    "clientInstanceId": instance,
                    "subscriptionId": subscription["subscriptionId"],
                    "metrics": PUSHED,
                }
                assert (await asked(client, 72, 0, push, 8))["errorCode"] == 0
                (cells,) = here.server.metrics.clusters.values()
                assert cells.pushes is not None
                assert cells.pushes.clients[instance].software == ("librdkafka", "2.6")

    live(test())


def test_a_login_that_kproxy_answers_never_reaches_the_broker(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(tmp_path, LOGIN) as here:

            async def broker_login() -> Wire:
                wire = await here.broker.accept()
                for key, version, body in (
                    (API_VERSIONS, 0, {"apiKeys": OFFERS}),
                    (HANDSHAKE, 1, {"mechanisms": ["PLAIN"]}),
                    (AUTHENTICATE, 2, {}),
                ):
                    header, asked_for = codec.decode_request((await wire.frame())[4:])
                    assert (header["requestApiKey"], header["requestApiVersion"]) == (key, version)
                    assert asked_for.get("authBytes", b"\0kproxy\0pass of kproxy") == b"\0kproxy\0pass of kproxy"
                    await wire.send(response(key, version, header["correlationId"], body))
                return wire

            asking = await broker_login()
            await asking.frame()
            await asking.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": OFFERS}))
            await asking.frame()
            await asking.send(response(METADATA, 12, METADATA, {"brokers": here.broker.brokers()}))
            await here.until(lambda: not here.server.not_ready())
            client = await Wire.dial(here.port)
            broker = await broker_login()
            refused = await asked(client, HANDSHAKE, 1, {"mechanism": "PLAIN"})
            assert refused == {"errorCode": 34, "mechanisms": []}
            assert (await asked(client, AUTHENTICATE, 1, {"authBytes": b"x" * 100}))["errorCode"] == 34
            whole = request(METADATA, 12, 5, {"topics": []})
            await client.send(request(HANDSHAKE, 0, 4, {"mechanism": "PLAIN"}) + whole)
            assert await broker.frame() == whole
            assert (await client.frame())[4:8] == b"\0\0\0\x04"
            await client.send(request(AUTHENTICATE, 2, 6, {"authBytes": b"x" * 100_000}))
            with suppress(ConnectionResetError):  # kproxy closes without reading all of it
                assert await client.rest() == b""
            assert await broker.rest() == b""
            assert counted(here) == {("broker", "PLAIN", "success"): 2}

    live(test())


def test_kproxy_warns_of_a_secret_that_would_be_readable_on_the_network(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    for bootstrap, listen, count in (("kafka-1:9092", ":9092", 2), ("localhost:9093", "127.0.0.1:9092", 0)):
        file = written(tmp_path, broker, LOGIN + AUTHENTICATION)
        flags = {"bootstrap": bootstrap, "listen": listen, "advertise": "kafka:{port}"}
        (cluster,) = load(file, {}, flags).clusters
        caplog.clear()
        Logins(cluster, LoopGuard(lambda host, port: False), ClusterCells("default"))
        assert [record.getMessage() for record in caplog.records if "unencrypted" in record.getMessage()] == [
            "cluster=default: PLAIN sends its secret unencrypted to kafka-1:9092: add [cluster.upstream_tls], or use "
            "SCRAM",
            "cluster=default: PLAIN sends its secret unencrypted from clients to :9092: add [cluster.tls], or "
            "use SCRAM",
        ][:count]
    broker.close()


def test_kproxy_warns_of_a_users_file_that_everybody_can_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = Broker()
    (cluster,) = load(written(tmp_path, broker, AUTHENTICATION)).clusters
    users = tmp_path / "users"
    for mode, count in ((0o600, 0), (0o644, 0), (0o646, 1)):
        users.chmod(mode)
        caplog.clear()
        Logins(cluster, LoopGuard(lambda host, port: False), ClusterCells("default"))
        said = f"cluster=default: every user of this machine can write to {users}, and so log in as anybody: "
        assert [record.getMessage() for record in caplog.records] == [f"{said}chmod o-w {users}"][:count]
    broker.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (LOGIN.replace("/password", "/none"), "none cannot be"),
        (AUTHENTICATION.replace("/users", "/none"), "none cannot be read"),
        (AUTHENTICATION.replace("/users", "/password"), "line 1"),
    ],
)
def test_files_that_cannot_be_used_end_the_start(tmp_path: Path, settings: str, said: str) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match=said):
            async with served(tmp_path, settings):
                pass

    live(test())


def test_a_drain_does_not_wait_for_clients_that_have_not_logged_in(tmp_path: Path) -> None:
    """The one that has is served until its request is answered, however long that takes."""

    async def test() -> None:
        broker = Broker()
        file = written(tmp_path, broker, AUTHENTICATION + "[cluster.limits]\nhandshake_timeout_s = 3600\n")
        file.write_text(file.read_text().replace("drain_timeout_s = 0.2", "drain_timeout_s = 3600"))
        server = Server(load(file))
        here = Live(server, broker)
        await server.start()
        try:
            client = await dialled(here)
            await logged_in(client)
            upstream = await broker.accept()
            silent, begun = await Wire.dial(here.port), await Wire.dial(here.port)
            await asked(begun, HANDSHAKE, 1, {"mechanism": "PLAIN"})
            await client.send(request(METADATA, 12, 5))
            assert await upstream.frame() == request(METADATA, 12, 5)
            stopping = asyncio.create_task(server.stop())
            assert await silent.rest() == await begun.rest() == b""
            assert not stopping.done()
            await upstream.send(answer := response(METADATA, 12, 5))
            assert await client.frame() == answer
            await client.rest()
            client.close()
            await stopping
            assert here.counted.disconnects == {"drained": 3}
        finally:
            await server.stop()
            broker.close()

    live(test())


ALL = """
[cluster.authentication]
mechanisms = ["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"]
users_file = "{folder}/users"
jwks_file = "{folder}/jwks"
issuer = "https://issuer"
audience = "kafka"
failure_delay_s = 0
"""


def test_failed_logins_are_in_the_audit_first_ones_and_renewals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_logins, "_PER_ADDRESS_S", 0.0)
    (tmp_path / "jwks").write_bytes(jwks(jwk(RSA, kid="one")))
    tokens = [
        ("PLAIN", b"\0mallory\0guess"),
        ("SCRAM-SHA-256", b"n,,n=mallory,r=" + b"r" * 24),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer " + token(sub="mallory", exp=1).encode() + b"\x01\x01"),
    ]

    async def test() -> None:
        broker = Broker()
        file = written(tmp_path, broker, ALL)
        file.write_text(f"audit = '{tmp_path}/audit.jsonl'\n" + file.read_text())
        server = Server(load(file))
        here = Live(server, broker)
        await server.start()
        try:
            for number, (mechanism, first) in enumerate(tokens):
                client = await (dialled(here) if not number else Wire.dial(here.port))
                assert (await asked(client, HANDSHAKE, 1, {"mechanism": mechanism}))["errorCode"] == 0
                answer = await asked(client, AUTHENTICATE, 2, {"authBytes": first})
                if mechanism == "SCRAM-SHA-256":
                    nonce = answer["authBytes"].split(b",")[0]
                    answer = await asked(client, AUTHENTICATE, 2, {"authBytes": b"c=biws," + nonce + b",p=Z3Vlc3M="})
                elif mechanism == "OAUTHBEARER":
                    answer = await asked(client, AUTHENTICATE, 2, {"authBytes": b"\x01"})
                assert answer["errorCode"] == 58
                await client.rest()
            client = await Wire.dial(here.port)
            assert (await asked(client, HANDSHAKE, 1, {"mechanism": "GSSAPI"}))["errorCode"] == 33
            await client.rest()
            client = await Wire.dial(here.port)
            await logged_in(client)
            await asked(client, HANDSHAKE, 1, {"mechanism": "PLAIN"})
            assert (await asked(client, AUTHENTICATE, 2, {"authBytes": b"\0bob\0pass of bob"}))["errorCode"] == 58
            await client.rest()
        finally:
            await server.stop()
            broker.close()

    live(test())
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["login"], line["mechanism"], line["claimed"], line["reason"]) for line in lines] == [
        ("first", "PLAIN", "User:mallory", "failed"),
        ("first", "SCRAM-SHA-256", "User:mallory", "failed"),
        ("first", "OAUTHBEARER", "User:mallory", "failed"),
        ("first", None, None, "mechanism"),
        ("renewal", "PLAIN", "User:bob", "failed"),
    ]
    assert all(line["client"].startswith(f"{HOST}:") and line["decision"] == "deny" for line in lines)
    assert "GSSAPI" in lines[3]["error"] and "has expired" in lines[2]["error"]
    assert "guess" not in (tmp_path / "audit.jsonl").read_text()


@pytest.mark.parametrize("ends", ["broker", "kproxy"])
def test_a_connection_that_ends_in_the_middle_of_a_renewal_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """kproxy renews its login at the broker, the client its own at kproxy; neither gets an answer."""
    due = asyncio.Event()  # kproxy's renewal
    patched = SimpleNamespace(**vars(asyncio))
    patched.sleep = lambda _: due.wait()
    monkeypatch.setattr(renewals, "asyncio", patched)

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION + LOGIN) as here:

            async def broker_login(lifetime_ms: int) -> Wire:
                wire = await here.broker.accept()
                for key, version, body in (
                    (API_VERSIONS, 0, {"apiKeys": OFFERS}),
                    (HANDSHAKE, 1, {"mechanisms": ["PLAIN"]}),
                    (AUTHENTICATE, 2, {"sessionLifetimeMs": lifetime_ms}),
                ):
                    header, _ = codec.decode_request((await wire.frame())[4:])
                    assert (header["requestApiKey"], header["requestApiVersion"]) == (key, version)
                    await wire.send(response(key, version, header["correlationId"], body))
                return wire

            asking = await broker_login(0)
            await asking.frame()
            await asking.send(response(API_VERSIONS, 0, API_VERSIONS, {"apiKeys": OFFERS}))
            await asking.frame()
            await asking.send(response(METADATA, 12, METADATA, {"brokers": here.broker.brokers()}))
            await here.until(lambda: not here.server.not_ready())
            client = await Wire.dial(here.port)
            await logged_in(client)
            broker = await broker_login(60_000)
            assert (await asked(client, HANDSHAKE, 1, {"mechanism": "PLAIN"}))["errorCode"] == 0
            due.set()
            header, _ = codec.decode_request((await broker.frame())[4:])  # to log in again; it is not answered
            assert header["requestApiKey"] == HANDSHAKE
            if ends == "kproxy":
                (relay,) = here.server.relays.worker.relays.values()
                relay.close("operator")
            else:
                broker.reset()
            await here.until(lambda: not here.relays)
            await here.until(lambda: ("broker", "PLAIN", "disconnected") in counted(here))
            assert counted(here) == {
                ("broker", "PLAIN", "success"): 2,
                ("broker", "PLAIN", "disconnected"): 1,
                ("client", "PLAIN", "success"): 1,
                ("client", "PLAIN", "disconnected"): 1,
            }

    live(test())


@pytest.mark.parametrize("mechanism", ["PLAIN", "OAUTHBEARER"])
def test_the_token_of_a_renewal_is_checked_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    """While the check of one client's lasts, another is served; its own next request waits for the check."""
    (tmp_path / "jwks").write_bytes(jwks(jwk(RSA, kid="one")))
    served_another = threading.Event()
    checking: list[str] = []
    kind = PlainCheck if mechanism == "PLAIN" else TokenCheck
    checked = kind.receive

    def receive(self: Any, token: bytes, **more: bool) -> Any:
        checking.append(threading.current_thread().name)
        if len(checking) > 1:
            assert served_another.wait(60)
        return checked(self, token, **more)

    monkeypatch.setattr(kind, "receive", receive)
    if mechanism == "PLAIN":
        monkeypatch.setattr(PlainCheck, "is_slow", lambda *_: True)
    bearer = f"n,,\x01auth=Bearer {token(pad='x' * 40_000)}\x01\x01".encode()

    async def test() -> None:
        async with served(tmp_path, ALL) as here:
            client = await dialled(here)
            first = b"\0alice\0pass of alice" if mechanism == "PLAIN" else bearer
            for _ in range(2):
                assert (await asked(client, HANDSHAKE, 1, {"mechanism": mechanism}))["errorCode"] == 0
                if not checking:
                    assert (await asked(client, AUTHENTICATE, 2, {"authBytes": first}))["errorCode"] == 0
                    await answers(here.broker)
            other = await Wire.dial(here.port)
            assert (await asked(other, HANDSHAKE, 1, {"mechanism": "SCRAM-SHA-256"}))["errorCode"] == 0
            await client.send(request(AUTHENTICATE, 2, 5, {"authBytes": first}))
            await client.send(request(METADATA, 12, 6, {"topics": []}))
            await here.until(lambda: len(checking) == 2)
            first_message = b"n,,n=alice,r=" + b"r" * 24
            assert (await asked(other, AUTHENTICATE, 2, {"authBytes": first_message}))["errorCode"] == 0
            served_another.set()
            _, answer = codec.decode_response((await client.frame())[4:], AUTHENTICATE, 2)
            assert (answer["errorCode"], answer["sessionLifetimeMs"] > 0) == (0, mechanism == "OAUTHBEARER")
            assert codec.decode_response((await client.frame())[4:], METADATA, 12)[1]["brokers"]
            assert counted(here)["client", mechanism, "renewed"] == 1
            client.close()

    live(test())
    assert all(name.startswith("logins") for name in checking)


def test_a_connection_that_ends_while_its_token_is_checked_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    checking: list[bytes] = []
    checked = PlainCheck.receive

    def receive(self: PlainCheck, token: bytes) -> Any:
        checking.append(token)
        if len(checking) > 1:
            assert goes_on.wait(60)
        return checked(self, token)

    monkeypatch.setattr(PlainCheck, "receive", receive)
    monkeypatch.setattr(PlainCheck, "is_slow", lambda *_: True)

    async def test() -> None:
        async with served(tmp_path, AUTHENTICATION) as here:
            client = await entered(here)
            assert (await asked(client, HANDSHAKE, 1, {"mechanism": "PLAIN"}))["errorCode"] == 0
            await client.send(request(AUTHENTICATE, 2, 5, {"authBytes": b"\0alice\0pass of alice"}))
            await here.until(lambda: len(checking) == 2)
            (relay,) = here.server.relays.worker.relays.values()
            relay.close("operator")
            goes_on.set()
            logins = here.server.clusters[0]._logins
            await here.until(lambda: not logins._checked_apart)
            assert counted(here) == {("client", "PLAIN", "success"): 1, ("client", "PLAIN", "disconnected"): 1}
            assert here.server.relays.worker.held.held_bytes == 0

    live(test())
    assert "defect" not in caplog.text


@pytest.mark.parametrize(
    "settings", [LOGIN.replace("PLAIN", "SCRAM-SHA-256"), AUTHENTICATION], ids=["at brokers", "of clients"]
)
def test_the_modules_that_check_scram_are_imported_before_the_first_login(tmp_path: Path, settings: str) -> None:
    """This runs in a process of its own, where no other test has imported modules."""

    async def test() -> None:
        broker = Broker()
        file = written(tmp_path, broker, settings)
        code = f"""
import asyncio, sys
from kproxy.proxy.config.load import load
from kproxy.proxy.process.server import Server
async def main():
    server = Server(load({str(file)!r}))
    assert "scramp" not in sys.modules
    assert await server.preflight() == []
    print("scramp" in sys.modules)
asyncio.run(main())
"""
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert output == b"True\n"
        broker.close()

    live(test())
