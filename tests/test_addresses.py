"""Numeric addresses in their one form, whichever of several spellings comes."""

from ipaddress import IPv4Address, IPv6Address

import pytest

from kproxy.addresses import numeric, unmapped


@pytest.mark.parametrize("text", ("10.1.2.3", "::ffff:10.1.2.3", "::FFFF:a01:203", "0:0:0:0:0:ffff:10.1.2.3"))
def test_an_ipv4_address_is_one_however_it_is_spelled(text):
    assert numeric(text) == IPv4Address("10.1.2.3")


@pytest.mark.parametrize("text", ("2001:db8::1", "2001:DB8:0::1", "2001:db8::1%eth0"))
def test_an_ipv6_address_has_neither_a_scope_nor_other_spellings(text):
    assert numeric(text) == IPv6Address("2001:db8::1")


@pytest.mark.parametrize("text", ("", "kafka", "10.1", "::ffff:10.1.2.3:9092"))
def test_a_name_is_no_address(text):
    assert numeric(text) is None


def test_the_kernels_text_of_a_mapped_address_becomes_ipv4_and_others_stay():
    for text, host in (("::ffff:10.1.2.3", "10.1.2.3"), ("fe80::1%eth0", "fe80::1%eth0"), ("10.1.2.3", "10.1.2.3")):
        assert unmapped(text) == host
