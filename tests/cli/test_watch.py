"""`kproxy watch`: the effect of its options, and its errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from kproxy.cli.watch import settings_of, watch
from kproxy.errors import KproxyError
from kproxy.proxy.config.addresses import Address
from kproxy.watch.settings import Settings

KPROXY = Path(sys.executable).with_name("kproxy")


def settings(*arguments):
    options = watch.make_context("watch", list(arguments)).params
    return settings_of(**{name: each for name, each in options.items() if not name.startswith("log_")})


def test_options_become_settings():
    assert settings("--interface", "eth0", "--admin", "9464") == Settings(("eth0",), (9092,), admin=Address("", 9464))
    found = settings(
        *("--interface", "eth0", "--interface", "eth1", "--port", "9094", "--port", "9092", "--record", "tables"),
        *("--detail", "batches", "--cluster", "orders", "--buffer-mib", "16", "--user", "nobody"),
    )
    assert (found.interfaces, found.ports, found.record) == (("eth0", "eth1"), (9092, 9094), Path("tables"))
    assert (found.detail, found.cluster, found.buffer_mib, found.user) == ("batches", "orders", 16, "nobody")
    assert settings("--interface", "any", "--port", "any", "--admin", "0.0.0.0:0").ports == ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--admin HOST:PORT, for metrics, or --record DIR"),
        (("--admin", "kafka"), "--admin"),
        (("--admin", "1", "--port", "0"), "from 1 to 65535"),
        (("--admin", "1", "--port", "kafka"), "a number from 1 to 65535, or any"),
        (("--admin", "1", "--port", "any", "--port", "9092"), "leave the others out"),
        (("--admin", "1", *(f"--port={port}" for port in range(9000, 9065))), "at most 64"),
        (("--admin", "1", "--cluster", ""), "leave it out, or name it"),
        (("--admin", "1", "--detail", "all"), "headers, topics, batches"),
        (("--admin", "1", "--buffer-mib", "1"), "from 2 to 4096"),
    ],
)
def test_mistakes_are_reported(arguments, text):
    with pytest.raises(KproxyError, match=text):
        settings(*arguments)


def test_the_help_has_an_example():
    done = subprocess.run([KPROXY, "watch", "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert "sudo kproxy watch --interface eth0 --admin 9464" in done.stdout
    done = subprocess.run([KPROXY, "watch", "--admin", "0"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "name the interface to watch with --interface; there are: lo" in done.stderr
