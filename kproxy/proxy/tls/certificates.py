"""Reads a certificate: its expiry, its names, and its subject as Java writes it.

Input is the DER of certificates that OpenSSL has already parsed: a few fields in fixed places (RFC 5280, 4.1). The
subject's text is that of Java's X500Principal.getName(), RFC 2253 with the keywords of that RFC: a broker's principals
and `ssl.principal.mapping.rules` refer to this text. Raises Malformed for anything else. Refuses to verify anything.
"""

import base64
import calendar
import ipaddress
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from kproxy.errors import Malformed

_SEQUENCE, _OID, _EXTENSIONS, _VERSION = 0x30, 0x06, 0xA3, 0xA0
_UTC_TIME = 0x17
_OCTETS = 0x04
_DNS_NAME, _IP_ADDRESS = 0x82, 0x87
_SUBJECT_ALT_NAME = bytes((0x55, 0x1D, 0x11))
# UTF8String, PrintableString, T61String, IA5String, GeneralString, BMPString: Java prints them as text.
_STRINGS = frozenset((0x0C, 0x13, 0x14, 0x16, 0x1B, 0x1E))
_KEYWORDS = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
_ESCAPED = frozenset(',=+<>#;"\\')
_WHITE = " \r"  # Java escapes these at both ends
MAX_OID_BYTES = 64  # the subject has its numbers in decimal, which takes time by the square of their digits
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)


class Certificate(NamedTuple):
    """The content of a certificate."""

    subject: str  # RFC 2253; "" if there is none
    not_after: int  # seconds since the epoch
    names: tuple[str, ...]  # subjectAltName: DNS names in lower case, and addresses


def read(der: bytes) -> Certificate:
    """Return the certificate in DER. Raises Malformed."""
    try:
        (certificate,) = _items(der)
        body, *_ = _items(certificate[1])
        fields = list(_items(body[1]))
        at = 1 if fields[0][0] == _VERSION else 0  # followed by serial, signature, issuer, validity, subject
        _, not_after = _items(fields[at + 3][1])
        extensions = [value for tag, value, _ in fields[at + 5 :] if tag == _EXTENSIONS]
        return Certificate(
            _name(fields[at + 4][1]),
            _time(not_after[0], not_after[1]),
            tuple(_alternative_names(extensions[0])) if extensions else (),
        )
    except (ValueError, IndexError, UnicodeDecodeError) as fault:
        raise Malformed(f"not a certificate: {fault}") from None


def read_pem(pem: bytes) -> list[Certificate]:
    """Return all certificates of a PEM file, in its order. Raises Malformed."""
    try:
        return [read(base64.b64decode(found)) for found in _PEM.findall(pem)]
    except ValueError as fault:  # includes binascii.Error
        raise Malformed(f"not a certificate: {fault}") from None


def is_for(certificate: Certificate, server_name: str) -> bool:
    """Whether a server's certificate has a name or address, or a wildcard for its first label (RFC 6125, 6.4.3)."""
    server_name = server_name.lower()
    _, _, parent = server_name.partition(".")
    return server_name in certificate.names or (bool(parent) and f"*.{parent}" in certificate.names)


def _items(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (tag, value, the whole item) of each item."""
    at = 0
    while at < len(data):
        tag, size, start = data[at], data[at + 1], at + 2
        if size & 0x80:
            count = size & 0x7F
            if not 1 <= count <= 4:
                raise ValueError("a length that DER does not have")
            size = int.from_bytes(data[start : start + count], "big")
            start += count
        end = start + size
        if end > len(data):
            raise ValueError("it is cut short")
        yield tag, data[start:end], data[at:end]
        at = end


def _oid(value: bytes) -> str:
    if len(value) > MAX_OID_BYTES:
        raise ValueError(f"an OID of {len(value)} bytes")
    first, *_ = numbers = list(_base_128(value))
    top = min(first // 40, 2)
    return ".".join(map(str, (top, first - 40 * top, *numbers[1:])))


def _base_128(value: bytes) -> Iterator[int]:
    number = 0
    for byte in value:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            yield number
            number = 0


def _time(tag: int, value: bytes) -> int:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ"))


def _alternative_names(extensions: bytes) -> Iterator[str]:
    ((_, listed, _),) = _items(extensions)
    for _, extension, _ in _items(listed):
        (_, oid, _), *_, (tag, value, _) = _items(extension)
        if oid == _SUBJECT_ALT_NAME and tag == _OCTETS:
            ((_, names, _),) = _items(value)
            for kind, name, _ in _items(names):
                if kind == _DNS_NAME:
                    yield name.decode("ascii").lower()
                elif kind == _IP_ADDRESS:
                    yield str(ipaddress.ip_address(name))  # 4 or 16 bytes


def _name(name: bytes) -> str:
    """Return a Name, most specific part first, as X500Principal.getName() writes it."""
    parts = ["+".join(_attribute(attribute) for _, attribute, _ in _items(rdn)) for _, rdn, _ in _items(name)]
    return ",".join(reversed(parts))


def _attribute(attribute: bytes) -> str:
    (_, oid, _), (tag, value, whole) = _items(attribute)
    kind = _oid(oid)
    if kind not in _KEYWORDS or tag not in _STRINGS:
        return f"{_KEYWORDS.get(kind, kind)}=#{whole.hex()}"
    return f"{_KEYWORDS[kind]}={_escaped(value.decode('utf-8', 'replace'))}"


def _escaped(text: str) -> str:
    before = len(text) - len(text.lstrip(_WHITE))
    after = len(text.rstrip(_WHITE))
    whole = []
    for at, char in enumerate(text):
        if char == "\0":
            whole.append("\\00")
        elif char in _ESCAPED or at < before or at >= after:
            whole.append(f"\\{char}")
        else:
            whole.append(char)
    return "".join(whole)
