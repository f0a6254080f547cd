"""All faults of the settings are reported at once, each with the source of its value."""

import re
import tomllib
from pathlib import Path

import pytest

from kproxy.errors import ConfigError
from kproxy.proxy.cluster.routing import Routes
from kproxy.proxy.config.addresses import Address, parse_address
from kproxy.proxy.config.authentication import Authentication
from kproxy.proxy.config.limits import Limits
from kproxy.proxy.config.load import load
from kproxy.proxy.config.login import ForPrincipal, Login
from kproxy.proxy.config.policy import Rule
from kproxy.proxy.config.settings import BrokerPorts, Cluster, Config
from kproxy.proxy.config.tls import ClientTls, UpstreamTls
from kproxy.proxy.sockets.descriptors import DEFAULT_CONNECTIONS


def faults(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return [path for path, _ in caught.value.faults]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kproxy.toml"
    path.write_text(text)
    return path


def test_flags_override_the_environment_and_the_environment_overrides_the_file(tmp_path):
    file = written(
        tmp_path,
        """
        admin = "127.0.0.1:9600"
        drain_timeout_s = 1
        max_connections = 7
        [[cluster]]
        listen = "127.0.0.1:9092"
        bootstrap = ["file:9092"]
        """,
    )
    environment = {"KPROXY_BOOTSTRAP": "variable:9092", "KPROXY_ADMIN": "127.0.0.1:9700", "KPROXY_MAX_CONNECTIONS": "8"}
    config = load(file, environment, {"bootstrap": "flag:9092,[::1]:9093", "admin": None})
    (cluster,) = config.clusters
    assert cluster.bootstrap == (Address("flag", 9092), Address("::1", 9093))
    assert cluster.listen == Address("127.0.0.1", 9092)
    assert (config.admin, config.drain_timeout_s, config.max_connections) == (Address("127.0.0.1", 9700), 1.0, 8)
    assert load(None, {"KPROXY_CONFIG": str(file)}).clusters[0].bootstrap == (Address("file", 9092),)


def test_listen_and_bootstrap_are_enough():
    config = load(flags={"listen": "[::1]:9092", "bootstrap": "b:9092"})
    assert config.clusters[0].advertised == "[::1]:{port}"
    assert config.clusters[0].name == "default"


def test_all_faults_are_reported_at_once_with_their_places(tmp_path):
    assert faults() == ["listen", "bootstrap"]
    flags = {"listen": "9092", "bootstrap": "a:1,b", "route": "smi", "advertise": "{name}:1"}
    assert faults(None, {"KPROXY_ADMIN": "nowhere", "KPROXY_DRAIN_TIMEOUT_S": "soon"}, flags) == [
        "--listen",
        "--bootstrap[1]",
        "--route",
        "--advertise",
        "KPROXY_ADMIN",
        "KPROXY_DRAIN_TIMEOUT_S",
    ]
    file = written(
        tmp_path,
        """
        max_connections = 0
        colour = "blue"
        [[cluster]]
        name = "no spaces"
        listen = "127.0.0.1:99999"
        bootstrap = []
        [[cluster]]
        name = "other"
        listen = "127.0.0.1:9092"
        bootstrap = ["b:9092"]
        [[cluster.brokers]]
        ids = "9-0"
        port = 70000
        """,
    )
    assert faults(file, {}, {"listen": "127.0.0.1:1"}) == [
        "--listen",  # ambiguous: the file has two clusters
        f"{file}: cluster[0].name",
        f"{file}: cluster[0].listen",
        f"{file}: cluster[0].bootstrap",
        f"{file}: cluster[1].brokers[0].ids",
        f"{file}: cluster[1].brokers[0].port",
        f"{file}: max_connections",
        f"{file}: colour",
    ]


@pytest.mark.parametrize(
    ("cluster", "fault"),
    [
        ({"listen": "0.0.0.0:9092"}, "clients cannot dial"),
        ({"listen": "h:65535"}, "no port is left"),
        ({"advertise": "gateway:9092"}, "the same for every broker"),
        ({"advertise": "0.0.0.0:{port}"}, "names no host"),
        ({"advertise": "{0}:1"}, "no address to advertise"),
        ({"advertise": "{id.x}:1"}, "no address to advertise"),
        ({"advertise": "{id!r}:{port}"}, "only the digits"),
        ({"advertise": "b{id:>999999999}:1"}, "only the digits"),
        ({"connect_timeout_s": "inf"}, "finite number"),
        ({"drain_timeout_s": "nan"}, "finite number"),
        ({"bootstrap": "h:9092"}, "is kproxy itself"),
        ({"bootstrap": "0.0.0.0:9"}, "names no host to dial"),
        ({"route": "sidecar", "bootstrap": "a:1,b:1"}, "one upstream"),
        ({"route": "sidecar", "broker_port_base": 5}, "binds no broker ports"),
        ({"broker_port_base": 70000}, "less than or equal to 65535"),
        ({"detail": "bodies"}, "'bodies' should be 'headers', 'topics' or 'batches'"),
        ({"bootstrap": ""}, "^--bootstrap: is empty$"),
        ({"bootstrap": "b"}, r"^--bootstrap\[0\]: 'b' is not HOST:PORT \(IPv6: \[ADDRESS\]:PORT\)$"),
        ({"bootstrap": 9092}, "9092 should be a list"),
    ],
)
def test_a_setting_that_cannot_work_is_a_fault(cluster, fault):
    flags = {"listen": "h:9092", "bootstrap": "b:9092"} | cluster
    with pytest.raises(ConfigError, match=fault):
        load(flags=flags)


@pytest.mark.parametrize(
    ("brokers", "fault"),
    [
        ('{ids = "0-9", port = 65530}', "beyond port 65535"),
        ('{ids = "0-2000000000", port = 1}', "beyond port 65535"),
        ('{ids = 5, port = 9100}, {ids = "3-6", port = 9200}', "declared twice"),
        ('{ids = "0-9", port = 9090}', "taken by x: listen"),
        ("{ids = 1, port = 9600}", "taken by admin"),
        ('{ids = 1, port = 9100, upstream = "{host}:9092"}', "only {id}"),
        ("{ids = 1, port = 9100, colour = 1}", "no such setting"),
        ("{ids = 1}", "port: is missing"),
        ('{ids = "any", port_count = 3}', "port: is missing: the port that is given out first"),
        ('{ids = "any", port = 9201}', "port_count: is missing: how many ports are given out"),
        ('{ids = "any", port = 65530, port_count = 7}', "7 ports .port_count. from port 65530 on go beyond port 65535"),
        ('{ids = "any", port = 9201, port_count = 3, advertise_port = 65534}', "advertise_port: 3 ports"),
        ('{ids = "any", port = 9201, port_count = 5000}', "port_count"),
        ('{ids = "any", port = 9091, port_count = 2}', "x: brokers: 127.0.0.1:9092 is taken by x: listen"),
        ('{ids = "any", port = 9590, port_count = 11}', "x: brokers: 127.0.0.1:9600 is taken by admin"),
        ('{ids = 7, port = 9203}, {ids = "any", port = 9201, port_count = 3}', "127.0.0.1:9203 is taken by x: brokers"),
        (
            '{ids = "any", port = 9201, port_count = 3}, {ids = "any", port = 9301, port_count = 3}',
            r"brokers\[1\].ids: brokers\[0\] is for any already",
        ),
        ('{ids = "any", port = 9201, port_count = 3, upstream = "b-{id}:9092"}', "upstream: the cluster alone says"),
        ("{ids = 1, port = 9201, port_count = 3}", 'port_count: is for ids = "any"'),
        ('{ids = 1, port = 9201, ports_file = "/p"}', 'ports_file: is for ids = "any"'),
    ],
)
def test_declared_ports_that_cannot_work_are_a_fault(tmp_path, brokers, fault):
    file = written(
        tmp_path,
        f"""
        admin = "0.0.0.0:9600"
        [[cluster]]
        name = "x"
        listen = "127.0.0.1:9092"
        bootstrap = ["b:9092"]
        brokers = [{brokers}]
        """,
    )
    with pytest.raises(ConfigError, match=fault):
        load(file)


def test_a_table_with_an_unknown_name_is_a_fault(tmp_path):
    file = written(tmp_path, '[[clusters]]\nlisten = "x:1"')
    assert faults(file, flags={"listen": "h:9092", "bootstrap": "b:9092"}) == [f"{file}: clusters"]


def test_conflicts_between_clusters_are_faults(tmp_path):
    file = written(
        tmp_path,
        """
        [[cluster]]
        listen = "127.0.0.1:9092"
        bootstrap = ["b:9092"]
        [[cluster]]
        listen = "0.0.0.0:9092"
        advertise = "h:{port}"
        bootstrap = ["127.0.0.1:9092"]
        """,
    )
    with pytest.raises(ConfigError) as caught:
        load(file)
    text = str(caught.value)
    assert "two are called 'default'" in text
    assert "0.0.0.0:9092 is taken by default: listen" in text
    assert "127.0.0.1:9092 is kproxy itself" in text


@pytest.mark.parametrize(
    ("listen", "bootstrap"),
    [
        ("127.0.0.1", "[::ffff:127.0.0.1]"),
        ("[::1]", "[0:0:0:0:0:0:0:1]"),
        ("0.0.0.0", "127.0.0.1"),
        ("0.0.0.0", "localhost"),
        ("", "127.0.0.1"),
        ("localhost", "localhost"),
    ],
)
def test_kproxy_as_its_own_bootstrap_is_a_fault_in_any_notation(listen, bootstrap):
    flags = {"listen": f"{listen}:9092", "bootstrap": f"{bootstrap}:9092", "advertise": "kproxy.example:{port}"}
    with pytest.raises(ConfigError, match="is kproxy itself"):
        load(flags=flags)
    assert load(flags=flags | {"bootstrap": f"{bootstrap}:9093"})
    assert load(flags={"listen": "127.0.0.2:9092", "bootstrap": "127.0.0.1:9092"})  # another local address


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]"])
def test_an_unspecified_address_cannot_be_dialled(host):
    with pytest.raises(ConfigError, match="names no host to dial"):
        load(flags={"listen": "127.0.0.1:9092", "bootstrap": f"{host}:9093"})


