"""`[cluster.authentication]`: the SASL mechanisms with which clients log in at kproxy, and the sources of their users.

Refuses to open the files that it names.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from kproxy.proxy.config.login import MechanismName
from kproxy.proxy.config.model import Frozen

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _https(value: Any) -> str:
    text = str(value).strip()
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ValueError("it is no URL: write it like https://issuer.example/keys") from None
    if url.username is not None or url.password is not None:
        raise ValueError("a secret in a URL ends in logs: public keys need none, give the URL without it")
    if url.scheme != "https":
        raise ValueError(f"{text!r} does not begin with https://: who can change the keys can forge any token")
    if not url.hostname or port == 0 or not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} is no URL of keys: write it like https://issuer.example/keys")
    return text


def _texts(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Authentication(Frozen):
    """`[cluster.authentication]`: kproxy serves a client only after checking its login."""

    mechanisms: Annotated[tuple[MechanismName, ...], Field(min_length=1)]  # the SASL mechanisms that clients may use
    # the users of PLAIN and SCRAM, written by `kproxy users add`; read again when it changes
    users_file: Path | None = None
    jwks_file: Path | None = None  # OAUTHBEARER: file of the keys that sign tokens
    # OAUTHBEARER: URL of these keys, by https
    jwks_url: Annotated[str, BeforeValidator(_https)] | None = None
    jwks_ca_file: Path | None = None  # CAs of that URL; default: those of the system
    jwks_refresh_s: _Seconds = 300.0  # seconds between two fetches of the keys
    issuer: str | None = None  # OAUTHBEARER: the issuer that tokens must name
    # OAUTHBEARER: one of these must be in the token's audience
    audience: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    # OAUTHBEARER: claim that names the client a token was issued to, like azp or client_id, if it has no audience
    client_claim: Annotated[str, Field(min_length=1)] | None = None
    # OAUTHBEARER: client_claim must be one of these
    allowed_clients: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    principal_claim: Annotated[str, Field(min_length=1)] = "sub"  # claim of a token that names the client
    # accepted difference of clocks, in seconds, when a token's times are checked
    clock_skew_s: Annotated[float, Field(ge=0, le=600, allow_inf_nan=False)] = 30.0
    # like a broker's connections.max.reauth.ms, in seconds; a token's expiry counts too
    session_lifetime_s: _Seconds | None = None
    # delay of the answer to a failed login, in seconds
    failure_delay_s: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.1


def authentication_faults(authentication: Authentication) -> Iterator[tuple[str, str]]:
    """Yield faults between the settings of an authentication: (setting, problem and remedy)."""
    path = "authentication"
    mechanisms = set(authentication.mechanisms)
    of_users = sorted(mechanisms - {"OAUTHBEARER"})
    if of_users and authentication.users_file is None:
        yield f"{path}.users_file", f"is missing: write one by `kproxy users add FILE NAME`, for {', '.join(of_users)}"
    if not of_users and authentication.users_file is not None:
        yield f"{path}.users_file", "no mechanism uses it: leave it out, or add PLAIN or SCRAM to mechanisms"
    keys = [name for name in ("jwks_file", "jwks_url") if getattr(authentication, name) is not None]
    if "OAUTHBEARER" in mechanisms:
        if len(keys) != 1:
            yield path, "OAUTHBEARER needs the keys that sign tokens: give one of jwks_file and jwks_url"
        if authentication.issuer is None or not (authentication.audience or authentication.allowed_clients):
            text = (
                "OAUTHBEARER needs issuer and audience: else tokens that were issued for others would do. For tokens "
                'without an audience say to whom they may have been issued: client_claim = "azp" and allowed_clients'
            )
            yield path, text
        if (authentication.client_claim is None) != (not authentication.allowed_clients):
            missing = "allowed_clients" if authentication.client_claim is not None else "client_claim"
            yield f"{path}.{missing}", "is missing: client_claim and allowed_clients belong together"
    elif keys:
        yield f"{path}.{keys[0]}", "no mechanism uses it: leave it out, or add OAUTHBEARER to mechanisms"
