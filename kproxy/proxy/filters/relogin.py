"""SASL requests on an established connection, which kproxy answers in place of the broker.

If kproxy has logged in itself, a client's login must not reach the broker, which would take it for kproxy's. The client
receives the answer of a listener without SASL. If kproxy checks logins, a client may re-authenticate (KIP-368), with
the same mechanism and as the same user. A session that was not renewed in time ends at the next request other than a
login. Bounds: MAX_FRAME of such a request. Uses no sockets and no clock.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    ILLEGAL_SASL_STATE,
    SASL_AUTHENTICATE,
    SASL_AUTHENTICATION_FAILED,
    SASL_HANDSHAKE,
    UNSUPPORTED_SASL_MECHANISM,
)
from kproxy.protocol.codec import Body
from kproxy.proxy.filters.chain import Filter
from kproxy.proxy.sasl.checks import Check, Checks, Known, LoginRefusedError, TokenCheck
from kproxy.proxy.sasl.clients import MAX_FRAME, Session
from kproxy.proxy.sasl.tokens import UnknownKeyError
from kproxy.wire.decisions.authorizer import HOLD, Answer, Close, Decision, Hold, Later, answered
from kproxy.wire.events import Exchange

LOGIN_APIS = (SASL_HANDSHAKE, SASL_AUTHENTICATE)


def wants(api_key: int, version: int) -> bool:
    """Return whether an Interest must send requests of an API and version to these filters."""
    return api_key in LOGIN_APIS


# apart(work, done): runs `work`, which raises nothing, on a thread, then calls `done` in the loop.
Apart = Callable[[Callable[[], None], Callable[[], None]], None]


class AnswerLogins(Filter):
    """The filter of connections on which kproxy has logged in. met(): called if a client tries to log in."""

    def __init__(self, met: Callable[[], None]) -> None:
        self._met = met

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        return _too_large(exchange) or HOLD if exchange.plan.api_key in LOGIN_APIS else None

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        return self._login(exchange, frame) if exchange.plan.api_key in LOGIN_APIS else None

    def deciding_fields(self, exchange: Exchange, head: Any) -> frozenset[str] | None:
        return None if exchange.plan.api_key in LOGIN_APIS else frozenset()

    def _login(self, exchange: Exchange, frame: Any) -> Decision | Later:
        unknown = _unknown(exchange)
        if unknown is not None:
            return unknown
        self._met()
        return answered(exchange, {"errorCode": ILLEGAL_SASL_STATE})


class RenewLogins(AnswerLogins):
    """The filter of a connection whose client kproxy has authenticated.

    lifetime_ms(known): of a new session. begin(newer): prepares data for checks, without blocking. apart: runs checks
    that take milliseconds. `done(outcome, lifetime_ms, fault)`, set by the owner: a login was renewed, or the
    connection must be closed after its answer was sent; fault: why a login was refused. The owner sets `is_expired`,
    and from then on has all requests authorized.
    """

    def __init__(
        self,
        checks: Checks,
        session: Session,
        lifetime_ms: Callable[[Known], int],
        begin: Callable[[bool], None],
        apart: Apart,
    ) -> None:
        super().__init__(lambda: None)
        self.is_expired = False
        self._checks = checks
        self._session = session
        self._lifetime_ms = lifetime_ms
        self._begin = begin
        self._apart = apart
        self.done: Callable[[str, int, LoginRefusedError | None], None] = lambda outcome, lifetime_ms, fault: None
        self._check: Check | None = None
        self._fault = ""  # error in the answer to the next token
        self._is_over = False  # a login was refused: no other login is checked until the connection is closed

    @property
    def is_renewing(self) -> bool:
        """Return whether a login has begun and has no outcome yet."""
        return self._check is not None or bool(self._fault)

    def _forget(self) -> None:
        self._check, self._fault = None, ""

    def at_header(self, exchange: Exchange) -> Hold | Close | Answer | None:
        return self._without_session(exchange) or super().at_header(exchange)

    def decide(self, exchange: Exchange, frame: Any) -> Decision | Later:
        return self._without_session(exchange) or super().decide(exchange, frame)

    @property
    def is_quiet(self) -> bool:
        return not (self.is_renewing or self._is_over or self.is_expired)

    def _without_session(self, exchange: Exchange) -> Close | None:
        """Decide a request of a client without a valid session; None lets it pass."""
        if exchange.plan.api_key in LOGIN_APIS:
            return None
        if self._is_over:
            return Close(f"{exchange.plan.title} after a login that was refused: nothing is served for it")
        return self._expired(exchange) if self.is_expired else None

    def _expired(self, exchange: Exchange) -> Close:
        self._forget()
        self.done("expired", 0, None)
        text = (
            f"{exchange.plan.title} after its session has expired: the client did not renew its login in time, as "
            "clients since Kafka 2.2 do"
        )
        return Close(text)

    def _login(self, exchange: Exchange, frame: Any) -> Decision | Later:
        unknown = _unknown(exchange) or _too_large(exchange)
        if unknown is not None:
            return unknown
        try:
            body = codec.decode_flat_request(bytes(frame[4:]))[1]
        except ProtocolError as fault:
            text = f"{exchange.plan.title} does not decode: {fault}"
            self._forget()
            self.done("malformed", 0, LoginRefusedError(text))
            return Close(text)
        self._begin(False)  # a user who was removed since the first login cannot renew it
        return self._handshake(exchange, body) if "mechanism" in body else self._token(exchange, body["authBytes"])

    def _handshake(self, exchange: Exchange, body: Body) -> Decision:
        wanted, had = body["mechanism"], self._session.mechanism
        self._forget()
        offered = list(self._checks.mechanisms)
        if exchange.api_version == 0 or self._is_over:  # tokens of version 0 would have no headers
            return answered(exchange, {"errorCode": ILLEGAL_SASL_STATE, "mechanisms": offered})
        if wanted not in offered:
            self._is_over = True
            self.done("mechanism", 0, LoginRefusedError(f"it asks for the SASL mechanism {wanted[:40]!r}"))
            return answered(exchange, {"errorCode": UNSUPPORTED_SASL_MECHANISM, "mechanisms": offered})
        if wanted != had:
            self._fault = (
                f"SASL mechanism '{wanted}' requested by client is not supported for re-authentication of mechanism "
                f"'{had}'"
            )
        else:
            self._check = self._checks.of(wanted)
        return answered(exchange, {"mechanisms": offered})

    def _token(self, exchange: Exchange, token: bytes) -> Decision | Later:
        if self._fault:
            return self._refused(exchange, LoginRefusedError(self._fault))
        if self._check is None:
            text = "SaslAuthenticate request received after successful authentication"
            return answered(exchange, {"errorCode": ILLEGAL_SASL_STATE, "errorMessage": text})
        work = _Checking(self._check, token)
        if self._check.is_slow(token):
            return Later(partial(self._checked_later, exchange, work), partial(self._apart, work.run))
        work.run()
        return self._checked(exchange, work)

    def _checked_later(self, exchange: Exchange, work: "_Checking", _: memoryview) -> Generator[None, None, Decision]:
        while not work.is_done:
            yield
        return self._checked(exchange, work)

    def _checked(self, exchange: Exchange, work: "_Checking") -> Decision:
        """Return the decision about a token that was checked."""
        if work.wants_newer_keys:
            self._begin(True)  # prepares the client's next login
        if isinstance(work.fault, LoginRefusedError):
            return self._refused(exchange, work.fault)
        if work.fault is not None:
            raise work.fault
        known, answer = work.known, work.answer
        if known is None:
            return answered(exchange, {"authBytes": answer})
        had = self._session.known.name
        if known.name != had:
            text = f"Cannot change principals during re-authentication from User.{had}: User.{known.name}"
            return self._refused(exchange, LoginRefusedError(text, claimed=known.name))
        self._forget()
        lifetime_ms = self._lifetime_ms(known)
        self.done("renewed", lifetime_ms, None)
        return answered(exchange, {"authBytes": answer, "sessionLifetimeMs": lifetime_ms})

    def _refused(self, exchange: Exchange, fault: LoginRefusedError) -> Decision:
        self._forget()
        self._is_over = True
        self.done("failed", 0, fault)
        return answered(exchange, {"errorCode": SASL_AUTHENTICATION_FAILED, "errorMessage": str(fault)})


class _Checking:
    """The check of one token, which may run on a thread, and its result."""

    def __init__(self, check: Check, token: bytes) -> None:
        self.answer = b""
        self.known: Known | None = None
        self.fault: Exception | None = None
        self.wants_newer_keys = False
        self.is_done = False
        self._check = check
        self._token = token

    def run(self) -> None:
        """Check the token, and store the result or the exception. Raises nothing."""
        try:
            self.answer, self.known = self._receive()
        except Exception as fault:  # raised on the loop
            self.fault = fault
        self.is_done = True

    def _receive(self) -> tuple[bytes, Known | None]:
        if isinstance(self._check, TokenCheck):
            try:
                return self._check.receive(self._token, last=False)
            except UnknownKeyError:
                self.wants_newer_keys = True
        return self._check.receive(self._token)


def _unknown(exchange: Exchange) -> Close | None:
    if exchange.plan.known:
        return None
    return Close(f"{exchange.plan.title} is newer than this kproxy reads: upgrade kproxy")


def _too_large(exchange: Exchange) -> Close | None:
    if exchange.request_bytes <= MAX_FRAME:
        return None
    return Close(f"{exchange.plan.title} of {exchange.request_bytes} bytes: a login has {MAX_FRAME} at most")
