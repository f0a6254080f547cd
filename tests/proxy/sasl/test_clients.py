"""Clients' logins, answered as brokers answer: every mechanism, every refusal, and any other bytes of a client."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scramp import ScramClient

from kproxy.errors import RefusedClient, UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.sasl.checks import MAX_SCRAM_BYTES, Checks, LoginRefusedError, ScramCheck
from kproxy.proxy.sasl.clients import Authenticator, Session
from kproxy.proxy.sasl.login import log_in
from kproxy.proxy.sasl.mechanisms import OAuthBearer, Plain, Scram
from kproxy.proxy.sasl.secrets import Secret
from kproxy.proxy.sasl.users import UsersFile, change
from kproxy.proxy.upstream.login import converse
from tests.proxy.sasl.test_tokens import checker, token

HANDSHAKE, AUTHENTICATE = 17, 36
ALL = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> UsersFile:
    path: Path = tmp_path_factory.mktemp("users") / "users"
    change(path, "alice", "pass of alice")
    return UsersFile(path)


class Talk:
    """A client's end and kproxy's of one login, in queues."""

    def __init__(self, host: str = "10.0.0.1") -> None:
        self.host = host
        self.requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.counted: list[tuple[str, str]] = []

    async def receive(self) -> bytes:
        frame = await self.requests.get()
        if frame is None:
            raise EOFError
        return frame

    async def send(self, frame: bytes) -> None:
        self.answers.put_nowait(frame)

    async def versions(self, version: int, correlation_id: int) -> bytes:
        offers = [
            {"apiKey": key, "minVersion": 0, "maxVersion": newest} for key, newest in ((17, 1), (36, self.newest))
        ]
        return codec.encode_response(API_VERSIONS, version, {"correlationId": correlation_id}, {"apiKeys": offers})

    newest = 2

    async def exchange(self, data: bytes) -> bytes:
        """As a client: send a frame with its size, wait for the answer."""
        self.requests.put_nowait(data[4:])
        answer = asyncio.ensure_future(self.answers.get())
        done, _ = await asyncio.wait([answer, self.login], return_when=asyncio.FIRST_COMPLETED)
        if answer in done or not self.answers.empty():
            return await answer
        answer.cancel()
        raise EOFError("closed")

    login: "asyncio.Task[Session]"


def authenticator(users: UsersFile, talk: Talk, lifetime_s: float | None = None) -> Authenticator:
    async def refresh(newer: bool) -> None:
        pass

    checks = Checks(ALL, users, checker())
    counts = lambda *outcome: talk.counted.append(outcome)  # noqa: E731
    return Authenticator(checks, lifetime_s, 0.0, refresh, lambda newer: None, counts)


def mechanism(name: str, user: str = "alice", password: str = "pass of alice", bearer: str | None = None) -> Any:
    if name == "OAUTHBEARER":
        return OAuthBearer(Secret(bearer or token(sub=user)))
    return Plain(user, Secret(password)) if name == "PLAIN" else Scram(name, user, Secret(password))


def logged_in(
    users: UsersFile, name: str, newest: int = 2, lifetime_s: float | None = 3.0, **more: Any
) -> tuple[Session, Talk]:
    """kproxy's own login as the client: both sides against each other."""

    async def run() -> tuple[Session, Talk]:
        talk = Talk()
        talk.newest = newest
        talk.login = asyncio.ensure_future(authenticator(users, talk, lifetime_s).authenticate(talk))
        done = await converse(log_in(mechanism(name, **more)), talk.exchange)
        session = await talk.login
        assert done.lifetime_ms == (session.lifetime_ms if newest == 2 else 0)
        return session, talk

    return asyncio.run(run())


def refused(users: UsersFile, name: str, **more: Any) -> tuple[UpstreamError | EOFError, RefusedClient, Talk]:
    async def run() -> Any:
        talk = Talk()
        talk.login = asyncio.ensure_future(authenticator(users, talk).authenticate(talk))
        with pytest.raises((UpstreamError, EOFError)) as of_client:
            await converse(log_in(mechanism(name, **more)), talk.exchange)
        with pytest.raises(RefusedClient) as of_kproxy:
            await talk.login
        return of_client.value, of_kproxy.value, talk

    return asyncio.run(run())


