"""Settings that `kproxy watch` refuses at start: each limit at its last valid and first invalid value."""

import pytest

from kproxy.errors import KproxyError
from kproxy.proxy.config.addresses import Address
from kproxy.watch.settings import MAX_PORTS, Settings
from kproxy.wire.bodies import DETAILS

ADMIN = Address("127.0.0.1", 9600)


@pytest.mark.parametrize(
    "given",
    [
        {"ports": (1, 65535)},
        {"zookeeper_ports": (1, 65535)},
        {"ports": tuple(range(1, MAX_PORTS + 1))},
        {"ports": tuple(range(1, MAX_PORTS)), "zookeeper_ports": (2181,)},
        {"ports": (), "zookeeper_ports": tuple(range(1, MAX_PORTS + 2))},
        {"buffer_mib": 2},
        {"buffer_mib": 4096},
        *({"detail": detail} for detail in DETAILS),
    ],
)
def test_the_last_valid_value_of_a_limit_is_accepted(given):
    assert Settings(**{"interfaces": (), "admin": ADMIN, **given}).admin == ADMIN


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ports": (0,)}, "--port 0: ports are from 1"),
        ({"ports": (9092, 65536)}, "--port 65536: "),
        ({"zookeeper_ports": (65536,)}, "--zookeeper-port 65536: "),
        ({"ports": (1, 7, 5), "zookeeper_ports": (7, 5)}, "--zookeeper-port 5: --port names it too"),
        ({"ports": tuple(range(1, MAX_PORTS + 2))}, f"--port: {MAX_PORTS + 1} ports; at most {MAX_PORTS}"),
        ({"ports": tuple(range(1, MAX_PORTS + 1)), "zookeeper_ports": (2181,)}, f"at most {MAX_PORTS}"),
        ({"cluster": ""}, "the name is empty"),
        ({"detail": "all"}, f"--detail all: one of {', '.join(DETAILS)}"),
        ({"buffer_mib": 1}, "--buffer-mib 1: from 2 to 4096"),
        ({"buffer_mib": 4097}, "--buffer-mib 4097: from 2 to 4096"),
        ({"admin": None}, "nothing would come of it"),
    ],
)
def test_the_first_invalid_value_of_a_limit_is_refused(given, text):
    with pytest.raises(KproxyError, match=text):
        Settings(**{"interfaces": (), "admin": ADMIN, **given})
