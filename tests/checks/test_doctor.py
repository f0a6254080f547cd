"""Each finding of `kproxy doctor`, provoked on a miniature cluster, on sockets and on this host; and a healthy one."""

import asyncio
import datetime
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from click.testing import CliRunner

from kproxy.checks import doctor as examining
from kproxy.checks.doctor import examine
from kproxy.cli.doctor import doctor
from kproxy.demo.cluster import Cluster
from kproxy.protocol.apis import API_VERSIONS, METADATA
from kproxy.proxy.upstream.dial_faults import NAME, RESOLVER
from kproxy.proxy.upstream.resolver import Resolver
from kproxy.views.doctor import lines
from tests.certificates import Authority
from tests.ports import free_ports
from tests.proxy.sasl.test_tokens import issuer  # noqa: F401 - a fixture

HOST = "127.0.0.1"
QUICK = {"connect_timeout_s": "1", "max_connections": "1000"}


@contextmanager
def running(**brokers) -> Iterator[Cluster]:
    """A miniature cluster in a thread of its own. brokers: what is done to each before it starts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    cluster = Cluster(count=3)
    for name, change in brokers.items():
        change(cluster.brokers[int(name.removeprefix("broker"))])
    try:
        asyncio.run_coroutine_threadsafe(cluster.start(), loop).result(10)
        yield cluster
    finally:
        asyncio.run_coroutine_threadsafe(cluster.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running() as cluster:
        yield cluster


def flags(cluster, port=None, **more):
    bootstrap = ",".join(f"{host}:{port}" for host, port in cluster.bootstrap)
    return {"listen": f"{HOST}:{port or free_ports(8)}", "bootstrap": bootstrap, **QUICK, **more}


def found(report, check):
    return [(one.level, f"{one.subject}: {one.found}") for one in report.findings if one.check == check]


def only(report, check, level, text):
    """That finding, with a fix, and no other error."""
    matching = [one for one in report.findings if (one.check, one.level) == (check, level)]
    assert any(text in f"{one.subject}: {one.found}" for one in matching), report.findings
    assert all(one.fix for one in matching)
    assert {one.check for one in report.findings if one.level == "error"} <= {check}
    return matching


def test_a_healthy_cluster_has_no_finding(cluster):
    report = examine(None, {}, flags(cluster))
    assert report.findings == []
    assert {one.check for one in report.passed} == {
        *("configuration", "open files", "memory", "ports", "reachability", "bootstrap", "versions", "advertised")
    }
    assert [one.check for one in report.skipped] == ["clock"]
    assert list(lines(report))[-1].startswith("nothing found; ")


def test_settings_that_cannot_be():
    only(examine(None, {}, {"listen": "9092", "bootstrap": "b:1"}), "configuration", "error", "not HOST:PORT")


def test_names_that_do_not_resolve_and_addresses_that_do_not_answer_are_found(cluster):
    closed = free_ports(1)
    good = ",".join(f"{host}:{port}" for host, port in cluster.bootstrap)
    report = examine(None, {}, flags(cluster, bootstrap=f"no-such-host.invalid:9092,{HOST}:{closed},{good}"))
    assert [level for level, _ in found(report, "names")] == ["error"]
    assert f"bootstrap {HOST}:{closed}: {HOST}:{closed} cannot be reached: Connection refused" in str(
        found(report, "reachability")
    )


@pytest.mark.parametrize(
    ("fault", "fix"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), NAME),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), RESOLVER),
        (TimeoutError(), RESOLVER),
        (OSError("'a..b' is no name"), NAME),
    ],
)
def test_names_have_the_remedy_of_a_running_kproxy(cluster, monkeypatch, fault, fix):
    """A name server that does not answer is no name to correct."""

    async def addresses(self, of):
        raise fault

    monkeypatch.setattr(Resolver, "addresses", addresses)
    (one,) = only(examine(None, {}, flags(cluster, bootstrap="kafka:9092")), "names", "error", "cannot be looked up")
    assert one.fix == fix.remedy


def test_keys_that_check_tokens(cluster, issuer, tmp_path):  # noqa: F811
    url, authorities = issuer
    file = tmp_path / "kproxy.toml"
    settings = (
        f"[[cluster]]\n[cluster.authentication]\nmechanisms = ['OAUTHBEARER']\nissuer = 'i'\naudience = 'a'\n"
        f"jwks_ca_file = '{authorities}'\njwks_url = "
    )
    file.write_text(f"{settings}'{url}/keys'\n")
    report = examine(str(file), {}, flags(cluster))
    assert report.findings == [] and "login" in {one.check for one in report.passed}
    for path, said in (("large", "more than"), ("odd", "does not use HTTP"), ("moved", "cannot be fetched")):
        file.write_text(f"{settings}'{url}/{path}'\n")
        only(examine(str(file), {}, flags(cluster)), "login", "error", said)


def test_a_host_that_accepts_and_sends_nothing_is_found(cluster):
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        report = examine(None, {}, {"listen": f"{HOST}:{free_ports(3)}", "bootstrap": f"{HOST}:{port}", **QUICK})
    only(report, "reachability", "error", "did not answer within 1 s")


def test_brokers_that_read_no_proxy_header(cluster, tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text('[[cluster]]\nproxy_protocol = "v2"\n')
    for one in only(examine(str(file), {}, flags(cluster)), "reachability", "error", "closed the connection"):
        assert one.fix.startswith("leave proxy_protocol out")


def test_ports_that_are_taken(cluster):
    port = free_ports(8)
    with socket.create_server((HOST, port)):
        only(examine(None, {}, flags(cluster, port)), "ports", "error", f"listen {HOST}:{port}: cannot be bound")
    with socket.create_server((HOST, port + 3)):
        only(examine(None, {}, flags(cluster, port)), "ports", "error", f"broker 2: {HOST}:{port + 3} cannot be bound")
    with socket.create_server((HOST, port + 7)):
        report = examine(None, {}, flags(cluster, port, admin=f"{HOST}:{port + 7}"))
        only(report, "ports", "error", f"admin {HOST}:{port + 7}: cannot be bound")
    report = examine(None, {}, flags(cluster, port, admin=f"{HOST}:{port + 3}"))
    (one,) = only(report, "ports", "error", f"broker 2: {HOST}:{port + 3} cannot be bound: Address already in use")
    assert one.fix.startswith("this kproxy has it already (admin)")


@pytest.mark.parametrize(
    ("listen", "found", "fix"),
    [
        ("192.0.2.1", "Cannot assign requested address", "that is no address of this machine: see ip address"),
        ("a..b", "", "correct the name, or the DNS of this host"),
    ],
)
def test_a_port_that_nobody_holds_is_not_looked_for(cluster, listen, found, fix):
    report = examine(None, {}, flags(cluster, listen=f"{listen}:9092"))
    (one,) = only(report, "ports", "error", f"listen {listen}:9092: cannot be bound: {found}")
    assert fix in one.fix


def test_node_ids_without_a_port(cluster, tmp_path):
    only(
        examine(None, {}, flags(cluster, broker_port_base="65534")), "node ids", "error", "broker 2: its node id has no"
    )
    file = tmp_path / "kproxy.toml"
    port = free_ports(4)
    file.write_text(
        f'connect_timeout_s = 1\nmax_connections = 100\n[[cluster]]\nlisten = "{HOST}:{port}"\n'
        f'bootstrap = ["{HOST}:{cluster.bootstrap[0][1]}"]\n'
        f'[[cluster.brokers]]\nids = "1-2"\nport = {port + 1}\n'
    )
    only(examine(str(file), {}, {}), "node ids", "error", "broker 3: its node id is in none of the ranges")
    file.write_text(file.read_text().replace('"1-2"', '"any"') + "port_count = 2\n")
    only(examine(str(file), {}, {}), "node ids", "error", "broker 3: no port is left for it: there are more than 2")


@contextmanager
def forwarder(to: int) -> Iterator[int]:
    """A port that leads to another, as a load balancer does."""
    server = socket.create_server((HOST, 0))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                upstream = socket.create_connection((HOST, to))
                for pair in ((client, upstream), (upstream, client)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def test_an_upstream_that_leads_back_through_a_load_balancer():
    port = free_ports(4)
    with forwarder(port) as balancer:
        flags = {"listen": f"{HOST}:{port}", "bootstrap": f"{HOST}:{balancer}", **QUICK}
        report = examine(None, {}, flags)
    only(report, "loops", "error", f"kproxy's own question to {HOST}:{balancer} arrived at kproxy's own port")


def test_a_cluster_that_wants_a_login():
    async def closes(version, body):
        raise asyncio.CancelledError  # as a broker does on a request before the login

    def wants_login(broker):
        broker._handlers[METADATA] = closes

    with running(broker1=wants_login, broker2=wants_login, broker3=wants_login) as cluster:
        only(examine(None, {}, flags(cluster)), "login", "error", "names its brokers only after a login")


def offering(**versions):
    """A change of a broker: it offers these versions of some APIs, by the number of their key."""

    def change(broker):
        usual = broker._handlers[API_VERSIONS]

        async def api_versions(version, body):
            answer = await usual(version, body)
            for name, (lowest, highest) in versions.items():
                key = int(name.removeprefix("api"))
                answer["apiKeys"] = [one for one in answer["apiKeys"] if one["apiKey"] != key]
                answer["apiKeys"].append({"apiKey": key, "minVersion": lowest, "maxVersion": highest})
            return answer

        broker._handlers[API_VERSIONS] = api_versions

    return change


def test_brokers_that_differ_and_brokers_that_are_newer():
    with running(broker2=offering(api0=(3, 12))) as cluster:
        report = examine(None, {}, flags(cluster))
        assert "brokers 2 serve other versions than the rest: Produce" in str(found(report, "versions"))
        assert report.is_sound
    newer = offering(api1=(4, 99), api999=(0, 3))
    with running(broker1=newer, broker2=newer, broker3=newer) as cluster:
        report = examine(None, {}, flags(cluster))
        only(report, "versions", "note", "newer than this kproxy: Fetch up to v18, unknown_999 unread")


def test_advertised_addresses_that_lead_nowhere_are_found(cluster):
    report = examine(None, {}, flags(cluster, advertise="no-such-host.invalid:{port}"))
    assert len(only(report, "advertised", "warning", "clients are told a name that this host does not know")) == 3
    report = examine(None, {}, flags(cluster, advertise="127.0.0.99:{port}"))
    assert len(only(report, "advertised", "warning", "it leads elsewhere: ")) == 3


def test_too_few_descriptors_and_too_little_memory_are_found(cluster, monkeypatch):
    report = examine(None, {}, flags(cluster, max_connections="1000000000"))
    assert "of max_connections=1000000000 fit" in str(found(report, "open files"))
    assert found(report, "open files")[0][0] == "error"
    assert found(report, "memory")[0][0] == "error"
    monkeypatch.setattr(examining, "_memory_available", lambda: 140_000_000)
    report = examine(None, {}, flags(cluster))
    assert found(report, "memory")[0][0] == "warning"


def test_the_limit_of_a_container_is_the_memory(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   64 kB\n")
    assert examining._memory_available(tmp_path, meminfo) == 64 * 1024
    (tmp_path / "memory.max").write_text("1000\n")
    assert examining._memory_available(tmp_path, meminfo) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    assert examining._memory_available(tmp_path, tmp_path / "none") is None


def test_the_command(cluster):
    arguments = [part for name, value in flags(cluster).items() for part in (f"--{name.replace('_', '-')}", value)]
    done = CliRunner().invoke(doctor, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"]
    done = CliRunner().invoke(doctor, ["--listen", f"{HOST}:{free_ports(3)}", "--bootstrap", f"{HOST}:{free_ports(1)}"])
    assert done.exit_code == 1
    assert "error: reachability: cluster default: bootstrap" in done.stdout
    assert "  fix: nothing listens there" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_all_of_it_ends_in_time():
    with socket.create_server((HOST, 0)) as silent:
        flags = {"listen": f"{HOST}:{free_ports(3)}", "bootstrap": f"{HOST}:{silent.getsockname()[1]}"}
        report = examine(None, {}, flags | {"connect_timeout_s": "60"}, timeout_s=0.5)
    assert "not all was checked within 0.5 s" in str(found(report, "time"))


def test_certificates_of_the_settings(cluster, tmp_path):
    authority = Authority(tmp_path)
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)
    sound = authority.server("kafka.example", file="sound")

    def report(certificate, **more):
        file = tmp_path / "kproxy.toml"
        settings = {key: value for key, value in flags(cluster, **more).items() if key not in QUICK}
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        tls = [f"{key} = {json.dumps(value)}" for key, value in certificate.items()]
        quick = [f"{key} = {value}" for key, value in QUICK.items()]
        file.write_text("\n".join([*quick, "[[cluster]]", *lines, "[cluster.tls]", *tls]))
        return examine(str(file), {}, {})

    expired = authority.expired("kafka.example", HOST).settings()
    only(report(expired), "tls", "error", "the certificate of ")
    about_to = authority.server("kafka.example", HOST, file="soon", not_after=soon).settings()
    only(report(about_to), "tls", "warning", "in 3.0 days")
    named = report(sound.settings(), advertise="elsewhere.example:{port}")
    only(
        named,
        "tls",
        "error",
        "no certificate is for elsewhere.example, which clients are told; there are: kafka.example",
    )
    only(report(sound.settings()), "tls", "error", f"no certificate is for {HOST}, which clients are told")
    assert found(report(sound.settings(), advertise="kafka.example:{port}"), "tls") == []
    by_address = authority.server("::1", file="address")
    assert found(report(by_address.settings(), advertise="[0:0:0:0:0:0:0:1]:{port}"), "tls") == []
    missing = report(sound.settings() | {"key": "/no/such/key"})
    only(missing, "configuration", "error", "/no/such/key")


def test_servers_of_zookeeper_are_looked_for(cluster, tmp_path):
    with socket.create_server((HOST, 0)) as up, socket.create_server((HOST, 0)) as taken:
        there, gone = up.getsockname()[1], free_ports(1)
        text = f'[[zookeeper]]\nname = "old"\nlisten = "{HOST}:{{}}"\nservers = ["{HOST}:{there}", "{HOST}:{gone}"]\n'
        file = tmp_path / "kproxy.toml"
        file.write_text(text.format(free_ports(1)))
        report = examine(str(file), {}, flags(cluster))
        assert report.is_sound
        subject = f"zookeeper old: server {HOST}:{gone}"
        assert ("warning", f"{subject}: cannot be reached: Connection refused") in found(report, "reachability")
        held = taken.getsockname()[1]
        file.write_text(text.format(held))
        (fault,) = found(examine(str(file), {}, flags(cluster)), "ports")
        assert fault[0] == "error" and fault[1].startswith(f"zookeeper old: listen {HOST}:{held}: cannot be bound")