@pytest.mark.parametrize("newest", [2, 0, -1])
@pytest.mark.parametrize("name", ALL)
def test_a_client_with_the_password_logs_in(users: UsersFile, name: str, newest: int) -> None:
    session, talk = logged_in(users, name, newest)
    assert (session.known.name, session.mechanism, session.lifetime_ms) == ("alice", name, 3000)
    assert talk.counted == [(name, "success")]


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("PLAIN", {"password": "guessed"}, "Authentication failed: Invalid username or password"),
        ("PLAIN", {"user": "mallory"}, "Authentication failed: Invalid username or password"),
        ("PLAIN", {"password": "a\0b"}, "expected 3 tokens, got 4"),
        ("SCRAM-SHA-256", {"password": "guessed"}, "invalid credentials with SASL mechanism SCRAM-SHA-256"),
        ("SCRAM-SHA-512", {"user": "mallory"}, "invalid credentials with SASL mechanism SCRAM-SHA-512"),
        ("OAUTHBEARER", {"bearer": "a.b.c"}, "invalid_token"),
        ("OAUTHBEARER", {"bearer": "bad token"}, "Invalid OAUTHBEARER client first message"),
    ],
)
def test_a_client_without_it_gets_the_error_of_a_broker(users: UsersFile, name: str, more: Any, said: str) -> None:
    of_client, of_kproxy, talk = refused(users, name, **more)
    assert said in str(of_client) and getattr(of_client, "cause", "") == "login_failed"
    assert of_kproxy.cause == "authentication" and f"its login by {name} failed" in str(of_kproxy)
    assert talk.counted == [(name, "failed")]
    for secret in ("guessed", "pass of", "a.b.c", "bad token"):
        assert secret not in str(of_kproxy) + str(of_client)


def test_a_token_that_expires_after_the_end_of_time_is_good_for_a_year(users: UsersFile) -> None:
    session, _ = logged_in(users, "OAUTHBEARER", bearer=token(exp=10**30), lifetime_s=None)
    assert session.lifetime_ms == 366 * 86400 * 1000


def test_a_session_ends_with_its_token(users: UsersFile) -> None:
    talk = Talk()
    session, _ = logged_in(users, "OAUTHBEARER", bearer=token(exp=time.time() + 2))
    assert 0 < session.lifetime_ms <= 2000
    assert authenticator(users, talk).lifetime_ms(session.known) <= 2000
    assert authenticator(users, talk, 1.0).lifetime_ms(session.known) <= 1000


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_delegation_token_is_named_in_the_log_and_refused_like_a_wrong_password(users: UsersFile, name: str) -> None:
    """As ScramSaslClient of Kafka begins a login by a token (KIP-48)."""
    for extension in ("tokenauth=true", "tokenauth=TRUE", "other=1,tokenauth=true"):
        with pytest.raises(LoginRefusedError, match=f"invalid credentials with SASL mechanism {name}") as caught:
            ScramCheck(name, users).receive(f"n,,n=alice,r=abc,{extension}".encode())
        assert "delegation tokens cannot be checked here" in caught.value.reason
    for first in ("n,,n=tokenauth=3Dtrue,r=abc", "n,,n=alice,r=tokenauth=true"):
        answer, known = ScramCheck(name, users).receive(first.encode())
        assert answer.startswith(b"r=") and known is None


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_a_message_of_scram_that_is_too_long_is_not_read(users: UsersFile, name: str) -> None:
    """SASLprep of a name takes a millisecond for 200 characters, and the square of that for marks that combine."""
    fits = f"n,,n={'a' * (MAX_SCRAM_BYTES - 11)},r=abc".encode()
    assert len(fits) == MAX_SCRAM_BYTES and ScramCheck(name, users).is_slow(fits)
    answer, known = ScramCheck(name, users).receive(fits)
    assert answer.startswith(b"r=abc") and known is None
    with pytest.raises(LoginRefusedError, match=f"invalid credentials with SASL mechanism {name}") as caught:
        ScramCheck(name, users).receive(fits + b"d")
    assert "a message of 2049 bytes: kproxy reads 2048 at most" in caught.value.reason
    first = ScramClient([name], "alice", "pass of alice").get_client_first().encode()
    assert not ScramCheck(name, users).is_slow(first)


