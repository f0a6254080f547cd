"""The login step of a connection to a broker limits the size of the broker's responses."""

import asyncio
import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy.errors import UpstreamError
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.config.login import Login
from kproxy.proxy.sasl.identities import Identities
from kproxy.proxy.upstream.login import MAX_ANSWER, BrokerLogin


@pytest.mark.parametrize("size", [MAX_ANSWER + 1, 2**31 - 1, -1])
def test_a_response_too_large_for_a_login_is_refused_by_its_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response of 480 KB with 80,000 APIs blocked the loop for 0.2 s."""
    monkeypatch.setenv("PASSWORD", "secret")
    counted: list[tuple[str, str]] = []
    settings = Login(mechanism="PLAIN", username="kproxy", password_env="PASSWORD")
    loops: Any = SimpleNamespace(asks=lambda upstream: "kproxy-1")
    login = BrokerLogin(Identities(settings), loops, lambda *outcome: counted.append(outcome))

    async def log_in() -> None:
        ours, brokers = socket.socketpair()
        with ours, brokers:
            ours.setblocking(False)
            brokers.send(struct.pack(">i", size))
            outgoing: Any = SimpleNamespace(sock=ours, address=Address("broker", 9092), client=None, upstream=None)
            await login(outgoing)

    with pytest.raises(UpstreamError, match=rf"broker:9092: an answer of {size} bytes to a login") as refused:
        asyncio.run(log_in())
    assert refused.value.cause == "login_protocol" and counted == [("PLAIN", "login_protocol")]
