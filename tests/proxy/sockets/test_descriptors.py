"""Each part of kproxy gets its share of the file descriptors, whatever the limit."""

import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.proxy.sockets import descriptors
from kproxy.proxy.sockets.descriptors import PER_CONNECTION, Shares, shares


@given(st.integers(32, 2_000_000), st.integers(1, 1_000_000), st.integers(1, 64))
def test_the_shares_fit_into_the_limit(files, connections, workers):
    found = shares(files, connections, workers)
    assert found.in_each <= found.connections <= min(connections, found.in_each * workers)
    assert min(found) >= 1
    own = files - found.in_each * PER_CONNECTION - found.admin - found.listening
    assert own >= min(descriptors.OWN, files // 8)


def test_shares_of_common_limits():
    assert shares(1 << 20, 10_000).connections == 10_000
    assert shares(20_000, 10_000) == Shares(9440, 32, 1024, 9440)
    assert shares(20_000, 10_000, workers=2) == Shares(10_000, 32, 1024, 9440)
    assert shares(60, 10_000).connections == 15


@pytest.mark.parametrize("asked", [None, 10_000])
def test_a_too_low_limit_of_open_files_causes_a_warning_with_a_remedy(monkeypatch, caplog, asked):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 20_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    assert descriptors.reserve(asked).connections == 9440
    assert limits == [(20_000, 20_000)]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    needs = "max_connections=10000" if asked else "the default of 10000 connections"
    assert f"{needs} needs 21120 open files, the system allows 20000, enough for 9440 connections" in caplog.text
    assert "ulimit -n" in caplog.text and "LimitNOFILE" in caplog.text
    caplog.clear()
    assert descriptors.reserve(asked and 9_000).connections == (9_000 if asked else 9440)
    assert descriptors.reserve(asked, warns=False) and len(caplog.records) == (not asked)


def test_the_kernels_table_of_descriptors_is_allocated_at_once():
    """Each growth of the table would block the loop for an RCU grace period."""
    text = "from kproxy.proxy.sockets.descriptors import reserve; reserve(400); print(open('/proc/self/status').read())"
    status = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    (size,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("FDSize:"))
    assert size >= 400 * PER_CONNECTION
