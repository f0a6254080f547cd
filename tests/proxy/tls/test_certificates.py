"""The fields that kproxy reads from certificates equal those that Java reads."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.name import _ASN1Type as Asn1
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from kproxy.errors import Malformed
from kproxy.proxy.tls.certificates import is_for, read, read_pem
from tests.certificates import Authority

Part = x509.NameAttribute
JAVA = """
import java.io.*;
import java.security.cert.*;

public class Subjects {
    public static void main(String[] files) throws Exception {
        PrintStream out = new PrintStream(System.out, true, "UTF-8");
        for (String file : files) {
            try (InputStream in = new FileInputStream(file)) {
                Certificate read = CertificateFactory.getInstance("X.509").generateCertificate(in);
                out.print(((X509Certificate) read).getSubjectX500Principal().getName() + "\\0");
            }
        }
    }
}
"""
SUBJECTS = [
    x509.Name(
        [Part(NameOID.COUNTRY_NAME, "DE"), Part(NameOID.ORGANIZATION_NAME, "a, b"), Part(NameOID.COMMON_NAME, "c")]
    ),
    x509.Name([Part(NameOID.COMMON_NAME, ' a=b+c<d>;#"\\e '), Part(NameOID.EMAIL_ADDRESS, "a@b", Asn1.IA5String)]),
    x509.Name(
        [Part(NameOID.COMMON_NAME, "größe Ω 漢"), Part(NameOID.STREET_ADDRESS, "x"), Part(NameOID.LOCALITY_NAME, "l")]
    ),
    x509.Name(
        [
            x509.RelativeDistinguishedName([Part(NameOID.COMMON_NAME, "one"), Part(NameOID.USER_ID, "two")]),
            x509.RelativeDistinguishedName([Part(NameOID.DOMAIN_COMPONENT, "dc", Asn1.IA5String)]),
        ]
    ),
    x509.Name([Part(NameOID.SERIAL_NUMBER, "12"), Part(NameOID.TITLE, "Dr"), Part(NameOID.COMMON_NAME, "#x")]),
    x509.Name([Part(NameOID.COMMON_NAME, "bmp", Asn1.BMPString), Part(NameOID.ORGANIZATION_NAME, "  two  ")]),
    x509.Name([Part(NameOID.COMMON_NAME, "tab\there\r"), Part(NameOID.STATE_OR_PROVINCE_NAME, "s")]),
    x509.Name([Part(NameOID.COMMON_NAME, "univ", Asn1.UniversalString), Part(NameOID.COMMON_NAME, "nul\0x")]),
    x509.Name([Part(NameOID.COMMON_NAME, "t61", Asn1.T61String)]),
    x509.Name([]),
]


@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_subjects_read_as_java_writes_them(tmp_path):
    authority = Authority(tmp_path)
    files = [authority.with_subject(name, f"subject-{n}").certificate for n, name in enumerate(SUBJECTS)]
    program = tmp_path / "Subjects.java"
    program.write_text(JAVA)
    done = subprocess.run(["java", program, *files], capture_output=True, check=True, timeout=120)
    assert [read_pem(file.read_bytes())[0].subject for file in files] == done.stdout.decode().split("\0")[:-1]


def test_names_and_expiry(tmp_path):
    authority = Authority(tmp_path)
    (leaf,) = read_pem(authority.server("Kafka.example", "*.b.example", "10.0.0.7", "::1").certificate.read_bytes())
    assert leaf.names == ("kafka.example", "*.b.example", "10.0.0.7", "::1")
    for name, held in (("KAFKA.example", True), ("x.b.example", True), ("b.example", False), ("x.y.b.example", False)):
        assert is_for(leaf, name) is held
    for name, held in (("10.0.0.7", True), ("10.0.0.8", False), ("::1", True)):
        assert is_for(leaf, name) is held
    for certificate in (authority.server(), authority.expired()):
        model = x509.load_pem_x509_certificate(certificate.certificate.read_bytes())
        (found,) = read_pem(certificate.certificate.read_bytes())
        assert found.not_after == int(model.not_valid_after_utc.timestamp())
    chained = Authority(tmp_path, "between", of=authority).server(file="chained")
    assert len(read_pem(chained.certificate.read_bytes())) == 2


@given(st.data())
def test_bytes_that_are_no_certificate_are_malformed(data):
    """Cut, changed or random bytes give a certificate or Malformed, and nothing else."""
    der = _der()
    at = data.draw(st.integers(0, len(der)))
    hostile = data.draw(
        st.sampled_from((der[:at], der[:at] + data.draw(st.binary(min_size=1, max_size=4)) + der[at + 1 :]))
        | st.binary(max_size=60)
    )
    with suppress(Malformed):
        read(hostile)


_made: list[bytes] = []


def _der() -> bytes:
    if not _made:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            pem = Authority(Path(folder)).client("x").certificate.read_bytes()
            _made.append(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))
    return _made[0]
