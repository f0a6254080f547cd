"""kproxy's login at a broker as an exchange of frames, without a socket; also on a connection in use (KIP-368).

`log_in` is a generator that yields frames to send, with their 4-byte sizes, and is sent the broker's answers without
theirs. It sends ApiVersions first, as Kafka's own clients do, and then raw tokens to brokers of 0.10 (SaslHandshake
v0), SaslAuthenticate to all others (KIP-152). Bounds: MAX_ROUNDS tokens. Every fault is an UpstreamError with a cause
of its own. Refuses to know sockets, and the origin of passwords.
"""

from collections.abc import Generator
from struct import Struct
from typing import NamedTuple

from kproxy.errors import ProtocolError, UpstreamError
from kproxy.protocol import codec
from kproxy.protocol.apis import (
    API_VERSIONS,
    ILLEGAL_SASL_STATE,
    SASL_AUTHENTICATE,
    SASL_AUTHENTICATION_FAILED,
    SASL_HANDSHAKE,
    UNSUPPORTED_SASL_MECHANISM,
)
from kproxy.protocol.codec import Body
from kproxy.protocol.error_codes import error_name
from kproxy.protocol.schema import schema
from kproxy.proxy.sasl.mechanisms import Mechanism
from kproxy.proxy.sasl.secrets import without

MAX_ROUNDS = 8
CLIENT_ID = "kproxy"

_SIZE = Struct(">i")


class Send(NamedTuple):
    """The next frame to send."""

    data: bytes  # with its 4-byte size
    computes: bool = False  # processing the answer takes milliseconds: do it on a thread


class Versions(NamedTuple):
    """The versions of a broker's SASL requests; authenticate: -1 if it accepts only raw tokens."""

    handshake: int
    authenticate: int


class LoggedIn(NamedTuple):
    versions: Versions
    lifetime_ms: int  # until the broker requires another login; 0: never


Dialogue = Generator[Send, bytes, LoggedIn]


def log_in(mechanism: Mechanism, client_id: str = CLIENT_ID, versions: Versions | None = None) -> Dialogue:
    """Return the dialogue of one login. Raises UpstreamError. versions: those of an earlier login on the connection."""
    try:
        if versions is None:
            versions = yield from _versions(client_id)
        yield from _handshake(mechanism, versions.handshake if versions.authenticate >= 0 else 0, client_id)
        if versions.authenticate < 0:
            yield from _raw(mechanism)
            return LoggedIn(versions, 0)
        return LoggedIn(versions, (yield from _authenticate(mechanism, versions.authenticate, client_id)))
    except ProtocolError as fault:
        text = f"the answer to a login does not decode: {without(str(fault), mechanism.secrets)}"
        raise UpstreamError(text, "login_protocol") from None


def _versions(client_id: str) -> Generator[Send, bytes, Versions]:
    answer = yield from _ask(API_VERSIONS, 0, {}, client_id)
    if answer["errorCode"]:
        raise UpstreamError(f"ApiVersions is answered with {error_name(answer['errorCode'])}", "login_protocol")
    offers = {offer["apiKey"]: offer["maxVersion"] for offer in answer["apiKeys"]}
    if SASL_HANDSHAKE not in offers:
        raise UpstreamError("the broker has no SaslHandshake: it is older than 0.10, or no broker", "login_unsupported")
    return Versions(*(min(offers.get(key, -1), _newest(key)) for key in (SASL_HANDSHAKE, SASL_AUTHENTICATE)))


def _handshake(mechanism: Mechanism, version: int, client_id: str) -> Generator[Send, bytes, None]:
    answer = yield from _ask(SASL_HANDSHAKE, version, {"mechanism": mechanism.name}, client_id)
    code = answer["errorCode"]
    if code == UNSUPPORTED_SASL_MECHANISM:
        offered = without(", ".join(answer["mechanisms"]), mechanism.secrets) or "none"
        text = f"the broker does not offer {mechanism.name}; it offers {offered}: set the mechanism in [cluster.login]"
        raise UpstreamError(text, "login_mechanism")
    if code == ILLEGAL_SASL_STATE:
        text = "the broker requires no login at this port: remove [cluster.login], or give the port of a SASL listener"
        raise UpstreamError(text, "login_unsupported")
    if code:
        raise UpstreamError(f"SaslHandshake is answered with {error_name(code)}", "login_protocol")


def _authenticate(mechanism: Mechanism, version: int, client_id: str) -> Generator[Send, bytes, int]:
    """Exchange tokens in SaslAuthenticate; returns the session lifetime in milliseconds."""
    token: bytes | None = mechanism.first()
    for _ in range(MAX_ROUNDS):
        computes = mechanism.is_slow
        answer = yield from _ask(SASL_AUTHENTICATE, version, {"authBytes": token}, client_id, computes)
        code = answer["errorCode"]
        if code:
            reason = without(answer["errorMessage"] or error_name(code), mechanism.secrets)
            cause = "login_failed" if code == SASL_AUTHENTICATION_FAILED else "login_protocol"
            raise UpstreamError(f"the broker refuses kproxy's login by {mechanism.name}: {reason}", cause)
        token = mechanism.answer(answer["authBytes"])
        if token is None:
            return max(0, int(answer.get("sessionLifetimeMs", 0)))
    raise UpstreamError(f"a login by {mechanism.name} does not end after {MAX_ROUNDS} tokens", "login_protocol")


def _raw(mechanism: Mechanism) -> Generator[Send, bytes, None]:
    """Exchange tokens without headers; a broker that refuses them closes the connection."""
    token: bytes | None = mechanism.first()
    for _ in range(MAX_ROUNDS):
        assert token is not None
        answer = yield Send(_SIZE.pack(len(token)) + token, mechanism.is_slow)
        token = mechanism.answer(answer)
        if token is None:
            return
    raise UpstreamError(f"a login by {mechanism.name} does not end after {MAX_ROUNDS} tokens", "login_protocol")


def _ask(
    api_key: int, version: int, body: Body, client_id: str, computes: bool = False
) -> Generator[Send, bytes, Body]:
    """Send one request; returns the body of its answer."""
    answer = yield Send(codec.framed_request(api_key, version, api_key, client_id, body), computes)
    header, body = codec.decode_response(answer, api_key, version)
    if header["correlationId"] != api_key:
        raise UpstreamError("the broker answers a login with something else", "login_protocol")
    return body


def _newest(api_key: int) -> int:
    return schema().apis[api_key].request.versions[-1]
