"""kproxy reveals no secret: known secrets go through it on both sides, by every mechanism, right and wrong. Then
everything that it writes, responds and keeps is searched for them, verbatim and as base64, hex or percent-encoded."""

import base64
import json
import os
import signal
import socket
import subprocess
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from confluent_kafka import KafkaException, Producer

from kproxy.errors import ConfigError
from kproxy.protocol.schema import schema
from kproxy.proxy.config.load import load
from tests.broker.cluster import wait_for
from tests.broker.kproxy import KPROXY
from tests.broker.secured import SecuredBroker
from tests.broker.security import MECHANISMS, OAUTHBEARER, USERS
from tests.broker.test_authentication import authentication, client
from tests.broker.test_clients import consume
from tests.broker.test_login import kproxy_with, login, produced
from tests.wire.playbook import request, sized

GUESSED = "guessed-but-secret-all-the-same"
AUTHENTICATIONS = "kproxy_authentications_total"


def written_as(secret: str) -> Iterator[bytes]:
    """Every encoding in which the secret may be written; for base64 the part that does not depend on alignment."""
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


def test_the_search_finds_a_secret_in_every_encoding() -> None:
    for text in (b"x" + base64.b64encode(b"\0alice\0" + b"hunter2hunter2"), b"68756e74657232" * 2, b"hunter2hunter2"):
        assert found({"log": text}, ["hunter2hunter2"])


@pytest.mark.sampled(1)
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
        stays = Producer({"bootstrap.servers": kproxy.bootstrap, "linger.ms": 0} | of_client)

        def renewed() -> bool:
            stays.produce(topic, b"x")
            assert stays.flush(30) == 0
            counted = {"mechanism": mechanism, "outcome": "renewed"}
            return all(kproxy.metric(AUTHENTICATIONS, side=side, **counted) for side in ("client", "broker"))

        wait_for("renewed logins of a client and of kproxy", renewed)
        wrong = {**of_client, "log_level": 0, "bootstrap.servers": kproxy.bootstrap}
        if mechanism == OAUTHBEARER:
            wrong["oauth_cb"] = lambda _: (tokens[1], time.time() + 3600)
        else:
            wrong["sasl.password"] = GUESSED
        refused = Producer(wrong)

        def failed() -> bool:
            return kproxy.metric(AUTHENTICATIONS, mechanism=mechanism, outcome="failed") > 0

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
def test_a_misplaced_secret_is_not_repeated_in_the_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text("[[cluster]]\nlisten = '127.0.0.1:1'\nbootstrap = '127.0.0.1:2'\n" + text.format(GUESSED))
    with pytest.raises(ConfigError) as fault:
        load(file)
    texts = (repr(fault.value), str(fault.value), "".join(traceback.format_exception(fault.value)))
    assert found({str(number): one.encode() for number, one in enumerate(texts)}, [GUESSED]) == []


# --- requests with secrets, sound and damaged, and processes that are killed ------------------------------------------


def requests_with(secrets: dict[str, str]) -> Iterator[bytes]:
    """Requests with a secret each, of their oldest and newest versions; also as an unknown tagged field and behind the
    body."""
    configs = [
        {"name": "sasl.jaas.config", "value": f'required password="{secrets["jaas"]}";'},
        {"name": "ssl.key.password", "value": secrets["key_password"]},
    ]
    altered = [{"resourceType": 2, "resourceName": "t", "configs": configs}]
    created = {"name": "t", "numPartitions": 1, "replicationFactor": 1, "assignments": [], "configs": configs}
    upserted = {"name": "carol", "mechanism": 1, "iterations": 4096, "salt": b"salt"}
    pushed = {"clientInstanceId": uuid.uuid4(), "metrics": secrets["telemetry"].encode()}
    bodies: dict[str, dict[str, Any]] = {
        "AlterConfigs": {"resources": altered, "validateOnly": True},
        "IncrementalAlterConfigs": {"resources": altered, "validateOnly": True},
        "CreateTopics": {"topics": [created], "timeoutMs": 1000, "validateOnly": True},
        "AlterUserScramCredentials": {
            "deletions": [],
            "upsertions": [upserted | {"saltedPassword": secrets["salted"].encode()}],
        },
        "RenewDelegationToken": {"hmac": secrets["hmac"].encode(), "renewPeriodMs": 1},
        "ExpireDelegationToken": {"hmac": secrets["hmac"].encode()},
        "SaslAuthenticate": {"authBytes": b"\0alice\0" + secrets["password"].encode()},
        "Envelope": {
            "requestData": secrets["envelope"].encode(),
            "requestPrincipal": b"",
            "clientHostAddress": b"\x7f\0\0\1",
        },
        "PushTelemetry": pushed,
    }
    keys = {api.name: key for key, api in schema().apis.items()}
    for name, body in bodies.items():
        versions = schema().apis[keys[name]].request.versions
        for version in {versions[0], versions[-1]}:
            yield request(keys[name], version, 1, body)
    yield request(36, 2, 1, {"authBytes": b"x", "_tags": {99: secrets["tag"].encode()}})
    yield request(36, 2, 1, {"authBytes": b"x", "_trailing": secrets["trailing"].encode()})


