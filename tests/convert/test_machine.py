"""Memory and CPU that a machine and its containers leave to the process; freed memory is reused without the kernel."""

import os
import subprocess
import sys

import pytest

from kproxy.convert import machine

PROGRAM = """
import resource, sys
import numpy as np, pyarrow as pa
from kproxy.convert import machine

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "retain":
    machine.retain()
for use in (lambda: [np.ones(1 << 17) for _ in range(20)], lambda: pa.allocate_buffer(8 << 20)):
    use()
    before = faults()
    for _ in range(50):
        use()
    print(faults() - before)
"""


def used(how):
    ran = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return [int(line) for line in ran.stdout.split()]


def test_freed_memory_is_used_again():
    ours, arrow = used("retain")
    assert ours < 1000 and arrow < 1000  # 200,000 pages were allocated and freed
    assert used("not")[0] > 100_000  # without `retain` the kernel takes the pages back


MEMINFO = "MemTotal:       8000000 kB\nMemAvailable:   4000000 kB\n"
STAT = "anon 1\nactive_file 10\ninactive_file 20\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Replaces /proc and /sys/fs/cgroup, since a test cannot put itself into cgroups."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_without_cgroups_the_whole_system_counts(tree):
    assert machine.memory_bytes() == 1 << 62
    tree({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert machine.memory_bytes() == 4_000_000 << 10
    assert machine.cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("name", ("pod/ours/memory", "pod/memory", "memory"))
def test_the_tightest_cgroup_limit_counts(tree, name):
    """The limit of the process's own cgroup, of its pod, or of a container that sees its cgroup as the root."""
    tree({"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/pod/ours\n"})
    tree({f"groups/{name}.max": "1000\n", f"groups/{name}.current": "300\n", f"groups/{name}.stat": STAT})
    assert machine.memory_bytes() == 730
    tree({f"groups/{name}.max": "max\n"})
    assert machine.memory_bytes() == 4_000_000 << 10
    tree({f"groups/{name}.max": "100\n"})
    assert machine.memory_bytes() == 0


def test_limits_of_cgroup_version_1(tree):
    stat = "active_file 1\ninactive_file 1\ntotal_active_file 10\ntotal_inactive_file 20\n"
    tree({"proc/meminfo": MEMINFO, "proc/self/cgroup": "4:memory:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/\n"})
    tree({"groups/memory/memory.limit_in_bytes": "1000", "groups/memory/memory.usage_in_bytes": "300"})
    tree({"groups/memory/memory.stat": stat})
    assert machine.memory_bytes() == 730
    tree({"groups/cpu/docker/x/cpu.cfs_quota_us": "-1", "groups/cpu/docker/x/cpu.cfs_period_us": "100000"})
    assert machine.cores() == len(os.sched_getaffinity(0))
    tree({"groups/cpu/docker/x/cpu.cfs_quota_us": "50000"})
    assert machine.cores() == 1


def test_a_cgroup_limits_the_processors(tree, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    tree({"proc/self/cgroup": "0::/\n", "groups/cpu.max": "max 100000\n"})
    assert machine.cores() == 64
    tree({"groups/cpu.max": "250000 100000\n"})
    assert machine.cores() == 2
    tree({"groups/cpu.max": "10000 100000\n"})
    assert machine.cores() == 1
