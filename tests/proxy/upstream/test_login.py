"""The step of the way to a broker that logs in: what a broker's answer may cost before it is read."""

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
def test_an_answer_that_no_login_has_is_not_waited_for(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 480 KB with 80,000 APIs stopped the loop of all clients for 0.2 s."""
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
