"""Certificates as operators mount them: faults are reported before a socket opens, and new files are loaded."""

import os
import re
import shlex
import ssl
import subprocess
from pathlib import Path

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.config.tls import ClientTls, KeyPair, UpstreamTls
from kproxy.proxy.tls.contexts import Reloading, for_brokers, for_clients, tls_faults
from tests.certificates import PASSWORD, Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def shake(server, client, name="localhost"):
    """A handshake in memory; returns (the server's end, the client's end)."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    asking = client.wrap_bio(to_client, to_server, server_hostname=name)
    done = set()
    while len(done) < 2:
        for end in (asking, serving):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
    return serving, asking


def test_both_sides_shake_hands_with_what_is_mounted(authority):
    intermediate = Authority(authority.folder, "between", of=authority)
    server = intermediate.server(file="chained", password=PASSWORD)
    password = authority.folder / "password"
    password.write_text(f"{PASSWORD}\n")
    client = authority.client("alice")
    clients = ClientTls(
        **server.settings(), key_password_file=password, ca=authority.bundle, client_certificates="required"
    )
    brokers = UpstreamTls(ca=authority.bundle, certificate=client.certificate, key=client.key, min_version="1.3")
    serving, asking = shake(for_clients(clients).context, for_brokers(brokers).context)
    assert serving.getpeercert()["subject"][-1] == (("commonName", "alice"),)
    assert asking.version() == "TLSv1.3"
    assert for_clients(clients).expiries.keys() == {str(server.certificate), str(authority.bundle)}


def test_hostnames_and_certificates_are_verified_by_default(authority):
    other = for_clients(ClientTls(**authority.other_name().settings())).context
    with pytest.raises(ssl.SSLCertVerificationError, match="localhost"):
        shake(other, for_brokers(UpstreamTls(ca=authority.bundle)).context)
    shake(other, for_brokers(UpstreamTls(ca=authority.bundle, verify_hostname=False)).context)
    with pytest.raises(ssl.SSLCertVerificationError, match=r"self-signed|unable to get"):
        shake(other, for_brokers(UpstreamTls(verify_hostname=False)).context)


def test_versions_and_ciphers_are_those_that_are_set(authority):
    server = authority.server().settings()
    old = ssl.create_default_context(cafile=authority.bundle)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    cipher = "ECDHE-ECDSA-AES128-GCM-SHA256"
    _, asking = shake(for_clients(ClientTls(**server, ciphers=cipher)).context, old)
    assert asking.cipher()[0] == cipher
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shake(for_clients(ClientTls(**server, min_version="1.3")).context, old)


def test_the_certificate_is_chosen_by_the_server_name(authority):
    default = authority.server("kafka.example", file="default")
    wildcard = authority.wildcard()
    settings = ClientTls(**default.settings(), certificates=[KeyPair(**wildcard.settings())])
    server = for_clients(settings, lambda name: name != "stranger.kafka.example").context
    client = ssl.create_default_context(cafile=authority.bundle)
    for name in ("kafka.example", "broker-7.kafka.example", "BROKER-8.Kafka.example"):
        serving, _ = shake(server, client, name)
        assert serving.server_name == name
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(server, client, "a.broker-7.kafka.example")  # a wildcard stands for one label: the default is shown
    with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name|callback"):
        shake(server, client, "stranger.kafka.example")


def test_every_fault_of_the_files_is_named_at_once(authority, tmp_path):
    server = authority.server(file="sound")
    other = authority.server(file="another")
    locked = authority.server(file="locked", password=PASSWORD)
    rubbish, wrong = tmp_path / "rubbish.pem", tmp_path / "wrong"
    rubbish.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    wrong.write_text("not it")
    sound = {"certificate": server.certificate, "key": server.key}

    def texts(**settings):
        return [f"{place}: {text}" for place, text in tls_faults(ClientTls(**(sound | settings)), None)]

    assert not texts()
    for settings, *wanted in (
        ({"certificate": tmp_path / "no"}, r"tls.certificate: .*no cannot be read: No such file"),
        ({"certificate": server.key}, r"tls.certificate: .* holds no certificate"),
        ({"certificate": rubbish}, r"tls.certificate: .* is damaged"),
        ({"key": None}, r"tls.certificate: .* holds no private key.*give the key's file"),
        ({"key": server.certificate}, r"tls.key: .* holds no private key"),
        ({"key": other.key}, r"tls.key: .*another.key is not the key of .*sound.pem"),
        (sound | {"ca": authority.bundle}, r"tls.ca: has no effect without client_certificates"),
        (
            sound | {"principal_mapping_rules": "RULE:^CN=(.*$/$1/"},
            r"tls.principal_mapping_rules: .* no regular expression: ",
        ),
        ({"certificate": locked.certificate, "key": locked.key}, r"tls.key: .* is encrypted: give key_password_file"),
        (
            {"certificate": locked.certificate, "key": locked.key, "key_password_file": wrong},
            r"tls.key_password_file: .*wrong does not open .*locked.key",
        ),
        ({"ca": server.key, "client_certificates": "wanted"}, r"tls.ca: .* holds no certificate"),
        ({"client_certificates": "required"}, r"tls.ca: is missing"),
        ({"ciphers": "ROT13"}, r"tls.ciphers: 'ROT13' names no cipher"),
        ({"certificates": [KeyPair(certificate=tmp_path / "no")]}, r"tls.certificates\[0\].certificate: .*cannot be"),
        (
            {"certificate": tmp_path / "no", "ca": tmp_path / "neither", "ciphers": "ROT13"},
            r"tls.ca: .*neither cannot be read",
            r"tls.ca: has no effect",
            r"tls.ciphers",
            r"tls.certificate",
        ),
    ):
        found = texts(**settings)
        assert len(found) == len(wanted), found
        for text, pattern in zip(found, wanted, strict=True):
            assert re.search(pattern, text), text
            assert PASSWORD not in text and "not it" not in text
    upstream = UpstreamTls(key=server.key, ca=tmp_path / "no")
    assert [place for place, _ in tls_faults(None, upstream)] == ["upstream_tls.ca", "upstream_tls.certificate"]


def test_an_expired_certificate_is_a_warning(authority, caplog):
    made = for_clients(ClientTls(**authority.expired().settings()))
    assert "expired at" in made.warnings[0]
    Reloading("cluster=default tls", lambda: made)
    assert "peers will refuse it" in caplog.text


def test_new_files_are_taken_up_and_unsound_ones_are_not(authority, tmp_path, caplog):
    """As Kubernetes does it: a folder of links to ..data, which is a link that is replaced."""

    def mount(number, certificate, key):
        version = tmp_path / f"..{number}"
        version.mkdir()
        (version / "tls.crt").write_bytes(certificate.certificate.read_bytes())
        (version / "tls.key").write_bytes(key.key.read_bytes())
        (tmp_path / "..new").symlink_to(version.name)
        os.replace(tmp_path / "..new", tmp_path / "..data")  # noqa: PTH105 - what the kubelet does

    old, new = authority.server("localhost", file="old"), authority.server("localhost", "new.example", file="new")
    mount(1, old, old)
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    settings = ClientTls(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")
    reloading = Reloading("cluster=default tls", lambda: for_clients(settings))
    before = reloading.context
    assert not reloading.reload() and reloading.context is before
    mount(2, new, old)
    assert not reloading.reload() and not reloading.reload()
    assert reloading.context is before and reloading.failures == 1
    assert caplog.text.count("new certificates are not used, the old ones stay") == 1
    mount(3, new, new)
    assert reloading.reload() and reloading.reloads == 1
    client = ssl.create_default_context(cafile=authority.bundle)
    shake(reloading.context, client, "new.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(before, client, "new.example")


def test_a_context_that_cannot_be_made_at_start_is_a_fault_of_the_settings(tmp_path):
    with pytest.raises(ConfigError, match=r"tls\.certificate: .* cannot be read"):
        Reloading("", lambda: for_clients(ClientTls(certificate=tmp_path / "none", key=tmp_path / "none")))


@pytest.mark.parametrize("form", ("pkcs12", "jks", "der"))
def test_other_forms_are_named_with_the_commands_that_make_pem_of_them(authority, tmp_path, form):
    """Each command is run as it stands, with the password that it would ask for, and its file is taken."""
    server = authority.server(file=f"of {form}")
    store, key = tmp_path / "my store", tmp_path / "my key"
    if form == "der":
        for command, source, made in (("x509", server.certificate, store), ("pkey", server.key, key)):
            _run(f"openssl {command} -in '{source}' -outform der -out '{made}'")
    else:
        server.pkcs12(store, "secret")
        if form == "jks":
            made = tmp_path / "my.jks"
            _run(f"keytool -importkeystore -srckeystore '{store}' -destkeystore '{made}' -deststoretype JKS")
            store = made
        key = store

    def fault(**settings):
        ((_, text),) = tls_faults(ClientTls(**settings), None)
        return text

    certificate = _made_by(fault(certificate=store, key=server.key))
    certificate = certificate.rename(tmp_path / "certificate.pem")
    private = _made_by(fault(certificate=server.certificate, key=key))
    assert not list(tls_faults(ClientTls(certificate=certificate, key=private), None))


def _made_by(text):
    """The file that the command in a fault writes."""
    command = text.partition(" make PEM of it by ")[2]
    assert command, text
    _run(command)
    return Path(shlex.split(command)[-1])


def _run(command):
    command = command.replace("openssl pkcs12", "openssl pkcs12 -passin pass:secret")
    command = command.replace("-importkeystore", "-importkeystore -noprompt -srcstorepass secret -deststorepass secret")
    subprocess.run(command, shell=True, check=True, capture_output=True)
