"""TLS end to end: clients and brokers in Python, certificates of all kinds, and the log and metrics of failures."""

import asyncio
import json
import logging
import os
import random
import re
import socket
import ssl
import struct
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from kproxy.analysis.findings import limits
from kproxy.analysis.findings.of_metrics import began, found_between, taken
from kproxy.errors import ConfigError
from kproxy.protocol.apis import METADATA, PRODUCE
from kproxy.proxy.admission import client_tls, failed_logins
from kproxy.proxy.cluster.routing import MAX_NODE_ID
from kproxy.proxy.config.limits import Limits
from kproxy.proxy.config.tls import ClientTls, KeyPair, UpstreamTls
from kproxy.proxy.sockets.streams import receive
from kproxy.proxy.tls import contexts, handshakes
from kproxy.proxy.tls.principals import MAX_SUBJECT
from kproxy.views.findings import sentence
from tests.certificates import Authority
from tests.proxy.live import Broker, TlsWire, Wire, kproxy, live, request, response


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


def trusting(authority, client=None):
    context = ssl.create_default_context(cafile=authority.bundle)
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


async def dial(here, context, name="localhost"):
    return await TlsWire((await Wire.dial(here.port)).sock).begin(context, server_side=False, name=name)


async def exchange(client, broker):
    asked = request(PRODUCE, 8, 1, {"acks": -1})
    await client.send(asked)
    assert await broker.frame() == asked
    await broker.send(response(PRODUCE, 8, 1, {"responses": []}))
    assert await client.frame() == response(PRODUCE, 8, 1, {"responses": []})


async def _shaken(wire, context, incoming, outgoing):
    """A client's end in memory, so that a test decides what is sent together."""
    end = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            end.do_handshake()
            await wire.send(outgoing.read())
            return end
        except ssl.SSLWantReadError:
            await wire.send(outgoing.read())
            incoming.write(await receive(wire.sock, 1 << 16))


def _hello(name):
    """The ClientHello of a client that asks for a name."""
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def results(here, side="client"):
    """Handshakes by result, without results that never occurred."""
    return {name: count for name, count in here.server.metrics.clusters["default"].tls[side].results.items() if count}


def test_tls_towards_clients_alone_works_and_the_log_names_each_mistake(authority, caplog):
    async def test():
        tls = ClientTls(**authority.server().settings(), ca=authority.bundle, client_certificates="required")
        async with kproxy(cluster={"tls": tls}) as here:
            client = await dial(here, trusting(authority, authority.client("alice")))
            broker = await here.broker.accept()
            await exchange(client, broker)
            (row,) = [row for rows in here.server.relays.connection_rows(0, 10) for row in rows]
            assert (row["principal"], row["tls"]) == ("User:CN=alice,OU=kafka clients,O=Example", "TLSv1.3")
            plain = await Wire.dial(here.port)
            await plain.send(request(METADATA, 12, 1))
            with suppress(ConnectionResetError):  # kproxy closes without reading its bytes
                assert await plain.rest() == b""
            http = await Wire.dial(here.port)
            await http.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert await http.rest() == b""
            balancer = await Wire.dial(here.port)  # a client behind the balancer may use TLS
            await balancer.send(b"\r\n\r\n\0\r\nQUIT\n" + bytes(4))
            with suppress(ConnectionResetError):
                assert await balancer.rest() == b""
            gone = await Wire.dial(here.port)
            gone.close()
            foreign = Authority(authority.folder, "foreign")
            for context in (
                trusting(authority),
                trusting(authority, foreign.client("mallory")),
                trusting(foreign, authority.client("alice")),
                _only_old(authority),
            ):
                with suppress(OSError):  # TLS 1.3: a client learns of it with its first read
                    refused = await dial(here, context)
                    await refused.rest()
            await here.until(lambda: sum(results(here).values()) == 9)
            assert results(here) == {
                "ok": 1,
                "plaintext": 1,
                "other": 1,
                "http": 1,
                "closed": 1,
                "no_certificate": 1,
                "certificate": 1,
                "rejected": 1,
                "version": 1,
            }
            assert here.counted.disconnects == {"tls": 8}
            metrics = here.server.metrics
            (one,) = found_between(began(metrics), taken(metrics), limits({}))
            assert (one.kind, one.where) == ("tls_failed", "TLS of clients with kproxy")
            assert sentence(one).startswith("7 of 8 TLS handshakes failed"), "health checks close"

    live(test())
    for text in (
        r"it does not use TLS, but this listener does: set security.protocol=SSL",
        r"HTTP on a port for Kafka over TLS",
        r"a PROXY protocol header on a port that expects none: set accept_proxy_protocol",
        r"it has no certificate, and client_certificates = 'required'",
        r"its certificate is not accepted: .*; set `ca` to the CAs of clients",
        r"rejected kproxy's certificate \(.*unknown ca.*\)",
        r"no version, cipher or key type in common",
    ):
        assert len([line for line in caplog.messages if re.search(text, line)]) == 1, text
    assert "before it sent anything" not in caplog.text  # a balancer looks every second whether the port is open


