"""Keys and certificates in other forms than PEM: which one a file has, and the command that converts it.

Sources of the formats: RFC 7292 (PKCS12: a sequence that begins with version 3), RFC 5280 (DER), the magic numbers of
sun.security.provider.JavaKeyStore. Refuses to know what the keys are for.
"""

import shlex
from pathlib import Path

CERTIFICATES, KEY = "certificates", "a private key"  # what is wanted
_KEYSTORES = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")  # JKS, JCEKS
_SEQUENCE = 0x30
_VERSION_3 = b"\x02\x01\x03"


def remedy(path: Path, data: bytes, wanted: str) -> str:
    """What such a file is, and how to make PEM of it, as the end of a sentence; "" where it is none of these.

    `data`: the file's content. A password is asked for by the commands.
    """
    store, pem = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".pem")))
    if data.startswith(_KEYSTORES):
        made = path.with_suffix(".p12")
        to_pkcs12 = f"keytool -importkeystore -srckeystore {store} -destkeystore {shlex.quote(str(made))} "
        to_pkcs12 += "-deststoretype PKCS12"
        return f"it is a Java keystore: make PEM of it by {to_pkcs12} && {_of_pkcs12(str(made), pem, wanted)}"
    if data[:1] != bytes((_SEQUENCE,)) or len(data) < 4:
        return ""
    behind = 2 + (data[1] & 0x7F if data[1] & 0x80 else 0)  # the length, in one byte or in so many more
    if data[behind : behind + 3] == _VERSION_3:
        return f"it is PKCS12: make PEM of it by {_of_pkcs12(str(path), pem, wanted)}"
    command = "x509" if wanted == CERTIFICATES else "pkey"
    return f"it is DER: make PEM of it by openssl {command} -inform der -in {store} -out {pem}"


def _of_pkcs12(store: str, pem: str, wanted: str) -> str:
    kept = "-nokeys" if wanted == CERTIFICATES else "-nocerts -nodes"
    return f"openssl pkcs12 -in {shlex.quote(store)} {kept} -out {pem}"
