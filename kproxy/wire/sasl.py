"""SASL tokens without Kafka headers: how many rounds, and when frames begin again.

After a successful SaslHandshake v0 both sides speak size-prefixed raw tokens (KIP-43; SaslHandshake v1 and
SaslAuthenticate replaced them in KIP-152, but brokers still accept them). Nothing on the wire marks the last token: the
number of rounds depends on the mechanism.

Refuses to know what is in a token: it is a secret.
"""

from typing import Any

from kproxy.wire import frames

MAX_TOKEN = 524_288  # a broker's sasl.server.max.receive.size by default

# Rounds of (client's token, broker's token); OAUTHBEARER adds one after a non-empty reply (RFC 7628, 3.2.3).
_ROUNDS = {"PLAIN": 1, "OAUTHBEARER": 1, "SCRAM-SHA-256": 2, "SCRAM-SHA-512": 2}


class RawSasl:
    """One raw exchange of tokens."""

    __slots__ = ("_left", "_may_extend", "mechanism", "open_ended", "replies", "tokens")

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism
        self.tokens = 0  # of the client
        self.replies = 0
        self._left = _ROUNDS.get(mechanism, 0)
        self.open_ended = self._left == 0  # GSSAPI and others: until a client frame looks like a request
        self._may_extend = mechanism == "OAUTHBEARER"

    def replied(self, size: int) -> bool:
        """The broker's token of `size` bytes is complete; True: frames with headers follow."""
        self.replies += 1
        if self.open_ended:
            return False
        self._left -= 1
        if self._may_extend and size:
            self._may_extend = False
            self._left += 1
        return self._left <= 0

    def ends_with(self, view: Any, pos: int, end: int) -> bool:
        """Whether the client's bytes at `pos` are a Kafka request again, for a mechanism of unknown length."""
        return self.open_ended and self.tokens > 0 and frames.plausible_request(view, pos, end)


def is_bare_gssapi(key_version: int) -> bool:
    """Whether a connection's first frame is a GSSAPI token without any handshake, as 0.9 clients send.

    Such a token opens with the ASN.1 tag 0x60 (RFC 2743, 3.1), which would be an api key of 24576 and more.
    """
    return key_version >> 24 == 0x60