def test_a_cluster_setting_at_the_top_of_the_file_is_reported_with_its_right_place(tmp_path):
    file = written(tmp_path, 'listen = "h:9092"\nlisten_on = 1\n[[cluster]]\nlisten = "h:9092"\nbootstrap = ["b:9092"]')
    with pytest.raises(ConfigError) as caught:
        load(file)
    faults = dict(caught.value.faults)
    assert faults[f"{file}: listen"].startswith("belongs in [[cluster]]")
    assert faults[f"{file}: listen_on"].startswith("no such setting")


def test_settings_of_a_file_without_clusters_are_reported_as_misplaced_and_not_as_missing(tmp_path):
    file = written(tmp_path, 'listen = "h:9092"\nbootstrap = ["b:9092"]')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [path for path, _ in caught.value.faults] == [f"{file}: listen", f"{file}: bootstrap"]
    assert all(text.startswith("belongs in [[cluster]]") for _, text in caught.value.faults)


@pytest.mark.parametrize(
    ("above", "below", "said"),
    [
        ("", "bootstrp = 1", "did you mean bootstrap?"),
        ("", "broker-port-base = 1", "did you mean broker_port_base?"),
        ("", "[[cluster.brokers]]\nids = 1\nport = 1\nupstraem = 'h:1'", "did you mean upstream?"),
        ("[[clusters]]", "", "did you mean [[cluster]]?"),
        ("bootstrp = 1", "", "did you mean bootstrap of [[cluster]]?"),
        ("admn = 1", "", "did you mean admin?"),
        ("xyzzy = 1", "", "there are: cluster, admin, "),
        ("admin = localhost:9600", "", "; texts need quotes"),
        ('admin = "localhost:9600', "", "; a text ends on its line"),
        ("cluster:", "", "; write NAME = VALUE"),
        ("max_connections = 'ten'", "", "'ten' is not a whole number"),
        ("max_connections = true", "", "true is not a number"),
        ("drain_timeout_s = '10s'", "", "'10s' is not a number of seconds"),
        ("admin_token_file = 'token'", "", "says nothing without admin"),
        ("[admin_tls]\ncertificate = 'c'", "", "says nothing without admin"),
        # Settings in the wrong table.
        ("", "workers = 2", "belongs above the first [[cluster]]"),
        ("", "max_connections = 2", "belongs above the first [[cluster]] or in [cluster.limits]"),
        ("", "idle_timeout_s = 2", "belongs in [cluster.limits]"),
        ("", "[cluster.admin_tls]", "write it as [admin_tls]"),
        ("[tls]", "", "write it as [cluster.tls], below that line"),
        (
            "",
            "[cluster.tls]\ncertificate = 'c'\nmechanism = 'PLAIN'",
            "belongs in [cluster.login] or in [[cluster.login.by_principal]]",
        ),
        ("", "[cluster.authentication]\nmechanism = ['PLAIN']", "did you mean mechanisms?"),
        # Values in place of tables, and tables in place of lists or the reverse.
        ("", "tls = 'on'", "write it as [cluster.tls]"),
        ("", "[[cluster.limits]]", "write it as [cluster.limits]"),
        ("", "[cluster.policy]\naction = 'deny'", "write it as [[cluster.policy]], one for each"),
        ("", "[[cluster.brokers]]\nid = 1\nport = 9100", "did you mean ids?"),  # not: ids is missing
        ("", "[cluster.login]\nmechanism = 'OAUTHBEARER'\ntoken_command = 'x'", "it should be a list: put it into [ ]"),
        ("", "read_only = 'yep'", "'yep' is neither true nor false"),
        ("", "name = 5", "5 is no text: put it into quotes"),
        ("", "name = 'my cluster'", "a name has letters, digits"),
        ("", "[cluster.tls]\ncertificate = 'c'\nmin_version = 1.2", "1.2 is no text: put it into quotes"),
        ("", "[[cluster.policy]]\naction = 'deny'\nprincipal = 'alice'", "like 'User:alice'"),
    ],
)
def test_an_invalid_key_or_value_is_reported_with_a_suggestion(tmp_path, above, below, said):
    file = written(tmp_path, f'{above}\n[[cluster]]\nlisten = "h:9092"\nbootstrap = ["b:9092"]\n{below}')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert [said in text for _, text in caught.value.faults] == [True], caught.value.faults


