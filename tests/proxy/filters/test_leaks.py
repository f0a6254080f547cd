"""A broker's own address in an answer is found in the forms that Kafka writes, and in no others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.protocol.primitives import write_uvarint
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.filters.leaks import MAX_MOVED, KnownAddresses

HOSTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=150)
ADDRESSES = st.builds(Address, HOSTS, st.integers(1, 65535))


def written(address, compact):
    host = address.host.encode()
    prefix = write_uvarint(len(host) + 1) if compact else len(host).to_bytes(2, "big")
    return prefix + host + address.port.to_bytes(4, "big")


OURS = Address("kproxy", 19092)


def known(*addresses, advertised=OURS):
    found = KnownAddresses([], lambda node_id, host: advertised)
    for node_id, address in enumerate(addresses):
        found.learn(node_id, address)
    return found


@given(st.lists(ADDRESSES, min_size=1, max_size=60), st.binary(max_size=200), st.binary(max_size=200), st.data())
def test_a_broker_address_is_found_at_any_place_of_an_answer(addresses, before, after, data):
    leak = data.draw(st.sampled_from(addresses))
    answer = before + written(leak, data.draw(st.booleans())) + after
    assert known(*addresses).find(memoryview(answer)) is not None


@given(st.lists(ADDRESSES, min_size=1, max_size=60), st.booleans(), st.data())
def test_the_address_that_an_answer_contains_is_named(addresses, compact, data):
    leak = data.draw(st.sampled_from(addresses))
    assert known(*addresses).find(b"\xff" * 9 + written(leak, compact) + b"\xff" * 9) == leak


@pytest.mark.parametrize(("size", "compact"), [(65_535, False), (65_535, True), (65_536, True)])
def test_a_host_is_found_up_to_the_longest_length_of_its_encoding(size, compact):
    long = Address("h" * size, 9092)
    assert known(long).find(written(long, compact)) == long


@pytest.mark.parametrize("compact", [False, True])
def test_bytes_that_only_resemble_a_broker_address_are_not_found(compact):
    kafka = Address("kafka-1", 9092)
    found = known(kafka)
    assert found.find(written(kafka, compact)) == kafka
    for other in (
        b"PLAINTEXT://kafka-1:9092",  # advertised.listeners, as DescribeConfigs shows it
        written(Address("kafka-1", 9093), compact),
        written(Address("my-kafka-1", 9092), compact),
        written(Address("kafka-10", 9092), compact),
        written(kafka, compact)[:-1],
        b"kafka-1" + (9092).to_bytes(4, "big"),
    ):
        assert found.find(other) is None
    assert known(kafka, advertised=kafka).find(written(kafka, compact)) is None


def test_each_of_many_brokers_is_found():
    addresses = [Address(f"broker-{number}.kafka", 35 + 97 * number % 40_000) for number in range(1000)]
    found = known(*addresses)
    for address in addresses:
        for compact in (False, True):
            assert found.find(bytes(5) + written(address, compact) + bytes(5)) == address
    assert found.find(written(OURS, False)) is None


def test_a_broker_that_moved_is_found_by_its_present_and_its_former_address():
    old, new = Address("old", 9092), Address("new", 9092)
    found = known(old)
    found.learn(0, new)
    assert found.find(written(old, False)) == old
    assert found.find(written(new, False)) == new
    for number in range(MAX_MOVED + 1):  # it moves again and again: the oldest address is forgotten
        found.learn(0, Address("new", number + 1))
    assert found.find(written(old, False)) is None


def test_bootstrap_addresses_are_known():
    address = Address("kafka", 9092)
    assert KnownAddresses([address], lambda *_: Address("kproxy", 19092)).find(written(address, True)) == address
