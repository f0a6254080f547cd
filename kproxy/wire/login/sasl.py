"""SASL tokens without Kafka headers: which frames of a client are tokens, and how many replies are due.

After a successful SaslHandshake v0 both sides send size-prefixed raw tokens (KIP-43; SaslHandshake v1 and
SaslAuthenticate replaced them in KIP-152, but brokers still accept them). Tokens and requests have the same framing,
and nothing on the wire marks the last token. So a frame counts as a token only if no broker executes it as a request:

- during the mechanism's fixed number of rounds, which begin with the broker's response to SaslHandshake;
- the single byte with which OAUTHBEARER acknowledges an error (RFC 7628, 3.2.3): too short for a request;
- for a mechanism without a fixed number: the first frame, and frames that are too short or have no API key. Tokens of
  GSSAPI are empty, or begin with 0x60 (RFC 2743, 3.1) or 0x0504 (RFC 4121, 4.2.6.2).

Refuses to know the contents of a token: it is a secret.
"""

from typing import Any

from kproxy.wire import frames

MAX_TOKEN = 524_288  # a broker's sasl.server.max.receive.size by default

MAX_API_KEY = 1023  # higher numbers are not API keys; Kafka 4.4 has 93. The first byte of a key decides

# Rounds of (client's token, broker's token); OAUTHBEARER adds one after a non-empty reply (RFC 7628, 3.2.3).
_ROUNDS = {"PLAIN": 1, "OAUTHBEARER": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2}


class RawSasl:
    """One raw exchange of tokens."""

    __slots__ = ("_due", "_extends", "_rounds", "mechanism", "open_ended", "replies", "tokens")

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism
        self.tokens = 0  # number of the client's tokens so far
        self.replies = 0
        self._rounds = self._due = _ROUNDS.get(mechanism, 0)  # numbers of expected tokens of the client, and replies
        self.open_ended = self._rounds == 0  # GSSAPI and others: the number of rounds is not fixed
        self._extends = mechanism == "OAUTHBEARER"

    def is_token(self, view: Any, pos: int, end: int) -> bool | None:
        """Return whether the client's frame at `pos`, with a complete size, is a token; None: needs one more byte."""
        size = frames.SIZE.unpack_from(view, pos)[0]
        if not self.open_ended:
            return self.tokens < self._rounds or (self._extends and self.tokens == self._rounds and size == 1)
        if self.tokens == 0 or size < frames.MIN_REQUEST:
            return True
        if end - pos < 5:
            return None
        return bool(view[pos + 4] > MAX_API_KEY >> 8)

    def must_wait(self, is_token: bool) -> bool:
        """Return whether the client's next frame has to wait for a reply.

        Every token has a reply, except the last one of an open-ended mechanism: GSSAPI completes without a reply.
        """
        return self.replies < self.tokens - (self.open_ended and not is_token)

    def replied(self, size: int) -> bool:
        """Count a complete token of the broker, of `size` bytes; return True if frames with headers follow."""
        self.replies += 1
        if self.open_ended:
            return False
        if self._extends and size and self.replies == self._rounds:
            self._due += 1  # an error: the client acknowledges it
        return self.replies >= self._due


def is_bare_gssapi(key_version: int) -> bool:
    """Return whether a connection's first frame is a GSSAPI token without a handshake, as 0.9 clients send it.

    Such a token begins with the ASN.1 tag 0x60 (RFC 2743, 3.1), which would be an api key of 24576 or more.
    """
    return key_version >> 24 == 0x60