def damaged(frame: bytes) -> Iterator[bytes]:
    yield frame[:-3]  # followed by the end of the stream
    yield sized(frame[4:-1])
    yield sized(frame[4:6] + b"\x7f\xff" + frame[8:])  # an unknown version
    yield sized(b"\x03\xe7" + frame[6:])  # an unknown API
    yield sized(frame[4 : len(frame) // 2]) + b"\xff" * 9


def non_frames(secrets: dict[str, str]) -> Iterator[tuple[bytes, ...]]:
    """Tokens without headers, at once and split, without a login, and bytes of other protocols."""
    tokens = {
        "PLAIN": b"\0alice\0" + secrets["password"].encode(),
        "SCRAM-SHA-256": b"n,,n=alice,r=" + secrets["nonce"].encode(),
        "OAUTHBEARER": b"n,,\x01auth=Bearer " + secrets["token"].encode() + b"\x01\x01",
        "GSSAPI": b"\x60" + secrets["token"].encode(),
    }
    for mechanism, token in tokens.items():
        frame = sized(token)
        for version in (0, 1):
            handshake = request(17, version, 1, {"mechanism": mechanism})
            yield handshake, frame
            yield (handshake + frame,)
            yield from ((handshake + frame[:cut], frame[cut:]) for cut in (1, 4, 5, len(frame) // 2, len(frame) - 1))
        yield (frame,)
        yield (token,)
    yield (b"GET / HTTP/1.1\r\nAuthorization: Basic " + secrets["password"].encode() + b"\r\n\r\n",)
    yield (b"\x16\x03\x01\x02\0" + secrets["password"].encode() * 9,)
    yield (b"PROXY TCP4 " + secrets["password"].encode(),)


def send(bootstrap: str, *parts: bytes) -> None:
    host, _, port = bootstrap.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.settimeout(0.1)
        for part in parts:
            with suppress(OSError):
                sock.sendall(part)
                sock.recv(1 << 16)


def processes_of(pid: int) -> list[int]:
    """A process and its descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_no_secret_of_a_request_is_written_even_if_it_is_damaged_or_a_worker_is_killed(
    secured: SecuredBroker, tmp_path: Path, workers: int
) -> None:
    import pyarrow.parquet

    names = ("jaas", "key_password", "salted", "hmac", "password", "envelope", "telemetry", "tag", "trailing", "nonce")
    secrets = {
        name: f"secret-{name}-{uuid.uuid4().hex}" for name in (*names, "token", "key", "value", "header", "admin")
    }
    settings = "detail = 'batches'\n[[cluster.policy]]\naction = 'deny'\napi = 'CreateDelegationToken'\n"
    (tmp_path / "admin").write_text(secrets["admin"])
    flight = f"[flight]\nfolder = '{tmp_path}/flight'\ntriggers = ['error', 'disconnect']\npause_s = 1\n"
    more = (*("--record", f"{tmp_path}/tables"), *("--audit", f"{tmp_path}/audit"), *("--workers", str(workers)))
    texts: dict[str, bytes] = {}
    with kproxy_with(secured, tmp_path, settings + flight, "CLIENT", more) as kproxy:
        ctl = [str(KPROXY), "ctl", "-a", kproxy.admin]
        traced = tmp_path / "trace"
        with traced.open("wb") as file:
            trace = subprocess.Popen([*ctl, "trace", "--client", "127.0.0.1", "--json"], stdout=file, stderr=file)
        wait_for("the trace", lambda: traced.stat().st_size > 0)
        producer = Producer({"bootstrap.servers": kproxy.bootstrap, "compression.type": "zstd"})
        producer.produce("secrets", secrets["value"], secrets["key"], headers={"h": secrets["header"]})
        assert producer.flush(30) == 0
        for frame in requests_with(secrets):
            send(kproxy.bootstrap, frame)
            for other in damaged(frame):
                send(kproxy.bootstrap, other)
        for parts in non_frames(secrets):
            send(kproxy.bootstrap, *parts)
        dumped: list[dict[str, Any]] = []

        def dump() -> bool:
            done = subprocess.run([*ctl, "dump", "--json"], capture_output=True, check=False)
            dumped.extend([json.loads(done.stdout)] if done.returncode == 0 else [])
            return bool(dumped)

        wait_for("a dump", dump)
        trace.send_signal(signal.SIGINT)
        trace.wait(30)
        for path in ("/metrics", "/api/clusters", "/api/connections", "/api/traffic", "/api/live", "/api/groups"):
            texts[path] = kproxy.get(path).encode()
        assert kproxy._process is not None
        running = processes_of(kproxy._process.pid)
        for pid in running:
            for name in ("cmdline", "environ"):
                with suppress(OSError):
                    texts[f"/proc/{pid}/{name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
        if workers > 1:
            for pid, number in zip(running[1:], (signal.SIGABRT, signal.SIGSEGV), strict=False):
                os.kill(pid, number)
            again = Producer({"bootstrap.servers": kproxy.bootstrap})
            again.produce("secrets", secrets["value"])
            assert again.flush(60) == 0 and kproxy.is_alive()
    log = kproxy.log.read_text()
    assert "Traceback" not in log and "defect" not in log
    assert traced.stat().st_size > 10_000 and dumped[0]["frames"] > 100
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.name != "admin":
            texts[str(file)] = file.read_bytes()
            if file.suffix == ".parquet":
                texts[f"rows of {file}"] = str(pyarrow.parquet.read_table(file).to_pylist()).encode()
    assert any("audit" in name for name in texts) and any("changes" in name for name in texts)
    assert found(texts, list(secrets.values())) == []
