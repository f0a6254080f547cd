"""Existing interfaces, and error messages for missing ones."""

import errno

import pytest

from kproxy.errors import KproxyError
from kproxy.watch import interfaces
from kproxy.watch.interfaces import ANY, Asked, Interface, all_of_them, refused

THERE = [Interface("lo", 1, True, True), Interface("eth0", 2, True, False), Interface("eth1", 3, False, False)]


@pytest.fixture
def there(monkeypatch):
    monkeypatch.setattr(interfaces, "all_of_them", lambda: THERE)


def test_loopback_is_there():
    (lo,) = [each for each in all_of_them() if each.name == "lo"]
    assert lo.is_loopback


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), "name the interface to watch with --interface; there are: lo, eth0, eth1 \\(down\\); any: all of them"),
        (("eht0",), "there is no interface 'eht0' here; there are: lo, eth0"),
        (("eth0", "eth1"), "interface eth1 is down: bring it up with `ip link set eth1 up`"),
    ],
)
def test_errors_list_the_existing_interfaces(there, names, text):
    with pytest.raises(KproxyError, match=text):
        Asked(names).check()


def test_any_has_all_others_in_it():
    with pytest.raises(KproxyError, match="leave eth0 out"):
        Asked((ANY, "eth0"))


def test_interfaces_that_are_up_are_watched_and_missing_ones_are_reported(there):
    for names, found, missing, is_one in (
        (("eth0",), ["eth0"], [], True),
        ((ANY,), ["lo", "eth0"], [], False),
        (("eth0", "eth1"), ["eth0"], ["interface eth1 is down"], False),
        (("eth9",), [], ["there is no interface eth9"], True),
    ):
        asked = Asked(names)
        assert [each.name for each in asked.found()] == found
        assert (asked.missing(), asked.is_one, asked.label) == (missing, is_one, ",".join(names))
    Asked(("lo", "lo")).check()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (PermissionError(errno.EPERM, "no"), "CAP_NET_RAW.*sudo.*AmbientCapabilities.*docs/watch.md"),
        (OSError(errno.ENOMEM, "no"), "--buffer-mib"),
        (OSError(errno.EAFNOSUPPORT, "no"), "tcpdump elsewhere"),
        (OSError(errno.ENODEV, "no such device"), "no such device"),
    ],
)
def test_a_kernel_that_refuses_is_explained(fault, text):
    with pytest.raises(KproxyError, match=text):
        raise refused(fault)