def test_a_message_that_is_not_read_is_not_called_a_wrong_password(users: UsersFile) -> None:
    """The client gets the answer of brokers to either; the log has the reason."""
    for first, reason in (
        (b"p=tls-unique,,n=alice,r=abc", "channel binding"),
        (b"\0alice\0pass of alice", "its first message is none of SCRAM"),
        (b"n,,n=alice", "its first message is none of SCRAM"),
        (b"n,,n=alice,r=abc,other=1", "or has an extension"),
        (b"\xff\xfe", "its first message is none of SCRAM"),
    ):
        with pytest.raises(LoginRefusedError, match="invalid credentials with SASL mechanism") as caught:
            ScramCheck("SCRAM-SHA-256", users).receive(first)
        assert reason in caught.value.reason and "pass of" not in caught.value.reason
    for password, cut, reason in (
        ("wrong", str, "wrong password, or no such user: 'alice'"),
        ("pass of alice", lambda final: final.split(",p=")[0], "its second message is none of SCRAM"),
    ):
        check, client = ScramCheck("SCRAM-SHA-256", users), ScramClient(["SCRAM-SHA-256"], "alice", password)
        client.set_server_first(check.receive(client.get_client_first().encode())[0].decode())
        with pytest.raises(LoginRefusedError) as caught:
            check.receive(cut(client.get_client_final()).encode())
        assert reason in caught.value.reason


@pytest.mark.parametrize("is_forged", [False, True])
def test_a_nonce_that_repeats_the_clients_part_is_accepted_and_no_other(users: UsersFile, is_forged: bool) -> None:
    """librdkafka before 2.6.1 repeats it."""
    check = ScramCheck("SCRAM-SHA-256", users)
    client = ScramClient(["SCRAM-SHA-256"], "alice", "pass of alice")
    first, _ = check.receive(client.get_client_first().encode())
    client.set_server_first(first.decode())
    own, whole = client.c_nonce, client.nonce
    client.nonce = type(whole)(f"{own}{str(whole)[:-1] if is_forged else whole}")
    final = client.get_client_final().encode()
    if is_forged:
        with pytest.raises(LoginRefusedError):
            check.receive(final)
        return
    answer, known = check.receive(final)
    client.set_server_final(answer.decode())
    assert known is not None and known.name == "alice"


class Gs2Header(str):
    def make_cbind_input(self, _: Any) -> bytes:
        return self.encode()


@pytest.mark.parametrize("asked, sent", [("alice", "alice"), ("root", "root"), ("alice", ""), ("alice", "root")])
def test_an_authorization_id_of_scram_is_accepted_if_it_is_the_users_name(
    users: UsersFile, asked: str, sent: str
) -> None:
    """As ScramSaslServer of Kafka does; `sent` is the id that the last message repeats (RFC 5802, `c=`)."""
    check = ScramCheck("SCRAM-SHA-256", users)
    client = ScramClient(["SCRAM-SHA-256"], "alice", "pass of alice")
    client.gs2_header = Gs2Header(f"n,a={asked},")
    first = client.get_client_first().encode()
    assert first.startswith(f"n,a={asked},n=alice,r=".encode())
    if asked != "alice":
        with pytest.raises(LoginRefusedError, match="an authorization id that is different from username"):
            check.receive(first)
        return
    client.set_server_first(check.receive(first)[0].decode())
    client.gs2_header = Gs2Header(f"n,a={sent},")
    final = client.get_client_final().encode()
    if sent != "alice":
        with pytest.raises(LoginRefusedError, match="invalid credentials"):
            check.receive(final)
        return
    answer, known = check.receive(final)
    client.set_server_final(answer.decode())
    assert known is not None and known.name == "alice"


def request(key: int, version: int, body: dict[str, Any]) -> bytes:
    header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": 5, "clientId": "c"}
    return codec.encode_request(header, body)