def test_probes_are_counted_without_a_warning_and_clients_that_leave_get_one(authority, caplog):
    """A probe ends before its ClientHello is whole, by FIN or by RST, or right behind it; or sends a few odd bytes."""

    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            hello = _hello("localhost")
            for sent in (b"\n", b"\0", b"QUIT", b"\x16", b"\x16\3", hello[:20], hello[:-1], hello):
                for resets in (False, True):
                    probe = await Wire.dial(here.port)
                    if sent == hello:
                        probe.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)  # FIN in the same segment
                    await probe.send(sent)
                    if resets:
                        probe.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    probe.close()
            await here.until(lambda: results(here) == {"closed": 16})
            assert here.counted.disconnects == {"tls": 16} and here.counted.silent == 16
            assert not [
                line for line in caplog.records if "refused=" in line.getMessage() and line.levelno > logging.INFO
            ]
            client = await Wire.dial(here.port)
            await client.send(hello)
            await receive(client.sock, 1)
            client.close()
            await here.until(lambda: results(here) == {"closed": 17})
            assert here.counted.silent == 16

    live(test())
    (warning,) = [line for line in caplog.records if "refused=" in line.getMessage() and line.levelno > logging.INFO]
    assert "closed the connection in the TLS handshake: does it trust the CA" in warning.getMessage()


@pytest.mark.parametrize(
    ("sent", "result", "text"),
    (
        (bytes.fromhex("802e0100020015000000100700c0") + bytes(34), "version", "in the format of SSL 2.0"),
        (bytes.fromhex("802e0103010015000000100700c0") + bytes(34), "version", "in the format of SSL 2.0"),
        (
            bytes.fromhex("16030000330100002f0300") + bytes(33) + bytes.fromhex("0008000a0009000500040100"),
            "version",
            "no version, cipher or key type in common",
        ),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "http", "HTTP on a port for Kafka over TLS"),
        (b"DELETE / HTTP/1.1\r\n\r\n", "http", "HTTP on a port for Kafka over TLS"),
        (request(METADATA, 12, 1), "plaintext", "it does not use TLS"),
    ),
    ids=("ssl_2", "tls_in_ssl_2", "ssl_3", "http_2", "http_delete", "kafka"),
)
def test_first_bytes_of_other_protocols_are_named(authority, caplog, sent, result, text):
    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            wire = await Wire.dial(here.port)
            await wire.send(sent)
            with suppress(ConnectionResetError):
                await wire.rest()
            await here.until(lambda: results(here) == {result: 1})

    live(test())
    assert len([line for line in caplog.messages if text in line]) == 1


