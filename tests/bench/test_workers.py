"""`python -m bench.workers`: two workers beside one process, in one short round."""

import json
import subprocess
import sys
from pathlib import Path


def test_a_short_run_tells_what_workers_cost():
    command = [sys.executable, "-m", "bench.workers", "--rounds", "1", "--cases", "small", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode in (0, 1), done.stderr  # 1: too slow, on a machine that others use
    (found,) = json.loads(done.stdout)
    assert found["case"] == "small v9"
    assert found["per_cpu_s_beside_one"] > 0.5
    assert 1.0 <= found["busiest_worker_of_mean"] < 1.5
