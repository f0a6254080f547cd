"""Secrets are nowhere: known ones go through kproxy on both sides, by every mechanism, right and wrong; then all that
kproxy writes, answers and keeps is searched for them, as they are and as base64, hex or percent-encoded."""

import base64
import time
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from confluent_kafka import KafkaException, Producer

from kproxy.errors import ConfigError
from kproxy.proxy.config.load import load
from tests.broker.cluster import wait_for
from tests.broker.secured import SecuredBroker
from tests.broker.security import MECHANISMS, OAUTHBEARER, USERS
from tests.broker.test_authentication import authentication, client
from tests.broker.test_clients import consume
from tests.broker.test_login import kproxy_with, login, produced

GUESSED = "guessed-but-secret-all-the-same"


def written_as(secret: str) -> Iterator[bytes]:
    """Every way in which somebody may have written it; of base64 the part that is the same wherever it stands."""
    data = secret.encode()
    yield from (data, data.hex().encode(), data.hex().upper().encode(), quote(secret, safe="").encode())
    yield repr(data)[2:-1].encode()
    for before in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + data)[4 if before else 0 : -4]


def found(texts: dict[str, bytes], secrets: list[str]) -> list[tuple[str, str]]:
    return [
        (where, secret)
        for secret in secrets
        for way in set(written_as(secret))
        for where, text in texts.items()
        if way in text
    ]


def test_the_search_finds_what_it_is_for() -> None:
    for text in (b"x" + base64.b64encode(b"\0alice\0" + b"hunter2hunter2"), b"68756e74657232" * 2, b"hunter2hunter2"):
        assert found({"log": text}, ["hunter2hunter2"])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_secret_is_in_anything_that_kproxy_writes_answers_or_keeps(
    secured: SecuredBroker, tmp_path: Path, mechanism: str
) -> None:
    import pyarrow.parquet

    folder = tmp_path / "kproxy"
    folder.mkdir()
    tables = tmp_path / "tables"
    settings = (
        f"detail = 'batches'\n[cluster.login]\n{login(secured, mechanism, folder)}"
        f"{authentication(secured, folder, 'session_lifetime_s = 1')}"
    )
    topic = f"topic-{uuid.uuid4()}"
    of_client = client(secured, mechanism)
    tokens = [secured.security.tokens.token("alice"), secured.security.tokens.token("mallory", iss="https://another")]
    if mechanism == OAUTHBEARER:
        of_client["oauth_cb"] = lambda _: (tokens[0], time.time() + 3600)
    texts: dict[str, bytes] = {}
    with kproxy_with(secured, folder, settings, more=("--record", str(tables))) as kproxy:
        records = produced(kproxy.bootstrap, topic, 20, **of_client)
        consume(kproxy.bootstrap, topic, len(records), **of_client)
        time.sleep(2)  # kproxy's login and the clients' are renewed
        wrong = {**of_client, "log_level": 0, "bootstrap.servers": kproxy.bootstrap}
        if mechanism == OAUTHBEARER:
            wrong["oauth_cb"] = lambda _: (tokens[1], time.time() + 3600)
        else:
            wrong["sasl.password"] = GUESSED
        refused = Producer(wrong)

        def failed() -> bool:
            return kproxy.metric("kproxy_authentications_total", mechanism=mechanism, outcome="failed") > 0

        wait_for("a refused login", failed)
        with pytest.raises(KafkaException):
            refused.list_topics(timeout=0.5)
        for path in ("/metrics", "/api/clusters", "/api/connections", "/api/traffic", "/ready"):
            texts[path] = kproxy.get(path).encode()
        process = kproxy._process
        assert process is not None
        texts["arguments"] = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    texts["log"] = kproxy.log.read_bytes()
    assert b"has logged in as User:alice" in texts["log"]
    for file in tables.rglob("*"):
        if file.is_file():
            texts[str(file)] = file.read_bytes()
            if file.suffix == ".parquet":
                texts[f"rows of {file}"] = str(pyarrow.parquet.read_table(file).to_pylist()).encode()
    assert any("exchanges" in name for name in texts)
    config = load(folder / "kproxy.toml", {}, {"listen": "127.0.0.1:1", "bootstrap": "127.0.0.1:2"})
    texts["settings"] = f"{config!r} {config} {config.model_dump()} {config.clusters[0].model_dump_json()}".encode()
    stored = [key for line in (folder / "users").read_text().splitlines()[1:] for key in line.split(":")[4:]]
    token = folder / "token"
    secrets = [*USERS.values(), GUESSED, *tokens, *stored, *([token.read_text().strip()] if token.exists() else [])]
    assert found(texts, secrets) == []
    signatures = [one.rsplit(".", 1)[1] for one in secrets if one.count(".") == 2]
    assert found(texts, signatures) == []


@pytest.mark.parametrize(
    "text",
    [
        "[cluster.login]\nmechanism = 'PLAIN'\nusername = 'a'\npassword = '{}'\n",
        "[cluster.login]\nmechanism = 'OAUTHBEARER'\ntoken = '{}'\n",
        "[cluster.login]\nmechanism = 'PLAIN'\nusername = 'a'\npassword_file = ['{}']\n",
        "[cluster.login]\nmechanism = 'OAUTHBEARER'\ntoken_command = 'token --secret {}'\n",
        "login = '{}'\n",
        "authentication = '{}'\n",
        "[cluster.authentication]\nmechanisms = ['PLAIN']\nusers = '{}'\n",
    ],
)
def test_a_secret_that_stands_where_it_must_not_is_not_repeated(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text("[[cluster]]\nlisten = '127.0.0.1:1'\nbootstrap = '127.0.0.1:2'\n" + text.format(GUESSED))
    with pytest.raises(ConfigError) as fault:
        load(file)
    texts = (repr(fault.value), str(fault.value), "".join(traceback.format_exception(fault.value)))
    assert found({str(number): one.encode() for number, one in enumerate(texts)}, [GUESSED]) == []
