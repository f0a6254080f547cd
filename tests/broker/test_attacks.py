"""Hostile clients before a real cluster behind kproxy: ambiguous requests, pipelines, logins out of order."""

import json
import random
import socket
import struct
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kproxy.protocol import codec
from kproxy.protocol.apis import ILLEGAL_SASL_STATE, UNKNOWN_TOPIC_ID
from kproxy.protocol.primitives import write_uvarint
from kproxy.protocol.schema import schema
from kproxy.proxy.sasl import users
from tests.broker.cluster import Cluster
from tests.broker.test_policy import audited, policy
from tests.broker.tools import create_topic

KEYS = {api.name: key for key, api in schema().apis.items()}
TOPIC_DENIED, GROUP_DENIED = 29, 30
LOGIN_FAILED = 58


def request(api: str, version: int, body: dict[str, Any], correlation_id: int = 1) -> bytes:
    return codec.framed_request(KEYS[api], version, correlation_id, "attacker", body)


class Client:
    """A connection that sends bytes unchanged."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.sock = socket.create_connection((host, int(port)), timeout=30)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def frame(self) -> bytes | None:
        """The next response, or None at the end of the stream."""
        size = self._read(4)
        return None if size is None else self._read(int.from_bytes(size))

    def _read(self, count: int) -> bytes | None:
        data = b""
        try:
            while len(data) < count and (part := self.sock.recv(count - len(data))):
                data += part
        except ConnectionResetError:
            return None
        return data if len(data) == count else None

    def ask(self, api: str, version: int, body: dict[str, Any]) -> dict[str, Any]:
        self.sock.sendall(request(api, version, body))
        return self.answer(api, version)

    def answer(self, api: str, version: int) -> dict[str, Any]:
        frame = self.frame()
        assert frame is not None, api
        return codec.decode_response(frame, KEYS[api], version)[1]


# --- ambiguous requests -----------------------------------------------------------------------------------------------


def fetch(public: uuid.UUID, secret: uuid.UUID, tag: bytes) -> bytes:
    """Fetch v17 that names one topic if the tagged field of a partition is skipped, and both if it is read as Kafka
    does.

    Kafka reads 16 bytes of the field and continues in what looks like its rest.
    """

    def partition(tags: bytes = b"\0") -> bytes:
        return struct.pack(">iiqiqi", 0, -1, 0, -1, -1, 1 << 20) + tags

    def topic(id_: uuid.UUID) -> bytes:
        return id_.bytes + write_uvarint(2) + partition() + b"\0"

    rest = b"\0" + topic(public) + b"\1\1\0"
    inner = bytes(16) + b"\0" + topic(secret) + b"\1\1\1" + write_uvarint(99) + write_uvarint(len(rest))
    hidden = partition(b"\1" + tag + write_uvarint(len(inner)) + inner)
    body = struct.pack(">iiibii", 500, 1, 1 << 20, 0, 0, -1) + write_uvarint(3)
    body += public.bytes + write_uvarint(2) + hidden + rest
    frame = struct.pack(">hhihs", 1, 17, 6, 1, b"c") + b"\0" + body
    return len(frame).to_bytes(4) + frame


def test_a_request_that_a_broker_would_read_differently_is_not_forwarded(cluster: Cluster, tmp_path: Path) -> None:
    """Ambiguous by a wrong size, and by a tag of more than 32 bits."""
    public, secret = create_topic(cluster.bootstrap), create_topic(cluster.bootstrap)
    rule = ("[[cluster.policy]]", 'action = "deny"', f'topic = "{secret}"')
    with policy(cluster, tmp_path, *rule) as kproxy:
        with Client(cluster.bootstrap.split(",")[0]) as direct:
            topics = direct.ask("Metadata", 12, {"topics": None})["topics"]
        ids = {topic["name"]: topic["topicId"] for topic in topics}
        with Client(kproxy.bootstrap) as client:
            wanted = {"partitions": [{"partition": 0, "partitionMaxBytes": 1 << 20}]}
            body = {"sessionEpoch": -1, "topics": [{"topicId": ids[name]} | wanted for name in (public, secret)]}
            client.ask("Metadata", 12, {"topics": None})
            answer = client.ask("Fetch", 17, body)
            errors = {topic["topicId"]: topic["partitions"][0]["errorCode"] for topic in answer["responses"]}
            # the second until kproxy has looked up its name
            assert errors[ids[secret]] in (TOPIC_DENIED, UNKNOWN_TOPIC_ID)
        for number, tag in enumerate((b"\0", b"\x80\x80\x80\x80\x10"), 1):
            with Client(kproxy.bootstrap) as client:
                client.sock.sendall(fetch(ids[public], ids[secret], tag))
                assert client.frame() is None
            assert kproxy.metric("kproxy_policy_refusals_total", api="Fetch", reason="malformed") == number
    reasons = [line["reason"] for line in audited(tmp_path) if line["api"] == "Fetch"]
    assert reasons[0] in ("rule", "unknown_topic_id") and reasons[1:] == ["malformed", "malformed"]


# --- pipelines --------------------------------------------------------------------------------------------------------

Asked = tuple[str, int, dict[str, Any], Callable[[dict[str, Any]], bool]]


def pipelined(dice: random.Random, public: str) -> Asked:
    """(API, version, body, predicate for the expected response): forwarded, refused, edited, or answered by kproxy."""

    def read(topic: str, wait_ms: int) -> dict[str, Any]:
        partition = {"partition": 0, "fetchOffset": 0, "partitionMaxBytes": 1 << 20}
        return {"maxWaitMs": wait_ms, "minBytes": 1 << 20, "maxBytes": 1 << 20} | {
            "topics": [{"topic": topic, "partitions": [partition]}]
        }

    def denied(body: dict[str, Any]) -> bool:
        return bool(body["responses"][0]["partitions"][0]["errorCode"] == TOPIC_DENIED)

    named = {"topics": [{"name": public}, {"name": "secret-1"}]}
    settings = {"resources": [{"resourceType": 2, "resourceName": "secret-" + "y" * dice.choice((3, 30_000))}]}
    create = {"topics": [{"name": "secret-2", "numPartitions": 1, "replicationFactor": 1}], "validateOnly": True}
    asked: list[Asked] = [
        ("ApiVersions", 3, {"clientSoftwareName": "x", "clientSoftwareVersion": "1"}, lambda b: b["errorCode"] == 0),
        (
            "Metadata",
            9,
            named,
            lambda b: {t["name"]: t["errorCode"] for t in b["topics"]} == {public: 0, "secret-1": 29},
        ),
        ("Metadata", 12, {"topics": None}, lambda b: not any("secret" in t["name"] for t in b["topics"])),
        ("Metadata", 1, {"topics": []}, lambda b: not b["topics"]),
        ("Fetch", 4, read(public, dice.choice((0, 20, 60))), lambda b: not denied(b)),
        ("Fetch", 4, read("secret-1", 10), denied),
        ("ListGroups", 4, {}, lambda b: b["errorCode"] == 0),
        ("DescribeGroups", 5, {"groups": ["g-1", "ok"]}, lambda b: b["groups"][0]["errorCode"] == GROUP_DENIED),
        (
            *("FindCoordinator", 4, {"keyType": 0, "coordinatorKeys": ["g-2"]}),
            lambda b: b["coordinators"][0]["errorCode"] == GROUP_DENIED,
        ),
        ("CreateTopics", 5, create, lambda b: b["topics"][0]["errorCode"] == TOPIC_DENIED),
        ("DescribeConfigs", 4, settings, lambda b: all(r["errorCode"] == TOPIC_DENIED for r in b["results"])),
        ("SaslHandshake", 1, {"mechanism": "PLAIN"}, lambda b: b["errorCode"] == ILLEGAL_SASL_STATE),
        ("Produce", 9, {"acks": 0, "timeoutMs": 100, "topicData": []}, lambda b: False),
    ]
    return dice.choice(asked)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_flight", [1, 30])
def test_pipelines_split_anywhere_get_responses_in_order_by_the_policy(
    cluster: Cluster, tmp_path: Path, in_flight: int
) -> None:
    public = create_topic(cluster.bootstrap)
    rules = ("[[cluster.policy]]", 'action = "deny"', 'topic = "secret-*"')
    rules += ("[[cluster.policy]]", 'action = "deny"', 'group = "g-*"')
    limits = ("[cluster.limits]", f"max_requests_in_flight = {in_flight}")
    dice = random.Random(in_flight)
    seen: Counter[str] = Counter()
    with policy(cluster, tmp_path, *limits, *rules) as kproxy:
        for _ in range(40):
            asked = [
                (dice.choice((7, dice.getrandbits(31))), *pipelined(dice, public)) for _ in range(dice.randint(1, 20))
            ]
            data = b"".join(request(api, version, body, id_) for id_, api, version, body, _ in asked)
            cuts = sorted(dice.sample(range(1, len(data)), min(dice.choice((0, 1, 5, 20)), len(data) - 1)))
            with Client(kproxy.bootstrap) as client:
                client.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
                    client.sock.sendall(data[begin:end])
                for id_, api, version, _, is_right in asked:
                    if api == "Produce":  # gets no response
                        continue
                    frame = client.frame()
                    assert frame is not None and int.from_bytes(frame[:4]) == id_, api
                    body = codec.decode_response(frame, KEYS[api], version)[1]
                    assert is_right(body), (api, version, body)
                    seen[api] += 1
        assert kproxy.metric("kproxy_protocol_faults_total") == 0
        assert sum(seen.values()) > 200 and len(seen) == 9, seen


# --- logins that kproxy checks ----------------------------------------------------------------------------------------


def handshake(version: int = 1, mechanism: str = "PLAIN") -> bytes:
    return request("SaslHandshake", version, {"mechanism": mechanism})


def token(name: str, acts_as: str = "") -> bytes:
    return f"{acts_as}\0{name}\0pass of bob".encode()


def authenticate(data: bytes) -> bytes:
    return request("SaslAuthenticate", 1, {"authBytes": data})


def sized(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def test_logins_in_any_order_give_no_rights_of_other_users(cluster: Cluster, tmp_path: Path) -> None:
    """Bob may see one topic, alice both: pipelines, renewals as alice, raw tokens followed by requests."""
    public, secret = create_topic(cluster.bootstrap), create_topic(cluster.bootstrap)
    for name in ("alice", "bob"):
        users.change(tmp_path / "users", name, f"pass of {name}")
    rules = ("[[cluster.policy]]", 'action = "allow"', 'principal = "User:alice"', f'topic = "{secret}"')
    rules += ("[[cluster.policy]]", 'action = "allow"', f'topic = "{public}"')
    logins = (
        "[cluster.authentication]",
        'mechanisms = ["PLAIN", "SCRAM-SHA-256"]',
        f"users_file = '{tmp_path / 'users'}'",
    )

    def offsets(topic: str) -> bytes:
        return request("ListOffsets", 1, {"replicaId": -1, "topics": [{"name": topic, "partitions": [{}]}]})

    def error(client: Client) -> int:
        (topic,) = client.answer("ListOffsets", 1)["topics"]
        return int(topic["partitions"][0]["errorCode"])

    with policy(cluster, tmp_path, *logins, *rules) as kproxy:

        def client(*sent: bytes) -> Client:
            made = Client(kproxy.bootstrap)
            made.sock.sendall(b"".join(sent))
            return made

        def renewed(*sent: bytes) -> Client:
            made = client(handshake(), authenticate(token("bob")))
            made.frame(), made.frame()
            made.sock.sendall(b"".join(sent))
            return made

        with client(handshake(), authenticate(token("bob")), offsets(secret), offsets(public)) as bob:
            assert [bob.answer(api, 1)["errorCode"] for api in ("SaslHandshake", "SaslAuthenticate")] == [0, 0]
            assert error(bob) == TOPIC_DENIED and error(bob) != TOPIC_DENIED
        raw = sized(token("bob"))
        with client(handshake(0), raw, offsets(secret), offsets(public)) as bob:  # behind a raw token, in its packet
            assert bob.answer("SaslHandshake", 0)["errorCode"] == 0 and bob.frame() == b""
            assert error(bob) == TOPIC_DENIED and error(bob) != TOPIC_DENIED
        with renewed(handshake(), authenticate(token("alice")), offsets(secret)) as bob:
            assert bob.answer("SaslHandshake", 1)["errorCode"] == 0
            assert bob.answer("SaslAuthenticate", 1)["errorCode"] == LOGIN_FAILED and bob.frame() is None
        with renewed(authenticate(token("alice")), offsets(secret)) as bob:  # without a handshake
            assert bob.answer("SaslAuthenticate", 1)["errorCode"] == ILLEGAL_SASL_STATE and error(bob) == TOPIC_DENIED
        with renewed(handshake(0), sized(b"x" * 20), offsets(public)) as bob:  # raw tokens later
            assert bob.answer("SaslHandshake", 0)["errorCode"] == ILLEGAL_SASL_STATE
            assert bob.frame() is None
        for name, acts_as in (
            ("bob", "alice"),
            ("BOB", ""),
            ("bob ", ""),
            (" bob", ""),
            ("b\u043eb", ""),
            ("bob\u200b", ""),
        ):
            with client(handshake(), authenticate(token(name, acts_as)), offsets(public)) as bob:
                assert bob.answer("SaslHandshake", 1)["errorCode"] == 0
                assert bob.answer("SaslAuthenticate", 1)["errorCode"] == LOGIN_FAILED and bob.frame() is None
        for first in (offsets(public), handshake(mechanism="plain"), handshake(0) + sized(b""), sized(b"\x60\x82x")):
            with client(first, offsets(public)) as nobody:
                frames = iter(nobody.frame, None)
                assert all(len(frame) < 80 for frame in frames)  # a refusal at most, then the end of the stream
        assert kproxy.metric("kproxy_authentications_total", outcome="success") == 5
    assert secret not in json.dumps([line for line in audited(tmp_path) if line["decision"] == "allow"])