def answers_to(users: UsersFile, *frames: bytes) -> tuple[list[bytes], BaseException, Talk]:
    async def run() -> Any:
        talk = Talk()
        for frame in frames:
            talk.requests.put_nowait(frame)
        talk.requests.put_nowait(None)
        fault: BaseException | None = None
        try:
            async with asyncio.timeout(20):
                await authenticator(users, talk).authenticate(talk)
        except (RefusedClient, OSError) as refused:
            fault = refused
        return [talk.answers.get_nowait() for _ in range(talk.answers.qsize())], fault, talk

    return asyncio.run(run())


NAMED = request(API_VERSIONS, 3, {"clientSoftwareName": "shop", "clientSoftwareVersion": "1"})
PLAIN = request(HANDSHAKE, 1, {"mechanism": "PLAIN"})
TOKEN = request(AUTHENTICATE, 2, {"authBytes": b"\0alice\0pass of alice"})


MANY_TAGS = dict.fromkeys(range(20_000), b"")  # decoding all of them takes as long as 50 logins


@pytest.mark.parametrize(
    ("frames", "count", "outcome"),
    [
        ((request(METADATA, 12, {"topics": []}),), 0, ("", "state")),
        ((NAMED, request(METADATA, 12, {"topics": []})), 1, ("", "state")),
        ((PLAIN, request(METADATA, 12, {"topics": []})), 1, ("PLAIN", "state")),
        ((TOKEN,), 0, ("", "state")),
        ((PLAIN, PLAIN), 1, ("PLAIN", "state")),
        ((NAMED,) * 5, 3, ("", "state")),
        ((request(HANDSHAKE, 1, {"mechanism": "GSSAPI"}),), 1, ("", "mechanism")),
        ((request(HANDSHAKE, 1, {"mechanism": "x" * 30_000}),), 1, ("", "mechanism")),
        ((NAMED, PLAIN), 2, ("PLAIN", "disconnected")),
        ((), 0, ("", "disconnected")),
        ((b"",), 0, ("", "malformed")),
        ((PLAIN[:12],), 0, ("", "malformed")),
        ((PLAIN, TOKEN[:-3]), 1, ("PLAIN", "malformed")),
        ((request(API_VERSIONS, 3, {"_tags": MANY_TAGS}),), 0, ("", "malformed")),
        ((PLAIN, request(AUTHENTICATE, 2, {"_tags": MANY_TAGS})), 1, ("PLAIN", "malformed")),
    ],
)
def test_a_request_that_is_no_login_ends_as_at_a_broker(
    users: UsersFile, frames: tuple[bytes, ...], count: int, outcome: tuple[str, str]
) -> None:
    answers, fault, talk = answers_to(users, *frames)
    assert len(answers) == count and fault is not None
    assert talk.counted == [outcome]
    if outcome[1] == "mechanism":
        body = codec.decode_response(answers[0], HANDSHAKE, 1)[1]
        assert (body["errorCode"], body["mechanisms"]) == (33, list(ALL))
        assert len(str(fault)) < 200


GUESSED = request(AUTHENTICATE, 2, {"authBytes": b"\0alice\0guessed"})
GSSAPI = request(HANDSHAKE, 1, {"mechanism": "GSSAPI"})


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        ((PLAIN, GUESSED), 1),  # before its answer
        ((GSSAPI,), 1),
        ((PLAIN, PLAIN), 1),
        ((PLAIN, TOKEN), 0),
        ((PLAIN, TOKEN[:-3]), 0),  # it does not decode: nothing was guessed
        ((PLAIN,), 0),
    ],
)
def test_a_login_that_is_refused_waits_once(
    users: UsersFile, monkeypatch: pytest.MonkeyPatch, frames: tuple[bytes, ...], waits: int
) -> None:
    waited: list[float] = []

    async def wait(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", wait)
    answers_to(users, *frames)
    assert waited == [0.0] * waits


def test_the_software_that_a_client_named_before_its_login_is_kept(users: UsersFile) -> None:
    _, fault, talk = answers_to(users, NAMED, PLAIN, TOKEN)
    assert fault is None and talk.counted == [("PLAIN", "success")]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from([NAMED, PLAIN, TOKEN, request(HANDSHAKE, 0, {"mechanism": "SCRAM-SHA-256"})]),
            st.builds(lambda data: request(AUTHENTICATE, 1, {"authBytes": data}), st.binary(max_size=200)),
            st.builds(
                lambda name: request(HANDSHAKE, 1, {"mechanism": name}), st.sampled_from([*ALL, "", "€", "plain"])
            ),
        ),
        max_size=14,
    ),
    st.integers(0, 1 << 30),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_no_bytes_of_a_client_crash_or_hang_a_login(users: UsersFile, frames: list[bytes], flip: int) -> None:
    if frames and frames[flip % len(frames)]:
        frame = bytearray(frames[flip % len(frames)])
        frame[flip % len(frame)] ^= 1 << flip % 8
        frames = [*frames, bytes(frame)]
    answers, _, talk = answers_to(users, *frames)
    assert len(answers) <= 12 and len(talk.counted) == 1


