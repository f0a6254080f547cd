"""The broker's side of each SASL mechanism: takes a client's tokens, returns its own, and the client's name at the end.

Error texts are those of Kafka's brokers: they go to the client, and do not reveal whether a user exists. A check of an
unknown user takes as long as any other. Bounds: MAX_TOKEN_BYTES of a token, MAX_SCRAM_BYTES of a SCRAM message. Refuses
to know Kafka's frames.
"""

import hmac
import json
import re
import secrets
from typing import Any, NamedTuple, Protocol

from kproxy.proxy.sasl.mechanisms import OAUTHBEARER, PLAIN
from kproxy.proxy.sasl.tokens import MAX_TOKEN_BYTES, TokenChecker, TokenError, UnknownKeyError
from kproxy.proxy.sasl.users import Credential, UsersFile, is_password

MAX_SCRAM_BYTES = 2048  # per message: SASLprep of a name of 64 KiB takes 1.4 s, most of it in one call
SHORT_SCRAM_BYTES = 256  # most messages are shorter: 0.2 ms

_PEPPER = secrets.token_bytes(32)  # of this process: the remembered digests are useless elsewhere
# The client's first message (RFC 7628, 3.1): a GS2 header, pairs that end with 0x01, and one more 0x01.
_BEARER = re.compile(r"n,(?:a=([^,]*))?,\x01(?:[A-Za-z]+=[^\x01]*\x01)*?auth=[Bb]earer +([^\x01 ]+)\x01")

# The nonce of a client's final message (RFC 5802). librdkafka before 2.6.1 puts its own part before the complete nonce
# once more, which brokers before 4.0 accept (by String.endsWith, since 3.7.2), and which proves as much.
_NONCE = re.compile(r",r=([^,]*)")
# The GS2 header of a client's first message with an authorization id (RFC 5802), which scramp does not read.
_AUTHORIZATION = re.compile(r"n,a=([^,]+),")
_OTHER_AUTHORIZATION_ID = "Authentication failed: Client requested an authorization id that is different from username"

_DELEGATION_TOKEN = (
    "delegation tokens cannot be checked here, since brokers alone know them: give this client a user of its own, or a "
    "cluster without [cluster.authentication], whose logins pass through to the brokers"
)


class LoginRefusedError(Exception):
    """A login is refused; the text is sent to the client. claimed: the name that the client gave, if any."""

    def __init__(self, text: str, reason: str = "", claimed: str = "") -> None:
        super().__init__(text)
        self.reason = reason or text  # for kproxy's own log
        self.claimed = claimed


class Known(NamedTuple):
    """An authenticated client."""

    name: str
    expires_s: float | None = None  # when its credential expires, in seconds since the epoch


class Check(Protocol):
    """The check of one login."""

    def is_slow(self, token: bytes) -> bool:
        """Whether `receive` of this token computes for milliseconds."""
        return False

    def receive(self, token: bytes) -> tuple[bytes, Known | None]:
        """Return (token to send, the client once it is authenticated). Raises LoginRefusedError."""


class Passwords:
    """Checks PLAIN against a file of users; remembers correct passwords, to check them quickly next time."""

    def __init__(self, users: UsersFile) -> None:
        self._users = users
        self._right: dict[str, bytes] = {}  # by name: digest of the password and its stored key

    def remembers(self, name: str, password: str) -> bool:
        """Whether it was correct before and the user's line is unchanged; takes microseconds."""
        _, known, exists = self._users.plain(name)
        return exists and self._is_remembered(name, _digest(known, password))

    def is_right(self, name: str, password: str) -> bool:
        mechanism, known, exists = self._users.plain(name)
        digest = _digest(known, password)
        if self._is_remembered(name, digest):
            return exists
        if not is_password(mechanism, password, known) or not exists:
            return False
        self._right[name] = digest
        return True

    def _is_remembered(self, name: str, digest: bytes) -> bool:
        return hmac.compare_digest(self._right.get(name, b""), digest)


def _digest(known: Credential, password: str) -> bytes:
    return hmac.digest(_PEPPER, known.stored_key + password.encode(), "sha256")


class PlainCheck(Check):
    def __init__(self, passwords: Passwords) -> None:
        self._passwords = passwords

    def is_slow(self, token: bytes) -> bool:
        """Return False for a remembered password, so that its client does not wait behind others that guess."""
        try:
            return not self._passwords.remembers(*self._parts(token))
        except LoginRefusedError:
            return False

    def receive(self, token: bytes) -> tuple[bytes, Known | None]:
        name, password = self._parts(token)
        if not self._passwords.is_right(name, password):
            raise LoginRefusedError(
                "Authentication failed: Invalid username or password",
                f"wrong password, or no such user: {name[:80]!r}",
                name,
            )
        return b"", Known(name)

    @staticmethod
    def _parts(token: bytes) -> tuple[str, str]:
        """(name, password)"""
        try:
            parts = token.decode().split("\0")
        except UnicodeDecodeError:
            raise LoginRefusedError("Invalid SASL/PLAIN response: it is not UTF-8") from None
        if len(parts) != 3:
            text = f"Invalid SASL/PLAIN response: expected 3 tokens, got {len(parts)}"
            raise LoginRefusedError(text)
        identity, name, password = parts
        if not name or not password:
            missing = "password" if name else "username"
            raise LoginRefusedError(f"Authentication failed: {missing} not specified")
        if identity and identity != name:
            raise LoginRefusedError(_OTHER_AUTHORIZATION_ID, claimed=name)
        return name, password


