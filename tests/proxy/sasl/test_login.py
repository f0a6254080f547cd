"""kproxy's login as a dialogue, with brokers that answer by the schema: the bytes sent, and the text of refusals."""

from collections.abc import Callable
from typing import Any

import pytest
from scramp import ScramMechanism

from kproxy.errors import UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS
from kproxy.proxy.sasl.login import LoggedIn, Versions, log_in
from kproxy.proxy.sasl.mechanisms import OAuthBearer, Plain, Scram
from kproxy.proxy.sasl.secrets import Secret

HANDSHAKE, AUTHENTICATE = 17, 36
PASSWORD = "correct horse, battery = staple"


class Broker:
    """Answers a login. offers: the newest version by API; checks: a client's token -> the broker's."""

    def __init__(
        self,
        checks: Callable[[bytes], bytes],
        mechanisms: tuple[str, ...] = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"),
        offers: dict[int, int] | None = None,
        lifetime_ms: int = 0,
    ) -> None:
        self.checks = checks
        self.mechanisms = mechanisms
        self.offers = {HANDSHAKE: 1, AUTHENTICATE: 2} if offers is None else offers
        self.lifetime_ms = lifetime_ms
        self.asked: list[tuple[int, int]] = []
        self.tokens: list[bytes] = []
        self.raw = False

    def __call__(self, data: bytes) -> bytes:
        size, frame = int.from_bytes(data[:4], "big"), data[4:]
        assert size == len(frame)
        if self.raw:
            self.tokens.append(frame)
            return self.checks(frame)
        header, body = codec.decode_request(frame)
        key, version = header["requestApiKey"], header["requestApiVersion"]
        self.asked.append((key, version))
        return codec.encode_response(
            key, version, {"correlationId": header["correlationId"]}, self.answer(key, version, body)
        )

    def answer(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        if key == API_VERSIONS:
            offers = [{"apiKey": key, "minVersion": 0, "maxVersion": newest} for key, newest in self.offers.items()]
            return {"apiKeys": offers}
        if key == HANDSHAKE:
            self.raw = version == 0
            return {"errorCode": 0 if body["mechanism"] in self.mechanisms else 33, "mechanisms": list(self.mechanisms)}
        self.tokens.append(body["authBytes"])
        try:
            return {"authBytes": self.checks(body["authBytes"]), "sessionLifetimeMs": self.lifetime_ms}
        except PermissionError as fault:
            return {"errorCode": 58, "errorMessage": str(fault)}


def run(mechanism: Any, broker: Broker, versions: Versions | None = None) -> LoggedIn:
    dialogue = log_in(mechanism, versions=versions)
    step = next(dialogue)
    while True:
        try:
            step = dialogue.send(broker(step.data))
        except StopIteration as end:
            done: LoggedIn = end.value
            return done


def scram(name: str) -> Callable[[bytes], bytes]:
    """A broker's side of SCRAM that knows alice."""
    mechanism = ScramMechanism(name)
    known = mechanism.make_auth_info(PASSWORD)
    server = mechanism.make_server(lambda user: known if user == "alice" else None)
    replies = iter((server.get_server_first, server.get_server_final))
    takes = iter((server.set_client_first, server.set_client_final))

    def check(token: bytes) -> bytes:
        try:
            next(takes)(token.decode())
            return next(replies)().encode()
        except Exception as fault:
            raise PermissionError(f"Authentication failed for {PASSWORD}") from fault

    return check


@pytest.mark.parametrize("offers", [{HANDSHAKE: 1, AUTHENTICATE: 2}, {HANDSHAKE: 1, AUTHENTICATE: 0}, {HANDSHAKE: 0}])
@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_logs_in_at_brokers_of_every_age(name: str, offers: dict[int, int]) -> None:
    broker = Broker(scram(name), offers=offers, lifetime_ms=3000)
    done = run(Scram(name, "alice", Secret(PASSWORD)), broker)
    assert done.lifetime_ms == (3000 if offers.get(AUTHENTICATE) == 2 else 0)
    assert len(broker.tokens) == 2
    assert broker.asked[1] == (HANDSHAKE, 1 if AUTHENTICATE in offers else 0)


def test_plain_sends_what_rfc_4616_asks_for_and_again_without_asking_versions() -> None:
    broker = Broker(lambda token: b"", lifetime_ms=60_000)
    done = run(Plain("alice", Secret(PASSWORD)), broker)
    assert broker.tokens == [f"\0alice\0{PASSWORD}".encode()]
    assert broker.asked == [(API_VERSIONS, 0), (HANDSHAKE, 1), (AUTHENTICATE, 2)]
    run(Plain("alice", Secret(PASSWORD)), broker, done.versions)
    assert broker.asked[3:] == [(HANDSHAKE, 1), (AUTHENTICATE, 2)]


def test_oauthbearer_acknowledges_an_error_and_then_fails() -> None:
    """RFC 7628, 3.2.3, as Kafka's brokers do it: the reason comes as a challenge, the refusal after one more token."""

    def check(token: bytes) -> bytes:
        if token == b"\x01":
            raise PermissionError("invalid_token")
        assert token == b"n,,\x01auth=Bearer a.b.c\x01\x01"
        return b'{"status":"invalid_token"}'

    with pytest.raises(UpstreamError, match="refuses kproxy's login by OAUTHBEARER: invalid_token") as refused:
        run(OAuthBearer(Secret("a.b.c")), Broker(check))
    assert refused.value.cause == "login_failed"


def test_the_error_of_a_wrong_password_does_not_contain_it() -> None:
    for mechanism in (Scram("SCRAM-SHA-256", "alice", Secret("guessed")), Plain("alice", Secret("guessed"))):

        def echo(token: bytes) -> bytes:
            raise PermissionError("no: guessed")

        with pytest.raises(UpstreamError) as refused:
            run(mechanism, Broker(echo))
        assert refused.value.cause == "login_failed"
        assert "no: ***" in str(refused.value) and "guessed" not in str(refused.value)


def test_a_mechanism_that_the_broker_does_not_offer() -> None:
    broker = Broker(lambda token: b"", mechanisms=("SCRAM-SHA-512", "GSSAPI"))
    with pytest.raises(UpstreamError, match="does not offer PLAIN; it offers SCRAM-SHA-512, GSSAPI") as refused:
        run(Plain("alice", Secret(PASSWORD)), broker)
    assert refused.value.cause == "login_mechanism"
    assert not broker.tokens


class Plaintext(Broker):
    def answer(self, key: int, version: int, body: dict[str, Any]) -> dict[str, Any]:
        return {"errorCode": 34, "mechanisms": []} if key == HANDSHAKE else super().answer(key, version, body)


@pytest.mark.parametrize("broker", [Plaintext(lambda token: b""), Broker(lambda token: b"", offers={3: 0})])
def test_a_broker_without_sasl(broker: Broker) -> None:
    with pytest.raises(UpstreamError) as refused:
        run(Plain("alice", Secret(PASSWORD)), broker)
    assert refused.value.cause == "login_unsupported"
    assert not broker.tokens


def test_a_broker_without_a_valid_server_signature_is_refused() -> None:
    """It would learn nothing from SCRAM but could play the real one."""
    genuine = scram("SCRAM-SHA-256")

    def forged(token: bytes) -> bytes:
        reply = genuine(token)
        return b"v=" + b"A" * 43 + b"=" if reply.startswith(b"v=") else reply

    with pytest.raises(UpstreamError, match="does not prove itself") as refused:
        run(Scram("SCRAM-SHA-256", "alice", Secret(PASSWORD)), Broker(forged))
    assert refused.value.cause == "login_protocol"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 40,
        b"r=x,s=QUFBQUFBQUFBQUFBQUFBQUFB,i=4096",
        b"e=other-error",
        b"r=%s,s=QUFBQUFBQUFBQUFBQUFBQUFB,i=9999999",
        b"r=%s,s=QUFBQUFBQUFBQUFBQUFBQUFB,i=1000001",
        b"r=%s,s=QUFBQUFBQUFBQUFBQUFBQUFB,i=4095",
        b"r=%s,s=QUFBQUFBQUFBQUFBQUFBQUFB,i=-1",
    ],
)
def test_malformed_answers_of_a_broker_are_errors_and_cost_little(answer: bytes) -> None:
    def check(token: bytes) -> bytes:
        return answer.replace(b"%s", token.partition(b"r=")[2] + b"more")

    with pytest.raises(UpstreamError) as refused:
        run(Scram("SCRAM-SHA-256", "alice", Secret(PASSWORD)), Broker(check))
    assert refused.value.cause == "login_protocol"


def test_answers_that_do_not_decode() -> None:
    dialogue = log_in(Plain("alice", Secret(PASSWORD)))
    next(dialogue)
    with pytest.raises(UpstreamError) as refused:
        dialogue.send(b"\0\0\0\x12\0")
    assert refused.value.cause == "login_protocol"
    dialogue = log_in(Plain("alice", Secret(PASSWORD)))
    next(dialogue)
    with pytest.raises(UpstreamError, match="something else"):
        dialogue.send(codec.encode_response(API_VERSIONS, 0, {"correlationId": 4}, {}))
