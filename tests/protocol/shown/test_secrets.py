import re

from kproxy.protocol.schema import schema
from kproxy.protocol.shown.secrets import SECRETS, redact

TELLING = re.compile(r"password|hmac|salt|secret|authbytes|storedkey|serverkey|requestdata|responsedata", re.IGNORECASE)


def paths(fields, prefix=""):
    for field in fields:
        yield prefix + field.name, field
        yield from paths(field.fields, f"{prefix}{field.name}.")


def test_every_field_with_a_telling_name_is_on_the_list():
    messages = [message for api in schema().apis.values() for message in (api.request, api.response)]
    telling = {}
    for message in (*messages, *schema().data.values()):
        named = {path for path, field in paths(message.fields) if TELLING.search(field.name)}
        if named:
            telling[message.name] = named
    assert telling == {name: set(fields) for name, fields in SECRETS.items()}


def test_secrets_are_masked_and_nothing_else():
    body = {"authBytes": b"\0alice\0wonderland", "lifetime": 5}
    assert redact("SaslAuthenticateRequest", body, len) == {
        "authBytes": 17,
        "lifetime": 5,
    }
    assert body["authBytes"] == b"\0alice\0wonderland"
    assert redact("SaslAuthenticateResponse", {"authBytes": None}, lambda value: "?") == {"authBytes": None}
    tokens = {"tokens": [{"tokenId": "a", "hmac": b"x"}, {"tokenId": "b", "hmac": b"y"}], "hmac": b"not one"}
    assert redact("DescribeDelegationTokenResponse", tokens, lambda value: "?") == {
        "tokens": [{"tokenId": "a", "hmac": "?"}, {"tokenId": "b", "hmac": "?"}],
        "hmac": b"not one",
    }


def test_reserved_keys_pass():
    body = {"_tags": {5: b"x"}, "_trailing": b"y", "authBytes": b"z"}
    assert redact("SaslAuthenticateRequest", body, len) == {"_tags": {5: b"x"}, "_trailing": b"y", "authBytes": 1}


def test_configuration_is_judged_by_its_name():
    configs = [
        {"name": "ssl.keystore.password", "value": "hunter2"},
        {"name": "listener.name.x.plain.sasl.jaas.config", "value": "username=..."},
        {"name": "retention.ms", "value": "1000"},
        {"name": "ssl.key.password", "value": None},
    ]
    body = {"resources": [{"resourceName": "1", "configs": configs}]}
    masked = redact("IncrementalAlterConfigsRequest", body, lambda value: "?")["resources"][0]["configs"]
    assert [config["value"] for config in masked] == ["?", "?", "1000", None]
