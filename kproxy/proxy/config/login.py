"""`[cluster.login]`: kproxy's SASL logins at brokers, and the identity for each client.

The configuration file contains no secrets, since users print it, copy it and keep it in version control: it names files
and variables that contain them, or a command that prints one. Refuses to open any of these.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from kproxy.proxy.config.model import Frozen
from kproxy.proxy.config.policy import principal_pattern

MechanismName = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

_SECRETS = {"password": "password_file or password_env", "token": "token_file or token_command"}


class Credentials(Frozen):
    """An identity to log in with: a name and the place of its password, or the source of a token."""

    username: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")] | None = None  # the name to log in with
    password_file: Path | None = None  # file of the password, read at each login; one newline at its end is ignored
    password_env: Annotated[str, Field(min_length=1)] | None = None  # the variable that holds the password
    token_file: Path | None = None  # file of an OAUTHBEARER token, read at each login
    # a command that prints an OAUTHBEARER token, as a list of words; no shell
    token_command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_secrets(cls, values: Any) -> Any:
        for name in _SECRETS.keys() & (values.keys() if isinstance(values, dict) else ()):
            raise ValueError(f"a {name} does not stand in this file, which others read: give {_SECRETS[name]}")
        return values


class ForPrincipal(Credentials):
    """`[[cluster.login.by_principal]]`: the identity to log in with for clients of that principal."""

    # whose clients: a principal, or a pattern like User:app-*
    principal: Annotated[str, Field(min_length=1), AfterValidator(principal_pattern)]
    mechanism: MechanismName | None = None  # default: that of [cluster.login]


class Login(Credentials):
    """`[cluster.login]`: kproxy's own identity, also for its own requests for the brokers' addresses."""

    mechanism: MechanismName  # the SASL mechanism
    by_principal: tuple[ForPrincipal, ...] = ()  # the first entry that matches the client's principal
    # action for clients that no by_principal matches: refuse them, or log in as kproxy itself
    others: Literal["refuse", "own"] = "refuse"
    token_timeout_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 10.0  # seconds for token_command


def login_faults(login: Login, *, knows_clients: bool) -> Iterator[tuple[str, str]]:
    """Yield faults between the settings of a login. knows_clients: clients have principals."""
    yield from _credential_faults("login", login, login.mechanism)
    for number, one in enumerate(login.by_principal):
        yield from _credential_faults(f"login.by_principal[{number}]", one, one.mechanism or login.mechanism)
    if login.by_principal and not knows_clients:
        yield (
            "login.by_principal",
            "nothing says who a client is: add [cluster.authentication], or client certificates in [cluster.tls]",
        )


def _credential_faults(path: str, one: Credentials, mechanism: str) -> Iterator[tuple[str, str]]:
    passwords = [name for name in ("password_file", "password_env") if getattr(one, name) is not None]
    tokens = [name for name in ("token_file", "token_command") if getattr(one, name) is not None]
    if mechanism == "OAUTHBEARER":
        if len(tokens) != 1:
            yield path, "OAUTHBEARER needs a token: give one of token_file and token_command"
        if passwords or one.username is not None:
            yield path, "OAUTHBEARER has no username and no password, the token says who it is: leave them out"
        return
    if one.username is None:
        yield f"{path}.username", f"is missing: {mechanism} needs one"
    if len(passwords) != 1:
        yield path, f"{mechanism} needs a password: give one of password_file and password_env, not both"
    if tokens:
        yield f"{path}.{tokens[0]}", f"{mechanism} has no tokens: leave it out"
    if one.password_env is not None and one.password_env.startswith("KPROXY_"):
        yield f"{path}.password_env", "variables that begin with KPROXY_ are settings: take another name"
