"""Finds the alert that ends a TLS handshake (RFC 5246, RFC 8446 section 6).

Duty: reads the records of both sides until they are encrypted. In TLS 1.3 alerts are encrypted, except those about the
first messages. An encrypted alert is recognised by its size: no other message has it that a client sends as its first
encrypted one, or a server before the client's first encrypted record or next after the client's Finished. After the
client's FIN it may be the server's close_notify, so it does not count as a failure there. Memory: the header of a
record for each side. Refuses to know the consequences of an alert.
"""

from typing import Protocol

CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, APPLICATION_DATA = 20, 21, 22, 23
FATAL = 2
ENCRYPTED = "an alert that TLS 1.3 encrypts"
OPENING = 6  # bytes that `is_alert` needs
_HEAD = 5  # type, version, length
_MAJOR = 3  # of every version
_ALERT_BYTES = 2  # level, description
_ENCRYPTED_BYTES = _ALERT_BYTES + 1 + 16  # plus its type, and the tag, which has 16 bytes in all suites of TLS 1.3
_NAMES = {
    10: "unexpected_message",
    20: "bad_record_mac",
    22: "record_overflow",
    40: "handshake_failure",
    42: "bad_certificate",
    43: "unsupported_certificate",
    44: "certificate_revoked",
    45: "certificate_expired",
    46: "certificate_unknown",
    47: "illegal_parameter",
    48: "unknown_ca",
    49: "access_denied",
    50: "decode_error",
    51: "decrypt_error",
    70: "protocol_version",
    71: "insufficient_security",
    80: "internal_error",
    86: "inappropriate_fallback",
    109: "missing_extension",
    110: "unsupported_extension",
    112: "unrecognized_name",
    113: "bad_certificate_status_response",
    115: "unknown_psk_identity",
    116: "certificate_required",
    120: "no_application_protocol",
}


def is_alert(view: bytes | bytearray | memoryview) -> bool:
    """Whether bytes begin with an unencrypted alert; as a Kafka frame they would have a size of 352 MB."""
    return view[0] == ALERT and len(view) >= OPENING and view[1] == _MAJOR and bytes(view[3:_HEAD]) == b"\0\2"


class Handshake(Protocol):
    """A connection: `client` is the side that opened it; `alert` is set to (side, name).

    `is_answered_in_clear` is set if the server's first bytes are no TLS record; `is_probe` if the client ends within
    its first record, which no server answers.
    """

    client: int
    alert: tuple[int, str] | None
    is_answered_in_clear: bool
    is_probe: bool

    def discard_rest(self) -> None:
        """Stop receiving: discard all further bytes."""


class Alerts:
    """Takes the bytes of a TLS connection, from the first on."""

    __slots__ = (
        "_flow",
        "_has_client_ended",
        "_heads",
        "_is_1_3",
        "_is_encrypted",
        "_is_over",
        "_is_server_first",
        "_left",
        "_levels",
    )

    def __init__(self, flow: Handshake) -> None:
        self._flow = flow
        self._heads = (bytearray(), bytearray())
        self._left = [0, 0]  # missing bytes of the current record
        self._levels = [b"", b""]  # level of an alert whose description is in the next record
        self._is_encrypted = [False, False]
        self._is_1_3 = False  # the server encrypts before the client does
        self._is_over = False  # further records do not belong to the handshake
        self._is_server_first = True  # the server's first record has not arrived
        self._has_client_ended = False

    def receive(self, side: int, view: memoryview, now_ns: int) -> None:
        head = self._heads[side]
        while view and not self._is_over and self._flow.alert is None:
            if left := self._left[side]:
                self._left[side] = max(0, left - len(view))
                view = view[left:]
                continue
            length = int.from_bytes(head[3:_HEAD])
            wanted = _HEAD + (min(length, _ALERT_BYTES) if len(head) >= _HEAD else 0)
            taken = wanted - len(head)
            head += view[:taken]
            view = view[taken:]
            if len(head) == _HEAD and int.from_bytes(head[3:]):
                continue  # its first bytes too
            if len(head) == wanted:
                self._record(side, head, length)
                head.clear()

    def gap(self, side: int, count: int, now_ns: int) -> None:
        self._flow.discard_rest()

    def close(self, side: int, now_ns: int) -> None:
        if side == self._flow.client:
            self._has_client_ended = True
            self._flow.is_probe = self._is_server_first and bool(self._left[side] or self._heads[side])

    def _record(self, side: int, head: bytearray, length: int) -> None:
        kind, flow = head[0], self._flow
        self._left[side] = max(0, length - _ALERT_BYTES)
        if side != flow.client and self._is_server_first:
            self._is_server_first = False
            flow.is_answered_in_clear = not (CHANGE_CIPHER_SPEC <= kind <= APPLICATION_DATA and head[1] == _MAJOR)
        if kind == ALERT and 0 < length <= _ALERT_BYTES:
            self._in_clear(side, bytes(head[_HEAD:]))
        elif kind not in (CHANGE_CIPHER_SPEC, HANDSHAKE):
            self._encrypted(side, is_alert=kind == APPLICATION_DATA and length == _ENCRYPTED_BYTES)

    def _in_clear(self, side: int, some: bytes) -> None:
        """Handle an unencrypted alert record, which may have half of an alert."""
        alert = self._levels[side] + some
        self._levels[side] = alert if len(alert) < _ALERT_BYTES else b""
        if len(alert) == _ALERT_BYTES and alert[0] == FATAL and not self._is_server_first:  # else the client met an end
            self._flow.alert = side, _NAMES.get(alert[1], f"alert {alert[1]}")
            self._flow.discard_rest()

    def _encrypted(self, side: int, *, is_alert: bool) -> None:
        """Handle an encrypted record; is_alert: it has the size of an alert of TLS 1.3."""
        flow = self._flow
        is_client, is_first = side == flow.client, not self._is_encrypted[side]
        self._is_encrypted[side] = True
        if not is_client and not self._is_encrypted[flow.client]:
            self._is_1_3 = True
            if not is_alert:
                return
        if is_client and not is_alert and self._is_1_3:  # its Finished, or data behind it
            return
        # a later alert of the client is its close_notify
        if is_alert and (is_first if is_client else self._is_1_3 and not self._has_client_ended):
            flow.alert = side, ENCRYPTED
        self._is_over = True
        flow.discard_rest()