class ScramCheck(Check):
    def __init__(self, mechanism: str, users: UsersFile) -> None:
        from scramp import ScramMechanism  # needed only for logins by SCRAM

        self._mechanism = mechanism
        self._users = users
        self._name = ""
        self._exists = False
        self._server: Any = ScramMechanism(mechanism).make_server(self._credential)
        self._round = 0

    def _credential(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self._name = name
        known, self._exists = self._users.find(name, self._mechanism)
        return known.salt, known.stored_key, known.server_key, known.iterations

    def is_slow(self, token: bytes) -> bool:
        return len(token) > SHORT_SCRAM_BYTES

    def receive(self, token: bytes) -> tuple[bytes, Known | None]:
        self._round += 1
        if len(token) > MAX_SCRAM_BYTES:
            raise self._refused(f"a message of {len(token)} bytes: kproxy reads {MAX_SCRAM_BYTES} at most")
        try:
            text = token.decode()
            if self._round == 1:
                if _is_delegation_token(text):
                    raise self._refused(_DELEGATION_TOKEN)
                self._receive_first(text)
                return str(self._server.get_server_first()).encode(), None
            found = _NONCE.search(text)
            nonce = self._server.nonce
            if found is not None and found[1].endswith(str(nonce)):
                self._server.nonce = type(nonce)(found[1])
            self._server.set_client_final(text)
            final = str(self._server.get_server_final()).encode()
        except LoginRefusedError:
            raise
        except Exception as fault:  # raised by scramp
            error = getattr(fault, "server_error", None)
            is_wrong = getattr(error, "value", error) == "invalid-proof"
            raise self._refused("" if is_wrong else _why_unread(token, self._round)) from None
        if not self._exists:
            raise self._refused()
        return final, Known(self._name)

    def _receive_first(self, text: str) -> None:
        header = _AUTHORIZATION.match(text)
        if header is None:
            self._server.set_client_first(text)
            return
        self._server.set_client_first("n,," + text[header.end() :])
        if header[1] != self._name:
            raise LoginRefusedError(_OTHER_AUTHORIZATION_ID, claimed=self._name)
        self._server.gs2_header = _Header(header[0].encode())

    def _refused(self, reason: str = "") -> LoginRefusedError:
        whom = f": {self._name[:80]!r}" if self._name else ""
        return LoginRefusedError(
            f"Authentication failed during authentication due to invalid credentials with SASL mechanism "
            f"{self._mechanism}",
            reason or f"wrong password, or no such user{whom}",
            self._name,
        )


class _Header(NamedTuple):
    """A GS2 header with an authorization id, for scramp: the client's last message repeats it."""

    header: bytes

    def make_cbind_input(self, _: Any) -> bytes:
        return self.header


def _why_unread(token: bytes, number: int) -> str:
    """Return why the client's first or second message of SCRAM cannot be read."""
    if token.startswith(b"p="):
        return "it asks for channel binding (SCRAM-...-PLUS), which Kafka does not have"
    which = "first" if number == 1 else "second"
    return f"its {which} message is none of SCRAM (RFC 5802), or has an extension: is its mechanism the one it names?"


def _is_delegation_token(client_first: str) -> bool:
    """Whether it logs in with a delegation token (KIP-48): an extension after GS2 header, name and nonce."""
    return any(part.strip().lower() == "tokenauth=true" for part in client_first.split(",")[4:])


class TokenCheck(Check):
    """Checks a bearer token. A refused one is answered with an error (RFC 7628); the client's next token then fails."""

    def __init__(self, checker: TokenChecker) -> None:
        self._checker = checker
        self._reason = ""
        self._claimed = ""

    def is_slow(self, token: bytes) -> bool:
        """Return True: it is decoded for each possible key, 0.1 ms per key, 3 ms for a token of 64 KiB."""
        return True

    def receive(self, token: bytes, *, last: bool = True) -> tuple[bytes, Known | None]:
        """last: there is no retry with newer keys; otherwise UnknownKeyError is raised if these may help."""
        if self._reason:
            raise LoginRefusedError('{"status":"invalid_token"}', self._reason, self._claimed)
        found = _BEARER.match(token.decode("utf-8", "replace")) if len(token) <= MAX_TOKEN_BYTES else None
        if found is None:
            raise LoginRefusedError("Invalid OAUTHBEARER client first message", "no bearer token in its first message")
        try:
            claims = self._checker.check(found[2])
            if found[1] and found[1] != claims.name:
                raise TokenError("it asks for another authorization id than the token's")
        except UnknownKeyError as fault:
            if not last:
                raise
            self._refused(found[2], str(fault))
        except TokenError as fault:
            self._refused(found[2], str(fault))
        else:
            return b"", Known(claims.name, claims.expires_s)
        return json.dumps({"status": "invalid_token"}).encode(), None

    def _refused(self, token: str, reason: str) -> None:
        self._reason = reason
        self._claimed = self._checker.claimed(token)


class Checks:
    """Makes the check of each login, by mechanism."""

    def __init__(self, mechanisms: tuple[str, ...], users: UsersFile | None, checker: TokenChecker | None) -> None:
        self.mechanisms = mechanisms
        self._users = users
        self._passwords = Passwords(users) if users is not None else None
        self._checker = checker

    def of(self, mechanism: str) -> PlainCheck | ScramCheck | TokenCheck:
        if mechanism == OAUTHBEARER:
            assert self._checker is not None
            return TokenCheck(self._checker)
        assert self._users is not None and self._passwords is not None
        return PlainCheck(self._passwords) if mechanism == PLAIN else ScramCheck(mechanism, self._users)
