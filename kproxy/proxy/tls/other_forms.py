"""Detects other formats than PEM in files of keys and certificates, and returns the command to convert them.

Sources of the formats: RFC 7292 (PKCS12: a sequence that begins with version 3), RFC 5280 (DER), the magic numbers of
sun.security.provider.JavaKeyStore. Refuses to know the use of the keys.
"""

import shlex
from pathlib import Path

CERTIFICATES, KEY = "certificates", "a private key"  # the expected content
_KEYSTORES = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")  # JKS, JCEKS
_SEQUENCE = 0x30
_VERSION_3 = b"\x02\x01\x03"


def remedy(path: Path, data: bytes, wanted: str) -> str:
    """Return the format of the file and a command that makes PEM of it, as the end of a sentence; "" if it is unknown.

    `data`: the file's content. The commands prompt for a password.
    """
    store, pem = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".pem")))
    if data.startswith(_KEYSTORES):
        made = path.with_suffix(".p12")
        to_pkcs12 = f"keytool -importkeystore -srckeystore {store} -destkeystore {shlex.quote(str(made))} "
        to_pkcs12 += "-deststoretype PKCS12"
        return f"it is a Java keystore: make PEM of it by {to_pkcs12} && {_of_pkcs12(str(made), pem, wanted)}"
    if data[:1] != bytes((_SEQUENCE,)) or len(data) < 4:
        return ""
    behind = 2 + (data[1] & 0x7F if data[1] & 0x80 else 0)  # after the length, of one byte or of that many more
    if data[behind : behind + 3] == _VERSION_3:
        return f"it is PKCS12: make PEM of it by {_of_pkcs12(str(path), pem, wanted)}"
    command = "x509" if wanted == CERTIFICATES else "pkey"
    return f"it is DER: make PEM of it by openssl {command} -inform der -in {store} -out {pem}"


def _of_pkcs12(store: str, pem: str, wanted: str) -> str:
    kept = "-nokeys" if wanted == CERTIFICATES else "-nocerts -nodes"
    return f"openssl pkcs12 -in {shlex.quote(store)} {kept} -out {pem}"
