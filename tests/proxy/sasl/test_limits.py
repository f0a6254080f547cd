"""Size limits of files, commands, servers and clients in logins: the largest size is accepted, the next refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kproxy.errors import KproxyError, UpstreamError
from kproxy.proxy.config.settings import Login
from kproxy.proxy.sasl import identities, mechanisms, tokens, users
from kproxy.proxy.sasl.checks import SHORT_SCRAM_BYTES, LoginRefusedError, ScramCheck, TokenCheck
from kproxy.proxy.sasl.identities import Identities
from kproxy.proxy.sasl.mechanisms import MAX_ITERATIONS, MIN_ITERATIONS, Scram
from kproxy.proxy.sasl.secrets import Secret
from kproxy.proxy.sasl.tokens import MAX_NAME, MAX_TOKEN_BYTES, TokenError
from kproxy.proxy.sasl.users import UsersError, credential, lines, parse
from tests.proxy.sasl.test_tokens import RSA, checker, issuer, jwk, jwks, token  # noqa: F401 (a fixture)

SHA_256 = "SCRAM-SHA-256"


@pytest.mark.parametrize("iterations, is_taken", [
    (MIN_ITERATIONS - 1, False),
    (MIN_ITERATIONS, True),
    (MAX_ITERATIONS, True),
    (MAX_ITERATIONS + 1, False),
    (MIN_ITERATIONS * 10**9, False),
])  # fmt: skip
def test_iterations_of_a_file_of_users(iterations: int, is_taken: bool) -> None:
    (line,) = lines({"alice": {SHA_256: credential(SHA_256, "hunter2", 4096)}})
    line = line.replace(":4096:", f":{iterations}:")
    if is_taken:
        assert parse(line)["alice"][SHA_256].iterations == iterations
    else:
        with pytest.raises(UsersError, match="line 1: iterations are a number from 4096 to"):
            parse(line)


@pytest.mark.parametrize("length", [1, MAX_NAME - 1, MAX_NAME, MAX_NAME + 1])
def test_names_in_tokens(length: int) -> None:
    one, made = checker(), token(sub="a" * length)
    assert one.claimed(made) == ("a" * length if length <= MAX_NAME else "")
    if length <= MAX_NAME:
        assert one.check(made).name == "a" * length
    else:
        with pytest.raises(TokenError, match=f"has more than {MAX_NAME} characters"):
            one.check(made)


def test_keys_of_a_file_and_of_a_server(issuer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    url, ca = issuer
    keys = jwks(jwk(RSA, kid="one"))
    file = tmp_path / "jwks.json"
    file.write_bytes(keys)
    for room in (len(keys) + 1, len(keys), len(keys) - 1):
        monkeypatch.setattr(tokens, "MAX_JWKS_BYTES", room)
        for read in (lambda: tokens.read(file), lambda: tokens.fetch(f"{url}/keys", ca)):
            if room < len(keys):
                with pytest.raises(TokenError, match=f"more than {room} bytes"):
                    read()
            else:
                assert read() == keys


def test_tokens_of_files_and_of_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    for room in (7, 6, 5):
        monkeypatch.setattr(identities, "MAX_SECRET_BYTES", room)
        for source in ({"token_file": file}, {"token_command": ("/bin/cat", str(file))}):
            login = Identities(Login(mechanism="OAUTHBEARER", **source)).of(None).login()
            if room < 6:
                with pytest.raises(KproxyError, match=f"than {room} bytes"):
                    asyncio.run(login)
            else:
                assert b"secret" in (asyncio.run(login).first() or b"")


def test_messages_of_clients(tmp_path: Path) -> None:
    users.change(tmp_path / "users", "alice", "hunter2")
    scram = ScramCheck(SHA_256, users.UsersFile(tmp_path / "users"))
    slow = [scram.is_slow(bytes(SHORT_SCRAM_BYTES + more)) for more in (-1, 0, 1)]
    assert slow == [False, False, True]
    for more in (-1, 0, 1):
        head, end = b"n,,\1auth=Bearer ", b"\1\1"
        message = head + b"t" * (MAX_TOKEN_BYTES + more - len(head) - len(end)) + end
        if more > 0:
            with pytest.raises(LoginRefusedError, match="client first message"):
                TokenCheck(checker()).receive(message)
        else:
            assert TokenCheck(checker()).receive(message) == (b'{"status": "invalid_token"}', None)


@pytest.mark.parametrize("iterations, is_computed", [(4095, False), (4096, True), (5000, True), (5001, False)])
def test_iterations_that_a_broker_asks_for(iterations: int, is_computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "MAX_ITERATIONS", 5000)
    scram = Scram(SHA_256, "alice", Secret("hunter2"))
    nonce = scram.first().decode().partition(",r=")[2]
    challenge = f"r={nonce}more,s=c2FsdCBvZiB0d2VsdmU=,i={iterations}".encode()
    if is_computed:
        assert (scram.answer(challenge) or b"").startswith(b"c=biws,r=")
    else:
        with pytest.raises(UpstreamError, match=f"asks for {iterations} iterations|must not be < 4096"):
            scram.answer(challenge)
