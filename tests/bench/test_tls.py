"""What TLS costs beside HAProxy: that it is measured, not how much it is."""

import json
import subprocess
import sys

from bench.tls import LIMITS
from kproxy.core import native


def test_the_smallest_request_is_measured_over_tls_beside_haproxy():
    command = [sys.executable, "-m", "bench.tls", "cpu", "--cases", "small", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, 1), done.stderr  # 1: beyond its limit, of which a busy machine says nothing
    (case,) = json.loads(done.stdout)["cpu"]
    assert case["case"] == "small" and case["limit"] == LIMITS["python" if native() is None else "native"]["small"]
    assert case["haproxy"] > 0 and case["kproxy"] > 0