def _only_old(authority):
    context = trusting(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")  # the server's key is of another kind
    return context


def test_the_log_names_the_expired_certificate_of_a_client(authority, caplog):
    async def test():
        tls = ClientTls(**authority.server().settings(), ca=authority.bundle, client_certificates="required")
        async with kproxy(cluster={"tls": tls}) as here:
            with suppress(OSError):
                refused = await dial(here, trusting(authority, authority.expired("alice")))
                await refused.rest()
            await here.until(lambda: results(here) == {"certificate": 1})

    live(test())
    assert "certificate has expired; give it a new one" in caplog.text


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_session_is_not_resumed_when_its_certificate_has_expired(authority, monkeypatch, caplog, version):
    """OpenSSL looks at a certificate in a full handshake alone, and each resumption may bring a new ticket."""

    async def test():
        tls = ClientTls(**authority.server().settings(), ca=authority.bundle, client_certificates="required")
        async with kproxy(cluster={"tls": tls}) as here:
            context = trusting(authority, authority.client("alice"))
            context.maximum_version = version
            client = await dial(here, context)
            for _ in range(2):
                await exchange(client, await here.broker.accept())
                resuming = SimpleNamespace(wrap_socket=partial(context.wrap_socket, session=client.tls.session))
                client.close()
                client = await dial(here, resuming)
                assert client.tls.session_reused
            await exchange(client, await here.broker.accept())
            client.close()
            monkeypatch.setattr(client_tls, "time", lambda: 1e11)
            with suppress(OSError):
                assert await (await dial(here, resuming)).rest() == b""
            await here.until(lambda: results(here) == {"ok": 3, "certificate": 1})

    live(test())
    assert "certificate has expired since its session began" in caplog.text


def test_connections_that_kproxy_decrypts_are_recorded_as_such(authority, tmp_path):
    async def test():
        tls = ClientTls(**authority.server().settings())
        async with kproxy(cluster={"tls": tls}, record=tmp_path / "tables") as here:
            client = await dial(here, trusting(authority))
            await exchange(client, await here.broker.accept())

    live(test())
    assert pq.read_table(tmp_path / "tables/connections").column("tls").to_pylist() == ["tls_decrypted"]


def test_towards_brokers_alone_with_a_certificate_of_kproxy(authority):
    """Discovery goes the same way as clients do."""

    class Secure(Broker):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

        async def accept(self):
            return await TlsWire((await super().accept()).sock).begin(self.context, server_side=True)

    server = authority.server("broker.example", file="broker")
    Secure.context.load_cert_chain(server.certificate, server.key)
    Secure.context.load_verify_locations(authority.bundle)
    Secure.context.verify_mode = ssl.CERT_REQUIRED
    own = authority.client("kproxy")

    async def test():
        tls = UpstreamTls(ca=authority.bundle, certificate=own.certificate, key=own.key, server_name="broker.example")
        async with kproxy(Secure(), cluster={"upstream_tls": tls}) as here:
            client = await Wire.dial(here.port)
            broker = await here.broker.accept()
            await exchange(client, broker)
            assert broker.tls.getpeercert()["subject"][-1] == (("commonName", "kproxy"),)
            assert results(here, "broker") == {"ok": 2}

    live(test())


@pytest.mark.parametrize(
    ("settings", "reason", "result"),
    [
        ({}, r"its certificate is not signed by the system's CAs", "certificate"),
        ({"ca": True}, r"its certificate is not for '127.0.0.1': .*server_name", "name"),
        ({"ca": True, "server_name": "other.example", "min_version": "1.3"}, r"no version", "version"),
        ({"ca": True, "server_name": "kafka_1.example"}, r"Java do for 'kafka_1\.example': .*server_name", "name"),
        ({"ca": True, "server_name": "kafka..example"}, r"'kafka\.\.example' is no server name .*server_name", "name"),
        (None, r"speaks TLS: .*\[cluster.upstream_tls\]", None),
    ],
)
def test_ready_reports_the_fault_of_a_brokers_tls(settings, reason, result, authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.other_name().certificate, authority.other_name().key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    other = authority.other_name()
    context.load_cert_chain(other.certificate, other.key)

    def as_java(connection, name, _):
        return ssl.ALERT_DESCRIPTION_ILLEGAL_PARAMETER if name is not None and "_" in name else None

    context.sni_callback = as_java

    async def serve(broker):
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(broker.sock)
            if settings is None:
                await Wire(sock).send(b"\x15\x03\x03\x00\x02\x02\x50")  # the alert of a Java client: not TLS
            else:
                with suppress(OSError):
                    await TlsWire(sock).begin(context, server_side=True)
            with suppress(OSError):
                sock.close()

    async def test():
        broker = Broker()
        tables = {}
        if settings is not None:
            known = settings | ({"ca": authority.bundle} if "ca" in settings else {})
            tables = {"upstream_tls": UpstreamTls(**known)}
        serving = asyncio.create_task(serve(broker))
        async with kproxy(broker, wait=False, cluster=tables) as here:
            await here.until(lambda: re.search(reason, "".join(here.server.not_ready())))
            assert result is None or results(here, "broker").keys() == {result}
        serving.cancel()

    live(test())


@pytest.mark.parametrize(
    ("newest", "gives", "reason"),
    [
        (ssl.TLSVersion.TLSv1_2, "foreign", "it does not accept kproxy's certificate: put the CA"),
        (ssl.TLSVersion.TLSv1_3, "foreign", "it does not accept kproxy's certificate: put the CA"),
        (ssl.TLSVersion.TLSv1_3, "expired", "has expired: give it a new one"),
        (ssl.TLSVersion.TLSv1_3, "", "does it want a certificate of kproxy? Give `certificate` and `key`"),
    ],
)
def test_what_a_broker_says_of_kproxys_certificate_is_said(newest, gives, reason, authority, tmp_path):
    """With TLS 1.3 it says so after the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server = authority.server(file="wants-certificates")
    context.load_cert_chain(server.certificate, server.key)
    context.load_verify_locations(authority.bundle)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = newest
    settings = {"ca": authority.bundle}
    if gives:
        own = Authority(tmp_path, "foreign").client() if gives == "foreign" else authority.expired()
        settings |= {"certificate": own.certificate, "key": own.key}

    async def serve(broker):
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(broker.sock)
            with suppress(OSError):
                await TlsWire(sock).begin(context, server_side=True)

    async def test():
        broker = Broker()
        serving = asyncio.create_task(serve(broker))
        async with kproxy(broker, wait=False, cluster={"upstream_tls": UpstreamTls(**settings)}) as here:
            await here.until(lambda: reason in "".join(here.server.not_ready()))
        serving.cancel()

    live(test())


def test_a_broker_that_resets_the_handshake_may_be_one_without_tls(authority):
    """Java closes a connection whose first bytes are no size; the rest of the ClientHello makes that a reset."""

    async def test():
        tls = UpstreamTls(ca=authority.bundle)
        async with kproxy(wait=False, cluster={"upstream_tls": tls}) as here:
            wire = await here.broker.accept()
            await wire.read(4)
            wire.reset()
            await here.until(lambda: "a plaintext port does so" in "".join(here.server.not_ready()))
            assert results(here, "broker").keys() == {"closed"}

    live(test())


def test_all_brokers_on_one_port_by_server_name(authority, caplog):
    wildcard = authority.wildcard()
    bootstrap = authority.server("bootstrap.kafka.example", "localhost", file="bootstrap")

    async def test():
        tables = {
            "route": "sni",
            "sni": "broker-{id}.kafka.example",
            "tls": ClientTls(**bootstrap.settings(), certificates=[KeyPair(**wildcard.settings())]),
        }
        async with kproxy(Broker(node_id=7), cluster=tables) as here:
            trusted = trusting(authority)
            client = await dial(here, trusted, "bootstrap.kafka.example")
            broker = await here.broker.accept()
            await client.send(request(METADATA, 12, 1, {"topics": []}))
            await broker.frame()
            await broker.send(response(METADATA, 12, 1, {"brokers": here.broker.brokers()}))
            answer = await client.frame()
            assert b"broker-7.kafka.example" in answer and here.port.to_bytes(4, "big") in answer
            named = await dial(here, trusted, "Broker-7.kafka.example")
            await exchange(named, await here.broker.accept())
            rows = [row for rows in here.server.relays.connection_rows(0, 10) for row in rows]
            assert [row["broker"] for row in rows] == [None, 7]
            for stranger in ("broker-07.kafka.example", "kafka.example", "broker-x.kafka.example"):
                with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name"):
                    await dial(here, trusted, stranger)
            series = set(here.server.metrics.clusters["default"].brokers)
            for node_id in (8, 9, MAX_NODE_ID):  # nobody has named them
                with suppress(OSError):
                    assert await (await dial(here, trusted, f"broker-{node_id}.kafka.example")).rest() == b""
            await here.until(lambda: here.counted.disconnects["unreachable"] == 3)
            assert set(here.server.metrics.clusters["default"].brokers) == series | {"7"}
            nameless = ssl.create_default_context(cafile=authority.bundle)
            nameless.check_hostname = False
            silent = await dial(here, nameless, "")
            await exchange(silent, await here.broker.accept())
            assert results(here) == {"ok": 6, "server_name": 3}
            assert not here.server.clusters[0].brokers  # no port but the one

    live(test())
    assert "'broker-8.kafka.example' is broker 8, which no answer has named yet" in caplog.text
    assert "'broker-07.kafka.example' is no server name of this listener (SNI)" in caplog.text
    assert "sent no server name (SNI) and is served as one that bootstraps" in caplog.text


@pytest.mark.parametrize(
    ("rules", "principal"), [(r"RULE:^CN=(.*?),OU=.*$/$1/U,DEFAULT", "User:ALICE"), ("RULE:^UID=(.*)$/$1/", None)]
)
def test_principals_by_rules(rules, principal, authority, caplog):
    async def test():
        tls = ClientTls(
            **authority.server().settings(),
            ca=authority.bundle,
            client_certificates="wanted",
            principal_mapping_rules=rules,
        )
        async with kproxy(cluster={"tls": tls}) as here:
            nobody = await dial(here, trusting(authority))
            await exchange(nobody, await here.broker.accept())
            client = await dial(here, trusting(authority, authority.client("alice")))
            if principal is None:
                with suppress(OSError):
                    await client.rest()
                assert results(here) == {"ok": 1, "principal": 1}
                return
            await exchange(client, await here.broker.accept())
            rows = [row for rows in here.server.relays.connection_rows(0, 10) for row in rows]
            assert [row["principal"] for row in rows] == ["User:ANONYMOUS", principal]

    live(test())
    assert principal or "no rule of principal_mapping_rules takes" in caplog.text


def test_a_subject_that_is_too_long_for_rules_gives_no_principal(authority, caplog):
    async def test():
        tls = ClientTls(**authority.server().settings(), ca=authority.bundle, client_certificates="required")
        async with kproxy(cluster={"tls": tls}) as here:
            certificate = authority.client("alice", "long", organization="o" * MAX_SUBJECT)
            client = await dial(here, trusting(authority, certificate))
            with suppress(OSError):
                assert await client.rest() == b""
            assert results(here) == {"principal": 1}

    live(test())
    assert f"characters: kproxy takes {MAX_SUBJECT} at most" in caplog.text


def test_certificates_that_are_not_accepted_are_in_the_audit(authority, monkeypatch, tmp_path):
    monkeypatch.setattr(failed_logins, "_PER_ADDRESS_S", 0.0)
    rules = "RULE:^CN=kafka-.*$/broker/"

    async def test():
        tls = ClientTls(
            **authority.server().settings(),
            ca=authority.bundle,
            client_certificates="required",
            principal_mapping_rules=rules,
        )
        async with kproxy(cluster={"tls": tls}, audit=str(tmp_path / "audit.jsonl")) as here:
            foreign = Authority(authority.folder, "stranger")
            for number, client in enumerate((None, foreign.client("mallory"), authority.client("alice")), 1):
                with suppress(OSError):
                    refused = await dial(here, trusting(authority, client))
                    await refused.rest()
                await here.until(lambda number=number: sum(results(here).values()) == number)
            (await Wire.dial(here.port)).close()  # a connection without a login
            await here.until(lambda: sum(results(here).values()) == 4)

    live(test())
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(line["mechanism"], line["reason"], line["claimed"]) for line in lines] == [
        ("certificate", "no_certificate", None),
        ("certificate", "certificate", None),
        ("certificate", "principal", "User:CN=alice,OU=kafka clients,O=Example"),
    ]


def test_an_end_of_tls_right_behind_bytes_is_passed_on_though_the_connection_stays(authority):
    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            client = await dial(here, trusting(authority))
            broker = await here.broker.accept()
            await exchange(client, broker)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            raw = await Wire.dial(here.port)
            second = await _shaken(raw, trusting(authority), incoming, outgoing)
            asked = request(PRODUCE, 8, 2, {"acks": -1})
            second.write(asked)
            with suppress(ssl.SSLError):
                second.unwrap()
            its_broker = await here.broker.accept()
            await raw.send(outgoing.read())  # both in one segment, and no FIN
            assert await its_broker.frame() == asked
            assert await its_broker.rest() == b""

    live(test())


def test_certificates_change_and_connections_stay(authority, monkeypatch, tmp_path):
    monkeypatch.setattr(contexts, "CHECK_S", 0.05)
    paths = {"certificate": tmp_path / "tls.crt", "key": tmp_path / "tls.key"}

    def mount(made):
        for name, path in paths.items():
            (tmp_path / "new").write_bytes(getattr(made, name).read_bytes())
            os.replace(tmp_path / "new", path)  # noqa: PTH105

    async def test():
        mount(authority.server())
        async with kproxy(cluster={"tls": ClientTls(**paths)}) as here:
            side = here.server.metrics.clusters["default"].tls["client"]
            old = await dial(here, trusting(authority))
            broker = await here.broker.accept()
            paths["certificate"].write_text("half a file")
            await here.until(lambda: side.reloads["failed"] == 1)
            still = await dial(here, trusting(authority))
            await exchange(still, await here.broker.accept())
            mount(authority.server("localhost", "renewed.example"))
            await here.until(lambda: side.reloads["ok"] == 1)
            new = await dial(here, trusting(authority), "renewed.example")
            await exchange(new, await here.broker.accept())
            await exchange(old, broker)
            assert side.expiries() == {str(paths["certificate"]): 32503680000}

    live(test())


def test_a_faulty_certificate_file_is_a_fault_of_the_settings(authority):
    async def test():
        tls = ClientTls(certificate=authority.bundle, key=authority.server().key)
        with pytest.raises(ConfigError, match=r"default: tls\.key: .* is not the key of"):
            async with kproxy(cluster={"tls": tls}, wait=False):
                pass

    live(test())


@pytest.mark.parametrize("sent", [1, 100, None], ids=["one byte", "a part of the hello", "the whole hello"])
def test_unfinished_handshakes_do_not_keep_other_clients_out(authority, monkeypatch, caplog, sent):
    monkeypatch.setattr(handshakes, "AT_ONCE", 2)

    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            hello = _hello("localhost")[:sent]
            left_open = [await Wire.dial(here.port) for _ in range(4)]
            for wire in left_open:
                await wire.send(hello)
            taken = 0 if sent else handshakes.AT_ONCE  # the kernel keeps the bytes of an incomplete ClientHello
            places = here.server.relays.worker.handshakes()._clients
            await here.until(lambda: here.server.relays.worker.gate.connections == len(left_open))
            await here.until(lambda: len(places._silent) == taken)
            client = await dial(here, trusting(authority))
            await exchange(client, await here.broker.accept())
            given_up = 0 if sent else 3
            assert results(here) == {"ok": 1} | ({"timeout": given_up} if given_up else {})
            assert here.counted.disconnects == ({"handshake_timeout": given_up} if given_up else {})
            for wire in left_open[given_up:]:  # a client that goes on within its time is served
                wire.close()

    live(test())
    assert sent or "others waited, and it, which asked for 'localhost', had kept kproxy waiting" in caplog.text


def test_a_server_name_that_is_not_ascii_is_refused_without_a_traceback(authority, caplog, capfd):
    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            wire = await Wire.dial(here.port)
            await wire.send(_hello("broker-7.example").replace(b"broker-7", b"broker-\xff"))
            with suppress(OSError):
                await wire.rest()
            await here.until(lambda: results(here) == {"server_name": 1})

    live(test())
    assert "its server name (SNI) is not ASCII" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_a_handshake_that_arrives_byte_by_byte_succeeds(authority):
    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            wire = await Wire.dial(here.port)
            wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            end = trusting(authority).wrap_bio(incoming, outgoing, server_hostname="localhost")
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
            for byte in outgoing.read():
                await wire.send(bytes([byte]))
                await asyncio.sleep(0)
            incoming.write(await receive(wire.sock, 1 << 16))
            end.do_handshake()
            await wire.send(outgoing.read())
            await here.broker.accept()
            assert results(here) == {"ok": 1}

    live(test())


def test_a_silent_client_is_closed_and_delays_no_other_client(authority, monkeypatch):
    monkeypatch.setattr(handshakes, "AT_ONCE", 2)

    async def test():
        tables = {"tls": ClientTls(**authority.server().settings()), "limits": Limits(handshake_timeout_s=4.0)}
        async with kproxy(cluster=tables) as here:
            idle = [await Wire.dial(here.port) for _ in range(20)]
            client = await dial(here, trusting(authority))
            await exchange(client, await here.broker.accept())
            for wire in idle:
                assert await wire.rest() == b""
            await here.until(lambda: results(here) == {"ok": 1, "timeout": 20})

    live(test())


def test_a_client_that_resets_before_it_is_accepted_is_counted(authority):
    async def test():
        async with kproxy(cluster={"tls": ClientTls(**authority.server().settings())}) as here:
            for _ in range(20):  # within one turn of the loop
                client = socket.create_connection(("127.0.0.1", here.port))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
            await here.until(lambda: here.counted.disconnects.total() == 20)
            assert here.counted.disconnects.keys() <= {"client_reset", "tls"}  # reset, or ended as it was looked at

    live(test())


def test_bytes_that_are_no_handshake_end_in_a_refusal(authority):
    """Random bytes, truncated and changed hellos, abandoned handshakes: none hangs or raises an unexpected error."""
    dice = random.Random(5)
    to_server, from_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    hello = trusting(authority).wrap_bio(to_server, from_client, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        hello.do_handshake()
    sound = from_client.read()

    def hostile() -> bytes:
        at = dice.randrange(len(sound))
        return dice.choice(
            (
                sound[:at],
                sound[:at] + dice.randbytes(dice.randrange(1, 9)) + sound[at + 1 :],
                sound + dice.randbytes(400),
                b"\x16\x03\x01" + dice.randbytes(300),
                dice.randbytes(100),
            )
        )

    async def attack(here):
        wire = await Wire.dial(here.port)
        with suppress(OSError):
            await wire.send(hostile())
            if dice.random() < 0.5:
                wire.end()
            if dice.random() < 0.5:
                async with asyncio.timeout(5):
                    await wire.rest()
        wire.reset()

    async def test():
        tables = {"tls": ClientTls(**authority.server().settings()), "limits": Limits(handshake_timeout_s=0.3)}
        async with kproxy(cluster=tables) as here:
            for _ in range(10):
                await asyncio.gather(*(attack(here) for _ in range(20)))
            await here.until(lambda: here.counted.disconnects.total() == 200)
            assert here.counted.disconnects.keys() <= {"tls", "handshake_timeout", "client_reset"}
            client = None
            while client is None:  # a busy machine may take longer than the limit, which is short for the hostile ones
                with suppress(OSError):
                    client = await dial(here, trusting(authority))
            await exchange(client, await here.broker.accept())

    live(test())
