"""The bench of memory counts what connections take."""

import subprocess
import sys

from bench import memory


def test_idle_connections_are_counted():
    found = memory.run(40)
    assert set(found) == {"start", "scraped", "idle"}
    assert all(0 < sizes["own_mb"] < sizes["rss_mb"] for sizes in found.values())
    assert found["idle"]["connections"] == 40


def test_a_proxy_without_admin_port_imports_neither_http_nor_codecs():
    """They take a third of what the process has at its start."""
    imports = "import sys, kproxy.proxy.config.load, kproxy.proxy.process.server; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"aiohttp", "prometheus_client", "numpy", "pyarrow", "zstandard", "cramjam", "lz4"}
    assert not heavy & set(ran.stdout.split())
