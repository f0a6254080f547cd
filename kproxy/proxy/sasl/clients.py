"""Logins of clients as an exchange of frames, without a socket, like a broker's SaslServerAuthenticator.

Before its login a client may send ApiVersions and SaslHandshake v0 or v1, then tokens: raw ones after v0, in
SaslAuthenticate after v1. Any other request ends the connection without an answer, as at a broker; a refused login gets
its error first. Bounds: MAX_FRAME of one frame, MAX_REQUESTS of a login. Refuses to know sockets and authorization.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from kproxy.errors import Malformed, ProtocolError, RefusedClient
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    API_VERSIONS,
    SASL_AUTHENTICATE,
    SASL_AUTHENTICATION_FAILED,
    SASL_HANDSHAKE,
    UNSUPPORTED_SASL_MECHANISM,
)
from kproxy.protocol.codec import Body, Header
from kproxy.protocol.schema import api_name, schema
from kproxy.proxy.sasl.checks import Check, Checks, Known, LoginRefusedError, TokenCheck
from kproxy.proxy.sasl.tokens import UnknownKeyError
from kproxy.proxy.sasl.turns import Turns

MAX_FRAME = 72 * 1024  # a token of 64 KiB and its envelope
MAX_REQUESTS = 12
MAX_VERSIONS_ASKED = 3
MAX_LIFETIME_S = 366 * 86400.0  # of a session: a token's expiry may exceed an int64

REFUSED = "authentication"  # the cause of such connection ends


class Conversation(Protocol):
    """The exchange with one client; frames are without their sizes."""

    @property
    def host(self) -> str:
        """The client's address."""

    async def receive(self) -> bytes:
        """Return the next frame. Raises RefusedClient for one of more than MAX_FRAME bytes, OSError, EOFError."""

    async def send(self, frame: bytes) -> None:
        """Send a frame. Raises OSError."""

    async def versions(self, version: int, correlation_id: int) -> bytes:
        """Return the answer to ApiVersions. Raises UpstreamError."""


class Session(NamedTuple):
    """An authenticated client."""

    known: Known
    mechanism: str
    lifetime_ms: int  # as sent to the client; 0: unlimited
    software: tuple[str, str] | None = None  # KIP-511, from an ApiVersions before the login
    client_id: str | None = None


T = TypeVar("T")
Checked = tuple[bytes, Known | None]  # (token to send, the client once it is authenticated)


class Authenticator:
    """Checks the logins of one cluster's clients. counts(mechanism, outcome): called for each login that ended.

    refresh(newer): loads users and keys that are due, and newer keys if those loaded do not fit. begin(newer): the same
    for a login that cannot wait: a changed file takes effect at once, keys take effect from the next login on.
    """

    def __init__(
        self,
        checks: Checks,
        lifetime_s: float | None,
        failure_delay_s: float,
        refresh: Callable[[bool], Awaitable[None]],
        begin: Callable[[bool], None],
        counts: Callable[[str, str], None],
    ) -> None:
        self.checks = checks
        self.failure_delay_s = failure_delay_s
        self.begin = begin
        self._lifetime_s = lifetime_s
        self._refresh = refresh
        self._counts = counts
        self._turns = Turns("logins")

    async def authenticate(self, conversation: Conversation) -> Session:
        """Exchange frames with a client until it is authenticated. Raises RefusedClient, UpstreamError, OSError."""
        login = _Login(self, conversation)
        outcome = "failed"
        try:
            session = await login.run()
            outcome = "success"
            return session
        except (EOFError, OSError):
            outcome = "disconnected"
            raise ConnectionResetError("it left before its login was done") from None
        except asyncio.CancelledError:
            outcome = "timeout"
            raise
        except ProtocolError as fault:
            outcome = "malformed"
            text = f"a request before its login does not decode: {fault}"
            raise RefusedClient(REFUSED, text, outcome, mechanism=login.mechanism) from None
        except RefusedClient as fault:
            outcome = login.outcome
            if fault.cause == REFUSED and outcome != "failed":  # a failed login has waited before its answer
                await asyncio.sleep(self.failure_delay_s)  # as brokers do: it slows guessing
            raise
        finally:
            self._counts(login.mechanism, outcome)

    async def apart(self, host: str, work: Callable[[], T]) -> T:
        """Run a slow check on a thread, in the turn of the client's address: guessing delays no other address."""
        return await self._turns.run(host, work)

    async def prepare(self, *, newer: bool = False) -> None:
        await self._refresh(newer)

    def lifetime_ms(self, known: Known) -> int:
        """Return a session's lifetime from now, at least 1 ms: the setting or its credential's; 0: unlimited."""
        lifetimes = [] if self._lifetime_s is None else [self._lifetime_s]
        if known.expires_s is not None:
            lifetimes.append(min(known.expires_s - time.time(), MAX_LIFETIME_S))
        return max(1, round(min(lifetimes) * 1000)) if lifetimes else 0