def test_a_misnamed_table_of_clusters_is_one_fault(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, '[[clusters]]\nlisten = "h:9092"\nbootstrap = ["b:9092"]'))
    assert [text for _, text in caught.value.faults] == ["no such setting; did you mean [[cluster]]?"]


def test_the_token_variable_of_ctl_needs_no_admin_port_and_a_byte_order_mark_is_ignored(tmp_path):
    file = written(tmp_path, '\ufeff[[cluster]]\nlisten = "h:9092"\nbootstrap = ["b:9092"]')
    assert load(file, {"KPROXY_ADMIN_TOKEN_FILE": "token"}).admin is None


def test_mistyped_variables_are_faults_and_those_of_kubernetes_are_not():
    flags = {"listen": "h:9092", "bootstrap": "b:9092"}
    with pytest.raises(ConfigError) as caught:
        load(None, {"KPROXY_BOOSTRAP": "b:9092", "KPROXY_X": "1", "KPROXYX": "1", "KPROXY_ADMIN_PORT": "9600"}, flags)
    faults = dict(caught.value.faults)
    assert faults["KPROXY_BOOSTRAP"] == "no such setting; did you mean KPROXY_BOOTSTRAP?"
    assert "KPROXY_MAX_CONNECTIONS" in faults["KPROXY_X"]
    assert faults.keys() == {"KPROXY_BOOSTRAP", "KPROXY_X", "KPROXY_ADMIN_PORT"}
    # The variables of every container in a namespace with Services named kproxy and kproxy-admin.
    service = {}
    for name in ("KPROXY", "KPROXY_ADMIN"):
        service |= {
            f"{name}_SERVICE_HOST": "10.0.0.1",
            f"{name}_SERVICE_PORT": "9092",
            f"{name}_SERVICE_PORT_KAFKA": "9092",
            f"{name}_PORT": "tcp://10.0.0.1:9092",
            f"{name}_PORT_9092_TCP": "tcp://10.0.0.1:9092",
            f"{name}_PORT_9092_TCP_PROTO": "tcp",
            f"{name}_PORT_9092_TCP_PORT": "9092",
            f"{name}_PORT_9092_TCP_ADDR": "10.0.0.1",
        }
    assert load(None, service, flags)