def test_a_renewal_does_not_wait_behind_clients_that_guess(tmp_path: Path) -> None:
    """Until the password changes. Unknown users and wrong passwords wait for their turn."""
    path = tmp_path / "users"
    change(path, "alice", "one password")
    file = UsersFile(path)
    checks = Checks(ALL, file, checker())
    right, wrong, unknown = b"\0alice\0one password", b"\0alice\0another password", b"\0bob\0one password"
    assert all(checks.of("PLAIN").is_slow(token) for token in (right, wrong, unknown))
    checks.of("PLAIN").receive(right)
    assert [checks.of("PLAIN").is_slow(token) for token in (right, wrong, unknown)] == [False, True, True]
    assert not any(checks.of("PLAIN").is_slow(token) for token in (b"", b"\xff", b"\0alice\0", b"a\0b\0c"))
    change(path, "alice", "another password")
    file.refresh()
    assert checks.of("PLAIN").is_slow(right) and checks.of("PLAIN").is_slow(wrong)
    with pytest.raises(LoginRefusedError):
        checks.of("PLAIN").receive(right)
    checks.of("PLAIN").receive(wrong)
    assert not checks.of("PLAIN").is_slow(wrong)

    async def log_in_beside_a_guess() -> Session:
        guess, talk = threading.Event(), Talk()
        login = Authenticator(checks, None, 0.0, lambda _: asyncio.sleep(0), lambda _: None, lambda *_: None)
        waits = asyncio.ensure_future(login.apart(talk.host, lambda: (b"", guess.wait() and None)))
        talk.login = asyncio.ensure_future(login.authenticate(talk))
        await converse(log_in(Plain("alice", Secret("another password"))), talk.exchange)
        session = await talk.login
        assert not waits.done()
        guess.set()
        await waits
        return session

    assert asyncio.run(log_in_beside_a_guess()).known.name == "alice"


def test_passwords_are_checked_one_after_another_for_addresses_in_turn(users: UsersFile) -> None:
    """However many are guessed at once: each takes milliseconds of a core, which the loop and others need too."""
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def check(name: str, *, waits: bool = False) -> tuple[bytes, None]:
        begun.set()
        assert not waits or go_on.wait(30)
        done.append(name)
        return name.encode(), None

    async def guess() -> None:
        checks = authenticator(users, Talk())
        first = asyncio.ensure_future(checks.apart("guesses", lambda: check("0", waits=True)))
        await asyncio.to_thread(begun.wait, 30)
        guesses = [asyncio.ensure_future(checks.apart("guesses", lambda n=n: check(f"{n}"))) for n in range(1, 20)]
        await asyncio.sleep(0)
        alice = asyncio.ensure_future(checks.apart("alice", lambda: check("alice")))
        bob = [asyncio.ensure_future(checks.apart("bob", lambda n=n: check(f"bob {n}"))) for n in range(2)]
        await asyncio.sleep(0)
        guesses.pop(0).cancel()  # its client has gone
        go_on.set()
        assert await alice == (b"alice", None)
        assert await bob[1] == (b"bob 1", None)
        assert await first == (b"0", None) and [answer for answer, _ in await asyncio.gather(*guesses)][-1] == b"19"

    asyncio.run(guess())
    assert done[:7] == ["0", "alice", "bob 0", "2", "bob 1", "3", "4"] and len(done) == 22
