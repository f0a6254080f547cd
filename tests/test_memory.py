"""Memory that is freed is used again without the kernel."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import numpy as np, pyarrow as pa
from kproxy import memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "retain":
    memory.retain()
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


def test_what_is_freed_is_used_again():
    ours, arrow = used("retain")
    assert ours < 1000 and arrow < 1000  # 200,000 pages were taken and given back
    assert used("not")[0] > 100_000  # which is what it is for