def test_missing_and_invalid_files_are_faults(tmp_path):
    assert faults(tmp_path / "absent.toml") == [str(tmp_path / "absent.toml")]
    assert faults(written(tmp_path, "listen = ")) == [str(tmp_path / "kproxy.toml")]
    assert faults(written(tmp_path, 'cluster = "default"')) == [f"{tmp_path / 'kproxy.toml'}: cluster"]


def test_source_addresses_must_be_numeric_and_unicast(tmp_path):
    cluster = "[[cluster]]\nlisten = '127.0.0.1:9092'\nbootstrap = 'kafka:9092'\n"
    given = "upstream_source_addresses = ['10.0.0.5', '[2001:DB8::5]', '::ffff:10.0.0.6']\n"
    expected = ("10.0.0.5", "2001:db8::5", "10.0.0.6")
    assert load(written(tmp_path, given + cluster)).upstream_source_addresses == expected
    for wrong, said in (
        ("kafka", "is no numeric address"),
        ("10.0.0.5:0", "is no numeric address"),
        ("fe80::1%eth0", "is no numeric address"),
        ("0.0.0.0", "no address of one machine"),
        ("::", "no address of one machine"),
        ("ff02::1", "no address of one machine"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(written(tmp_path, f"upstream_source_addresses = '{wrong}'\n{cluster}"))


def test_the_shipped_file_contains_every_setting_with_its_default(tmp_path):
    file = Path(__file__).parents[3] / "deploy/kproxy.toml"
    config = load(file)
    assert len(config.clusters) == 1  # it runs unchanged; its commented-out clusters are valid too
    above, mark, below = file.read_text().partition("# Further clusters")
    whole = above + mark + re.sub(r"^# (?=\[|\w+ = )", "", below, flags=re.MULTILINE)
    document = tomllib.loads(whole)
    assert len(load(written(tmp_path, whole)).clusters) == len(document["cluster"])
    left_out = {"clusters", "record", "max_connections", "upstream_mark", "audit", "admin_token_file", "admin_tls"}
    left_out |= {"record_keep_h", "record_keep_bytes", "flight", "otlp"}
    assert document.keys() - {"cluster"} == Config.model_fields.keys() - left_out
    assert "\n# upstream_mark = " in file.read_text()
    assert {"name", "listen", "servers"} == set(document["zookeeper"][0])
    assert "\n# audit = " in file.read_text()
    assert "\n# admin_token_file = " in file.read_text()
    assert all(
        f"\n# {name} = " in file.read_text() for name in ("record_keep_h", "record_keep_bytes", "flight", "otlp")
    )
    assert "\n# record = " in file.read_text()  # recording fills a disk: it must be enabled deliberately
    assert f"\n# max_connections = {DEFAULT_CONNECTIONS} " in file.read_text()  # lower with few open files
    assert set().union(*document["cluster"]) == set(Cluster.model_fields)
    assert set().union(*document["cluster"][1]["brokers"]) == set(BrokerPorts.model_fields)
    assert set().union(*(rule for table in document["cluster"] for rule in table.get("policy", ()))) == set(
        Rule.model_fields
    )
    assert set().union(*(table.get("limits", ()) for table in document["cluster"])) == set(Limits.model_fields)
    for name, field in Config.model_fields.items():
        if name not in ("clusters", "admin"):
            assert getattr(config, name) == field.default
    plain = load(flags={"listen": "127.0.0.1:9092", "bootstrap": "kafka-1:9092,kafka-2:9092"}).clusters[0]
    assert config.clusters[0].advertised == plain.advertised
    assert Routes(config.clusters[0], 9092).port_of(3) == Routes(plain, 9092).port_of(3)


def test_the_page_of_each_feature_describes_all_its_settings():
    root = Path(__file__).parents[3]
    shipped = (root / "deploy/kproxy.toml").read_text()
    pages = {Login: "sasl", ForPrincipal: "sasl", Authentication: "sasl", ClientTls: "tls", UpstreamTls: "tls"}
    for model, page in pages.items():
        text = shipped + (root / f"docs/{page}.md").read_text()
        assert [name for name in model.model_fields if not re.search(rf"\b{name}\b", text)] == [], model


def test_the_readmes_table_links_every_page():
    root = Path(__file__).parents[3]
    table = (root / "README.md").read_text().partition("## How to")[2].partition("\n## ")[0]
    assert {f"docs/{page.name}" for page in (root / "docs").glob("*.md")} == set(re.findall(r"\((docs/\S+)\)", table))


def test_node_ids_can_be_advertised_with_leading_zeros():
    flags = {"listen": "h:9092", "bootstrap": "b:9092", "advertise": "kafka-{id:03}.h:9092"}
    (cluster,) = load(flags=flags).clusters
    assert Routes(cluster, 9092).advertised(7, "b") == Address("kafka-007.h", 9092)


def test_addresses_are_parsed_and_printed():
    assert parse_address("[::1]:1") == ("::1", 1)
    assert str(Address("::1", 1)) == "[::1]:1"
    for text in ("", "h", "h:", ":x", "::1:1", "h:0", "h:65536", "[h]:1:2", "a b:1", "h:1/x"):
        with pytest.raises(ValueError, match=r"HOST:PORT|between"):
            parse_address(text)
    with pytest.raises(ValueError, match=r"'@kafka:9092' is too much") as fault:
        parse_address("user:hunter2@kafka:9092")
    assert "hunter2" not in str(fault.value)
