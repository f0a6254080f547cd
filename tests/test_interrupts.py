"""Ctrl-C at every stage of a start: it ends the program, without a stack."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from kproxy import interrupts, spark
from kproxy.interrupts import Asks, ComesLater

# Interrupts itself when the module of that number, of all that the program imports, is about to be loaded.
AT_IMPORT = """
import signal, sys

class Interrupts:  # of those that are not loaded before the first line of kproxy
    left = int(sys.argv.pop(1))

    def find_spec(self, name, path=None, target=None):
        Interrupts.left -= 1
        if not Interrupts.left:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from kproxy.__main__ import main
main()
"""
# Interrupts itself where C calls Python: an exception that is raised there is told of, and lost.
IN_A_CALLBACK = """
import signal, sys
from pydantic.plugin import _schema_validator

def make(*arguments, **named):
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("went on")

def validator(*arguments, **named):
    class Lost:
        def __del__(self):
            make()
    Lost()
    return made(*arguments, **named)

made = _schema_validator.SchemaValidator
_schema_validator.SchemaValidator = validator
from kproxy.__main__ import main
main()
"""


@pytest.fixture
def as_python_has_it():
    """SIGINT, whatever those who started the tests made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(code, *arguments):
    """How the program ended, and what it said."""
    with socket.create_server(("127.0.0.1", 0)) as taken:  # which it cannot listen at: it never runs for long
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-c", code, *arguments, "run", "--listen", address, "--bootstrap", "127.0.0.1:1"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=os.environ)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [8, 60, 120, 220, 320, 400])
def test_at_any_import_it_ends_the_program_without_a_word(number):
    assert interrupted(AT_IMPORT, str(number)) == (-signal.SIGINT, "")


def test_it_is_not_lost_in_a_callback():
    assert interrupted(IN_A_CALLBACK) == (-signal.SIGINT, "")


def test_what_starts_a_process_is_not_cut_short_but_by_a_second_interrupt(monkeypatch, as_python_has_it):
    done = []
    for times, same_s in ((0, 1), (1, 1), (2, 60), (2, 0)):
        monkeypatch.setattr(interrupts, "SAME_S", same_s)
        try:
            with ComesLater():
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
                done.append(times)
        except KeyboardInterrupt:
            done.append(-times)
    assert done == [0, 1, -1, 2, -2, -2] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with ComesLater():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_who_is_asked_goes_on_until_asked_again(monkeypatch, as_python_has_it):
    """Two signals of one moment are one, and the handler of before comes back."""
    told = []
    before = signal.getsignal(signal.SIGINT)
    with Asks(lambda: told.append(1)) as end:
        assert not end.asked
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert end.asked and told == [1]
        monkeypatch.setattr(interrupts, "SAME_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == [1] and signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_spark_starts_waits_for_its_jvm(monkeypatch, as_python_has_it):
    """Of a JVM that is being started only pyspark knows, and forgets it when it is cut short."""
    sql = pytest.importorskip("pyspark.sql")
    started = []

    def start(_):
        signal.raise_signal(signal.SIGINT)
        started.append(True)

    monkeypatch.setattr(sql.SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(sql.SparkSession.Builder, "getOrCreate", start)
    with pytest.raises(KeyboardInterrupt):
        spark.session("local[1]")
    assert started
