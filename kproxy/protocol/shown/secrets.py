"""The fields with secrets, and their masking in decoded messages before they are shown or stored.

A secret lets its reader log in or impersonate: SASL tokens, HMACs of delegation tokens, SCRAM credentials, passwords
among configuration values, and a forwarded request, which may contain any of these. Keys and values of records are
data, not secrets, and so are the metrics that clients push (`CONTENT`). A test compares the list with the schema, so
that a new field with a suspicious name is noticed.
"""

import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

SECRETS: dict[str, frozenset[str]] = {
    "SaslAuthenticateRequest": frozenset(("authBytes",)),
    "SaslAuthenticateResponse": frozenset(("authBytes",)),
    "CreateDelegationTokenResponse": frozenset(("hmac",)),
    "RenewDelegationTokenRequest": frozenset(("hmac",)),
    "ExpireDelegationTokenRequest": frozenset(("hmac",)),
    "DescribeDelegationTokenResponse": frozenset(("tokens.hmac",)),
    "AlterUserScramCredentialsRequest": frozenset(("upsertions.salt", "upsertions.saltedPassword")),
    "EnvelopeRequest": frozenset(("requestData",)),
    "EnvelopeResponse": frozenset(("responseData",)),
    "UserScramCredentialRecord": frozenset(("salt", "storedKey", "serverKey")),
}

# Fields with clients' data other than records.
CONTENT: dict[str, str] = {"PushTelemetryRequest": "metrics"}

# Topics with such records in their values: KRaft's, whose id is always the same.
SECRET_TOPICS = frozenset(("__cluster_metadata", UUID(int=1)))

_SECRET_CONFIG = re.compile(
    r"password|passwd|passphrase|\bpwd\b|secret|jaas|credential|user\.info|connection[._-]?string|[._-]token$"
    r"|passcode|authorization|bearer|\blicen[cs]e$"
    r"|(keystore|private|master|access|account|api|encryption|signing|shared|symmetric|licen[cs]e|hmac)[._-]?key",
    re.IGNORECASE,
)

Mask = Callable[[Any], Any]


def redact(message: str, body: dict[str, Any], mask: Mask) -> dict[str, Any]:
    """Return a copy of a decoded body (or of its JSON) with each secret that is not null replaced by `mask(secret)`.

    A configuration entry, which is any struct with a name and a value, is judged by its name.
    """
    return _struct(body, SECRETS.get(message, frozenset()), "", mask)


def _struct(body: dict[str, Any], paths: frozenset[str], prefix: str, mask: Mask) -> dict[str, Any]:
    name = body.get("name")
    secret_config = isinstance(name, str) and "value" in body and _SECRET_CONFIG.search(name) is not None
    out: dict[str, Any] = {}
    for key, value in body.items():
        if value is not None and (f"{prefix}{key}" in paths or (secret_config and key == "value")):
            value = mask(value)
        elif isinstance(value, dict):
            value = _struct(value, paths, f"{prefix}{key}.", mask)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            value = [_struct(item, paths, f"{prefix}{key}.", mask) for item in value]
        out[key] = value
    return out
