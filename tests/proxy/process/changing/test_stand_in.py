"""The program that replaces a kproxy after another one has taken over. With real processes: test_process.py."""

import subprocess
import sys

# The follower exits with status 7 at the first SIGHUP. The signal is sent before the stand-in program runs.
FIRST = """
import inspect, os, signal, subprocess, sys
from kproxy.proxy.process.changing import stand_in

follower = subprocess.Popen(
    [sys.executable, "-c", "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [1]); print(1, flush=True); "
     "signal.sigwait([1]); sys.exit(7)"], stdout=subprocess.PIPE)
follower.stdout.readline()
ours, theirs = os.pipe()
os.set_inheritable(ours, True)
signal.pthread_sigmask(signal.SIG_BLOCK, stand_in.FORWARDED)
os.kill(os.getpid(), signal.SIGHUP)
command = stand_in.command(inspect.getsource(stand_in), follower.pid, ours)
os.execv(command[0], command)
"""


def test_a_signal_before_the_start_of_the_stand_in_reaches_the_follower():
    done = subprocess.run([sys.executable, "-c", FIRST], timeout=60, check=False)
    assert done.returncode == 7


# The second kproxy exits with status 7 after it has reaped the third, the current one.
REAPED = """
import inspect, os, subprocess, sys
from kproxy.proxy.process.changing import stand_in

second = subprocess.Popen(
    [sys.executable, "-c", "import subprocess, sys; third = subprocess.Popen(['true']); third.wait(); "
     "print(third.pid); sys.exit(7)"], stdout=subprocess.PIPE)
third = int(second.stdout.read())
ours, theirs = os.pipe()
os.set_inheritable(ours, True)
command = stand_in.command(inspect.getsource(stand_in), third, ours)
os.execv(command[0], command)
"""


def test_the_stand_in_exits_with_the_status_of_the_process_that_reaped_the_current_kproxy():
    """The third ended first, and the second reaped it: the first could not learn its status, and exited with 1."""
    done = subprocess.run([sys.executable, "-c", REAPED], timeout=60, check=False)
    assert done.returncode == 7