class _Login:
    """The first login of one client."""

    def __init__(self, owner: Authenticator, conversation: Conversation) -> None:
        self.mechanism = ""
        self.outcome = "failed"
        self._owner = owner
        self._conversation = conversation
        self._software: tuple[str, str] | None = None
        self._client_id: str | None = None
        self._asked = 0
        self._versions = 0

    async def run(self) -> Session:
        version = await self._handshake()
        await self._owner.prepare()
        check = self._owner.checks.of(self.mechanism)
        while True:
            header, token = await self._token(version)
            try:
                answer, known = await self._receive(check, token)
            except LoginRefusedError as fault:
                if header is not None:
                    body = {"errorCode": SASL_AUTHENTICATION_FAILED, "errorMessage": str(fault)}
                    await asyncio.sleep(self._owner.failure_delay_s)
                    await self._answer(header, body)
                text = f"its login by {self.mechanism} failed: {fault.reason}"
                raise self._refused("failed", text, fault.claimed) from None
            lifetime_ms = self._owner.lifetime_ms(known) if known is not None else 0
            if header is not None:
                await self._answer(header, {"authBytes": answer, "sessionLifetimeMs": lifetime_ms})
            elif answer or known is not None:
                await self._conversation.send(answer)
            if known is not None:
                return Session(known, self.mechanism, lifetime_ms, self._software, self._client_id)

    async def _receive(self, check: Check, token: bytes) -> Checked:
        if isinstance(check, TokenCheck):
            try:
                return await self._in_turn(check, token, partial(check.receive, token, last=False))
            except UnknownKeyError:
                await self._owner.prepare(newer=True)
        return await self._in_turn(check, token, partial(check.receive, token))

    async def _in_turn(self, check: Check, token: bytes, work: Callable[[], Checked]) -> Checked:
        return await self._owner.apart(self._conversation.host, work) if check.is_slow(token) else work()

    async def _handshake(self) -> int:
        """Answer requests up to a successful SaslHandshake; returns its version."""
        while True:
            header, frame = await self._request()
            key, version = header["requestApiKey"], header["requestApiVersion"]
            if key == API_VERSIONS and self._versions < MAX_VERSIONS_ASKED:
                self._versions += 1
                await self._answer_versions(header, frame)
            elif key == SASL_HANDSHAKE and version in schema().apis[key].request.versions:
                whole, body = codec.decode_flat_request(frame)
                self._client_id, mechanism = whole.get("clientId"), body["mechanism"]
                offered = self._owner.checks.mechanisms
                is_offered = mechanism in offered
                code = 0 if is_offered else UNSUPPORTED_SASL_MECHANISM
                await self._answer(header, {"errorCode": code, "mechanisms": list(offered)})
                if is_offered:
                    self.mechanism = mechanism
                    return int(version)
                text = f"it asks for the SASL mechanism {mechanism[:40]!r}; kproxy checks {', '.join(offered)}"
                raise self._refused("mechanism", text)
            else:
                raise self._not_a_login(key, version)

    async def _answer_versions(self, header: Header, frame: bytes) -> None:
        version, correlation_id = header["requestApiVersion"], header["correlationId"]
        if version in schema().apis[API_VERSIONS].request.versions:
            whole, body = codec.decode_flat_request(frame)
            self._client_id = whole.get("clientId")
            if body.get("clientSoftwareName"):
                self._software = body["clientSoftwareName"], body["clientSoftwareVersion"]
        await self._conversation.send(await self._conversation.versions(version, correlation_id))

    async def _token(self, version: int) -> tuple[Header | None, bytes]:
        """Return (header of the request with the token, or None after SaslHandshake v0; the token)."""
        if version == 0:
            self._count()
            return None, await self._conversation.receive()
        header, frame = await self._request()
        key, version = header["requestApiKey"], header["requestApiVersion"]
        if key != SASL_AUTHENTICATE or version not in schema().apis[key].request.versions:
            raise self._not_a_login(key, version)
        return header, codec.decode_flat_request(frame)[1]["authBytes"]

    async def _request(self) -> tuple[Header, bytes]:
        self._count()
        frame = await self._conversation.receive()
        return header_of(frame), frame

    def _count(self) -> None:
        self._asked += 1
        if self._asked > MAX_REQUESTS:
            raise self._refused("malformed", f"it sent more than {MAX_REQUESTS} requests before its login was done")

    async def _answer(self, header: Header, body: Body) -> None:
        key, version = header["requestApiKey"], header["requestApiVersion"]
        answered = {"correlationId": header["correlationId"]}
        await self._conversation.send(codec.encode_response(key, version, answered, body))

    def _not_a_login(self, key: int, version: int) -> RefusedClient:
        text = (
            f"it sent {api_name(key)} v{version} before its login: kproxy checks logins here, so let the client use "
            f"SASL ({', '.join(self._owner.checks.mechanisms)})"
        )
        return self._refused("state", text)

    def _refused(self, outcome: str, text: str, claimed: str = "") -> RefusedClient:
        self.outcome = outcome
        return RefusedClient(REFUSED, text, outcome, mechanism=self.mechanism, claimed=claimed)


def header_of(frame: bytes) -> Header:
    """Return the fields of a request header that are the same in all versions. Raises Malformed."""
    if len(frame) < 8:
        raise Malformed(f"a request of {len(frame)} bytes")
    return {
        "requestApiKey": int.from_bytes(frame[:2], "big", signed=True),
        "requestApiVersion": int.from_bytes(frame[2:4], "big", signed=True),
        "correlationId": int.from_bytes(frame[4:8], "big", signed=True),
    }
