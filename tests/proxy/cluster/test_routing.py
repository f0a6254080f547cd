"""The map of ports is a function of the configuration and the node id, and never names a broker's own address."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy.proxy.cluster.routing import NO_PORT, BrokerPort, Routes
from kproxy.proxy.config.addresses import MAX_PORT, Address
from kproxy.proxy.config.settings import Cluster


def routes(listen_port=9092, **settings):
    settings = {"listen": "gw:9092", "bootstrap": ["b:9092"]} | settings
    return Routes(Cluster.model_validate(settings), listen_port)


NODE_IDS = st.integers(-2, 2**31 - 1) | st.integers(0, 70000)
UPSTREAMS = st.builds(Address, st.text(st.characters(codec="utf-8"), min_size=1), st.integers(-1, 65535))


@given(st.lists(st.tuples(NODE_IDS, UPSTREAMS)), st.lists(st.tuples(NODE_IDS, UPSTREAMS)))
def test_replicas_assign_the_same_ports_whatever_they_have_learnt(one_learns, other_learns):
    one, other = routes(), routes()
    for node_id, upstream in one_learns:
        one.learn(node_id, upstream)
    for node_id, upstream in other_learns:
        other.learn(node_id, upstream)
    for node_id, upstream in one_learns + other_learns:
        assert one.advertised(node_id, upstream.host) == other.advertised(node_id, upstream.host)


@given(st.sets(NODE_IDS), st.integers(1, MAX_PORT))
def test_every_node_has_a_port_of_its_own_or_none(node_ids, base):
    table = routes(broker_port_base=base)
    ports_of = {node_id: table.port_of(node_id) for node_id in node_ids}
    ports = [port_of.bind for port_of in ports_of.values() if port_of is not None]
    assert len(ports) == len(set(ports))
    for node_id, port_of in ports_of.items():
        reachable = node_id >= 0 and base + node_id <= MAX_PORT
        assert port_of == (BrokerPort(base + node_id, base + node_id) if reachable else None)
        assert table.advertised(node_id, "theirs") == ("gw", base + node_id if reachable else NO_PORT)


def test_broker_ports_follow_the_listen_port():
    assert routes().port_of(0) == BrokerPort(9093, 9093)
    assert routes(listen_port=5000).port_of(3) == BrokerPort(5004, 5004)


def test_declared_ports():
    brokers = [
        {"ids": "1000-1004", "port": 9100, "advertise_port": 19100, "upstream": "b{id}:9092"},
        {"ids": 7, "port": 9200},
    ]
    table = routes(advertise="gw-{id}.example:{port}", brokers=brokers)
    assert list(table.declared()) == [1000, 1001, 1002, 1003, 1004, 7]
    assert table.port_of(1003) == BrokerPort(9103, 19103)
    assert table.advertised(1003, "b") == ("gw-1003.example", 19103)
    assert table.advertised(7, "b") == ("gw-7.example", 9200)
    assert table.port_of(8) is None
    assert table.advertised(8, "b") == ("gw-8.example", NO_PORT)
    assert table.upstreams == {node_id: Address(f"b{node_id}", 9092) for node_id in range(1000, 1005)}


def test_sidecar_names_brokers_by_template_and_dials_none():
    table = routes(route="sidecar", listen_port=19092)
    assert table.advertised(5, "broker-5") == ("broker-5", 19092)
    assert not table.learn(5, Address("broker-5", 9092))
    assert table.upstreams == {}
    table = routes(route="sidecar", advertise="k-{id}.example:443")
    assert table.advertised(5, "broker-5") == ("k-5.example", 443)


def test_advertised_ports_made_of_ids_do_not_overflow():
    table = routes(advertise="gw:9{id}")
    assert table.advertised(12, "b") == ("gw", 912)
    assert table.advertised(12345, "b") == ("gw", NO_PORT)


def test_ipv6():
    assert routes(listen="[::1]:9092").advertised(0, "b") == ("::1", 9093)
    assert routes(route="sidecar", advertise="[{host}]:{port}").advertised(0, "fe80::1") == ("fe80::1", 9092)


def test_an_address_that_moves_is_followed():
    table = routes()
    assert not table.learn(1, Address("old", 9092))
    assert not table.learn(1, Address("new", 9092))
    assert table.upstreams == {1: Address("new", 9092)}


def test_an_address_that_clients_get_is_never_taken_for_a_brokers():
    table = routes()
    assert not table.learn(1, Address("b1", 9092))
    assert "which is kproxy" in table.learn(1, Address("gw", 9094))
    assert table.upstreams == {1: Address("b1", 9092)}
    assert not table.learn(1, Address("gw", 9095))  # another kproxy in front of broker 1: a chain, not a loop


def test_an_impossible_host_name_is_not_learnt_and_is_logged_truncated():
    table = routes()
    assert not table.learn(1, Address("b1", 9092))
    refused = table.learn(1, Address("h" * 32_000, 9092))
    assert "a host of 32000 bytes" in refused
    assert len(refused) < 200
    assert table.upstreams == {}
    assert table.learn(1, Address("\u00e9" * 128, 9092))  # bytes count, not characters
    assert not table.learn(1, Address("h" * 255, 9092))


def test_ports_that_are_given_out_shift_as_declared_ones_do():
    entry = {"ids": "any", "port": 9201, "port_count": 3, "advertise_port": 19201}
    table = routes(brokers=[{"ids": "5", "port": 9101}, entry], advertise="gw:{port}")
    assert list(table.declared()) == [5]
    assert table.is_declared(5) and not table.is_declared(1840211337)
    assert table.port_of(1840211337) is None
    assert table.advertised(1840211337, "theirs") == ("gw", NO_PORT)
    table.assigned = {1840211337: 9202}
    assert table.port_of(1840211337) == BrokerPort(9202, 19202)
    assert table.advertised(1840211337, "theirs") == ("gw", 19202)
    assert table.port_of(5) == BrokerPort(9101, 9101)
    assert table.port_of(7) is None
