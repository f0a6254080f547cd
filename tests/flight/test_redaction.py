"""No frame of any API and version gets into a dump with a secret, wherever the protocol has room for one."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kproxy.errors import Malformed
from kproxy.flight.cutting import Frame
from kproxy.flight.redaction import allowance, written
from kproxy.protocol import codec
from kproxy.protocol.schema import schema
from kproxy.protocol.shown.secrets import SECRETS, redact
from kproxy.wire.events import BROKER, CLIENT
from tests.flight.test_frames import INFO

SECRET = "hunter2-secret"
BYTES = SECRET.encode()
UNKNOWN: tuple[Mapping[str, Any], ...] = ({}, {"_trailing": BYTES}, {"_tags": {99: BYTES}})


def filled(fields: Any, path: str, secrets: Any) -> dict[str, Any]:
    """A body with a secret in each field that holds one, configurations too."""
    body: dict[str, Any] = {}
    for field in fields:
        if field.fields:
            inner = filled(field.fields, f"{path}{field.name}.", secrets)
            body[field.name] = [inner] if field.type.startswith("[]") else inner
        elif f"{path}{field.name}" in secrets:
            body[field.name] = SECRET if field.type == "string" else BYTES
        elif field.type == "records" or field.name == "unalignedRecords":
            body[field.name] = b""
    if {"name", "value"} <= {field.name for field in fields}:
        body |= {"name": "sasl.jaas.config", "value": SECRET}
    return body


def frames() -> Iterator[Frame]:
    for key, api in schema().apis.items():
        for side, kind in ((CLIENT, "request"), (BROKER, "response")):
            for version in getattr(api, kind).versions:
                message = codec.api_message(key, version, kind)
                body = filled(message.fields_of(version), "", SECRETS.get(message.name, ()))
                for unknown in UNKNOWN:
                    try:
                        if side == CLIENT:
                            header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": 1}
                            data = codec.encode_request(header, {**body, **unknown})
                        else:
                            data = codec.encode_response(key, version, {"correlationId": 1}, {**body, **unknown})
                    except Malformed:
                        assert "_tags" in unknown  # which old versions do not have
                        continue
                    data = len(data).to_bytes(4, "big") + data
                    yield Frame(INFO, side, 1, 1, len(data), data, (key, version), 1)


def test_bytes_are_redacted_in_every_api_and_version_and_in_unknown_fields() -> None:
    names = set()
    for frame in frames():
        data, note = written(frame, allowance(), records=True)
        if BYTES in frame.data:
            assert frame.api is not None
            names.add((frame.api, frame.side))
            assert BYTES not in data and len(data) == len(frame.data) and note
        else:
            assert data == frame.data and not note
    assert {((36, 2), CLIENT), ((51, 0), CLIENT), ((44, 1), CLIENT), ((33, 2), CLIENT), ((32, 4), BROKER)} <= names
    assert len(names) > 500  # all have a place behind the body


def test_pushed_metrics_are_left_out_like_records() -> None:
    header = {"requestApiKey": 72, "requestApiVersion": 0, "correlationId": 1}
    data = codec.encode_request(header, {"metrics": BYTES})
    frame = Frame(INFO, CLIENT, 1, 1, len(data) + 4, len(data).to_bytes(4, "big") + data, (72, 0), 1)
    shown, _ = written(frame, allowance(), records=False)
    assert BYTES not in shown and len(shown) == len(frame.data)
    assert written(frame, allowance(), records=True) == (frame.data, "")


@pytest.mark.parametrize(
    "name",
    [
        "confluent.schema.registry.basic.auth.user.info",
        "listener.name.sasl_ssl.plain.sasl.jaas.config",
        "aws.access.key.id",
        "metrics.api_key",
        "db.passwd",
        "vault.token",
        "ssl.keystore.key",
        "tier.encryption_key",
        "webhook.authorization",
        "confluent.license",
    ],
)
def test_names_of_configurations_that_hold_secrets(name: str) -> None:
    assert redact("x", {"name": name, "value": SECRET}, lambda _: "") == {"name": name, "value": ""}


@pytest.mark.parametrize(
    "name",
    [
        "retention.ms",
        "delegation.token.expiry.time.ms",
        "log.message.key.type",
        "ssl.protocol",
        "authorizer.class.name",
    ],
)
def test_names_of_configurations_that_hold_none(name: str) -> None:
    assert redact("x", {"name": name, "value": "1"}, lambda _: "") == {"name": name, "value": "1"}
