"""Failed handshakes: the log warns of the first of each kind, sums up each minute, and has a line at their end."""

import asyncio
import logging

import pytest

from kproxy.errors import RefusedClient
from kproxy.proxy.admission import failed_handshakes
from kproxy.proxy.admission.failed_handshakes import MAX_ADDRESSES, FailedHandshakes, is_failed_handshake
from kproxy.proxy.config.addresses import Address
from tests.proxy.live import live


def refused(kind):
    return RefusedClient("tls", f"why: {kind}", kind)


@pytest.fixture
def minutes(monkeypatch):
    """Minutes pass with the loop's turns."""
    monkeypatch.setattr(failed_handshakes, "INTERVAL_S", 0)


async def until_said(caplog, text):
    while not any(text in line for line in caplog.messages):  # noqa: ASYNC110 - a minute is a turn of the loop here
        await asyncio.sleep(0)


def test_the_first_of_each_kind_is_logged_at_once_and_the_rest_once_a_minute(minutes, caplog):
    async def test():
        failed = FailedHandshakes("shop")
        for port, (host, kind) in enumerate(
            [("10.0.0.1", "version"), ("10.0.0.1", "version"), ("10.0.0.2", "rejected")]
            + [("10.0.0.2", "rejected")] * 3
            + [("2001:db8::1", "rejected"), ("2001:db8::2", "version")]
        ):
            failed.add(Address(host, port), refused(kind))
        assert caplog.messages == [
            "refused=tls cluster=shop client=10.0.0.1:0: why: version",
            "refused=tls cluster=shop client=10.0.0.2:2: why: rejected",
        ]
        await until_said(caplog, "more handshakes")
        line = caplog.records[-1]
        assert (line.levelno, line.left_out) == (logging.WARNING, 6)
        assert line.getMessage() == (
            "cluster=shop 6 more handshakes of clients failed within 0 s: 4 rejected, 2 version; "
            "from 10.0.0.2 (3), 2001:db8::/64 (2), 10.0.0.1 (1)"
        )
        failed.stop()

    live(test())


def test_a_minute_without_failures_is_logged_and_the_next_failure_counts_as_a_first_one(minutes, caplog):
    caplog.set_level(logging.INFO)

    async def test():
        failed = FailedHandshakes("shop")
        for _ in range(3):
            failed.add(Address("10.0.0.1", 1), refused("version"))
        await until_said(caplog, "more handshakes")
        failed.admitted += 2
        await until_said(caplog, "no handshake of a client has failed")
        assert caplog.messages[-1].endswith("and 2 clients were admitted; before, 3 failed")
        for _ in range(3):  # silent minutes log nothing more
            await asyncio.sleep(0)
        assert len(caplog.messages) == 3
        failed.add(Address("10.0.0.1", 1), refused("version"))
        assert "why: version" in caplog.messages[-1] and len(caplog.messages) == 4
        failed.stop()

    live(test())


def test_addresses_are_bounded_and_a_stop_logs_the_counts(caplog):
    async def test():
        failed = FailedHandshakes("shop")
        for number in range(1000):
            failed.add(Address(f"10.0.{number // 256}.{number % 256}", 1), refused("version"))
        assert len(caplog.messages) == 1 and len(failed._addresses) == MAX_ADDRESSES + 1
        failed.stop()
        assert caplog.messages[-1].endswith(f"10.0.0.5 (1), {MAX_ADDRESSES - 5} or more other addresses ({999 - 5})")
        failed.stop()
        assert len(caplog.messages) == 2

    live(test())


def test_which_refusals_are_failed_handshakes():
    assert is_failed_handshake(refused("version"))
    assert is_failed_handshake(RefusedClient("handshake_timeout", "slow", "timeout"))
    assert not is_failed_handshake(RefusedClient("tls", "probe", "closed", said_nothing=True))
    assert not is_failed_handshake(RefusedClient("limit", "too many"))
