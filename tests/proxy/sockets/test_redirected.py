"""The original destination of a client. With a kernel that redirects: tests/deploy/test_transparent.py."""

import socket

import pytest

from kproxy.proxy.sockets.redirected import original_destination, take_any_destination


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_without_a_redirect_the_destination_is_the_listener(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]),
        listener.accept()[0] as accepted,
    ):
        assert original_destination(accepted) == tuple(listener.getsockname()[:2])


def test_take_any_destination_returns_false_if_not_permitted(monkeypatch):
    with socket.socket(socket.AF_UNIX) as sock:  # a socket without such an option
        assert take_any_destination([sock]) is False
