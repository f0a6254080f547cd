"""The identity of kproxy for each client; secrets from files, variables and commands, changed and invalid ones."""

import asyncio
import base64
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy.errors import UpstreamError
from kproxy.proxy.config.login import Login
from kproxy.proxy.sasl.identities import Identities


def first(identities: Identities, principal: str | None = None) -> bytes:
    return asyncio.run(identities.of(principal).login()).first()


def refused(settings: dict[str, Any], principal: str | None = None) -> UpstreamError:
    with pytest.raises(UpstreamError) as fault:
        first(Identities(Login.model_validate(settings)), principal)
    return fault.value


def test_a_password_is_read_from_its_file_at_each_login(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" one two \n")
    identities = Identities(Login(mechanism="PLAIN", username="alice", password_file=file))
    assert first(identities) == b"\0alice\0 one two "
    file.write_text("changed\r\n")
    assert first(identities) == b"\0alice\0changed"


def test_a_password_of_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"mechanism": "PLAIN", "username": "alice", "password_env": "OF_ALICE"}
    assert "OF_ALICE" in str(refused(settings))
    monkeypatch.setenv("OF_ALICE", "hunter2")
    assert first(Identities(Login.model_validate(settings))) == b"\0alice\0hunter2"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "empty"),
        (b"\n", "empty"),
        (b"alice\nsecret\n", "several lines"),
        (b"a\0b", "control"),
        (b"\xff", "UTF-8"),
    ],
)
def test_files_that_hold_no_password(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    fault = refused({"mechanism": "PLAIN", "username": "alice", "password_file": file})
    assert fault.cause == "login_credentials"
    assert said in str(fault) and str(file) in str(fault)
    file.write_bytes(b"x" * 70_000)
    assert "larger" in str(refused({"mechanism": "PLAIN", "username": "alice", "password_file": file}))


def jwt(lifetime_s: float) -> str:
    body = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + lifetime_s}).encode()).decode().rstrip("=")
    return f"e30.{body}.c2ln"


def test_a_commands_token_is_kept_until_shortly_before_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 0.0
    clocks = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr("kproxy.proxy.sasl.identities.time", clocks)
    runs, tokens = tmp_path / "runs", tmp_path / "tokens"
    script = f"echo x >> {runs}; head -n $(wc -l < {runs}) {tokens} | tail -n 1"
    tokens.write_text(f"{jwt(300)}\n{jwt(3600)}\n")
    identities = Identities(Login(mechanism="OAUTHBEARER", token_command=("/bin/sh", "-c", script)))

    async def logins() -> None:
        nonlocal ahead_s
        identity = identities.of(None)
        await asyncio.gather(*(identity.login() for _ in range(5)))
        assert runs.read_text() == "x\n"  # one run for all who ask at once
        ahead_s = 200
        await identity.login()
        assert runs.read_text() == "x\n"
        ahead_s = 300 - 1  # a second before it expires
        token = (await identity.login()).first()
        assert token == f"n,,\x01auth=Bearer {tokens.read_text().split()[1]}\x01\x01".encode()
        await identity.login()
        assert runs.read_text() == "x\nx\n"

    asyncio.run(logins())


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/bin/sh", "-c", "echo hunter2; exit 3"], "status 3"),
        (["/bin/sh", "-c", "exec sleep 60"], "did not end within"),
        (["/bin/sh", "-c", "exec cat /dev/zero"], "more than"),
        (["/no/such/command"], "No such file"),
        (["/bin/true"], "empty"),
    ],
)
def test_commands_that_give_no_token(command: list[str], said: str) -> None:
    start = time.monotonic()
    timeout_s = 0.5 if said == "did not end within" else 30  # others end by themselves, on a busy machine after seconds
    fault = refused({"mechanism": "OAUTHBEARER", "token_command": command, "token_timeout_s": timeout_s})
    assert said in str(fault) and fault.cause == "login_credentials"
    assert "hunter2" not in repr(fault)
    assert time.monotonic() - start < 45  # and not as long as the command


def test_each_client_has_the_first_login_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    settings: dict[str, Any] = {
        "mechanism": "PLAIN",
        "username": "kproxy",
        "password_env": "SECRET",
        "by_principal": [
            {"principal": "User:alice", "username": "a", "password_env": "SECRET"},
            {"principal": "User:CN=app-*,OU=[x]", "username": "apps", "password_env": "SECRET"},
        ],
    }
    identities = Identities(Login.model_validate(settings))
    assert first(identities) == b"\0kproxy\0s"
    assert first(identities, "User:alice") == b"\0a\0s"
    assert first(identities, "User:CN=app-shop,OU=[x]") == b"\0apps\0s"
    for other in ("User:bob", "User:aliceX", "User:CN=app-shop,OU=x", "User:ANONYMOUS"):
        fault = refused(settings, other)
        assert fault.cause == "login_principal" and other in str(fault)
    assert first(Identities(Login.model_validate(settings | {"others": "own"})), "User:bob") == b"\0kproxy\0s"
    del settings["by_principal"]
    assert first(Identities(Login.model_validate(settings)), "User:bob") == b"\0kproxy\0s"
