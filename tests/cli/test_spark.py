"""Jobs on Spark from their options to their answers, and the errors for mistakes; see test_analyze."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from pyspark.logger import PySparkLogger

import kproxy.spark
from kproxy.cli import cli
from kproxy.cli.spark import _name_remedy, _plain, _removed, _said_plainly
from kproxy.convert.job import Settings
from kproxy.errors import KproxyError
from kproxy.spark import pipeline
from tests.captures import capture


@pytest.fixture
def run(spark):
    def invoke(*arguments):
        done = CliRunner().invoke(cli, ["spark", *map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    return invoke


@pytest.mark.ring2
def test_the_answer_equals_that_of_analyze(run, tables, tmp_path):
    """In every format; tests/analysis/test_engine.py compares the engines themselves."""
    by = ("latency", tables, "--by", "api,client", "--every", "1 minute", "--having", "exchanges > 1")
    for shown in ("table", "json", "csv"):
        done = CliRunner().invoke(cli, ["analyze", *map(str, by), "--format", shown], catch_exceptions=False)
        assert run(*by, "--format", shown) == done.stdout and done.stdout
    run(*by, "--format", "parquet", "--out", tmp_path / "latency")
    assert pq.read_table(tmp_path / "latency").num_rows == len(run(*by, "--format", "json").splitlines())


def no_jvm(*arguments, **environment):
    """Run the command in a process where pyspark is installed and Spark cannot start."""
    code = "import sys; sys.modules['pyspark.sql'] = None; from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


@pytest.mark.ring2
def test_mistakes_are_reported_before_spark_starts(mistakes, tables):
    for arguments, message in mistakes:
        done = no_jvm(*arguments)
        assert message in done.stderr and done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and not done.stdout
    assert "pip install" in no_jvm("latency", tables, "--where", "lower(client_id) like 'x%' and errors > 0").stderr
    done = no_jvm("ingest", capture("k41_BASE"), "--out", tables)
    assert (
        "holds tables already: name another folder, or say --append or --overwrite" in done.stderr
        and done.returncode == 2
    )


def test_spark_is_not_started_for_a_mistake(mistakes, monkeypatch):
    def started(*_):
        raise AssertionError("Spark was started")

    monkeypatch.setattr("kproxy.cli.spark.started", started)
    for arguments, message in mistakes:
        with pytest.raises(KproxyError, match=re.escape(message)):
            CliRunner().invoke(cli, ["spark", *map(str, arguments)], catch_exceptions=False)


def test_missing_captures_and_folders_are_reported_before_spark_starts(tmp_path):
    out, notes = tmp_path / "tables", tmp_path / "notes.txt"
    notes.write_text("no capture")
    done = no_jvm("ingest", tmp_path / "gone.pcap", notes, "--out", out)
    assert done.returncode == 1 and not done.stdout and not out.exists()
    gone, none = done.stderr.splitlines()
    assert gone == f"kproxy: {tmp_path}/gone.pcap: cannot be opened: No such file or directory"
    assert none.startswith(f"kproxy: {notes}: ")
    done = no_jvm("follow", tmp_path / "capturs", "--out", out)
    assert done.returncode == 2 and f"{tmp_path}/capturs: there is no such folder; make it" in done.stderr
    # one of the two exists, so the command continues
    assert "pip install" in no_jvm("ingest", tmp_path / "gone.pcap", capture("k41_midstream"), "--out", out).stderr


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03\nmore", "Path does not exist: file:/x."),
        (
            "org.apache.spark.SparkException: \nError from python worker:\n  /p: No module named pyspark.daemon\nPATH",
            "Error from python worker: /p: No module named pyspark.daemon",
        ),
        ("java.io.IOException: No space left on device\n\tat x", "No space left on device"),
    ),
)
def test_an_error_of_spark_is_reported_in_one_line_with_its_cause(text, message):
    assert _plain(text) == message


def test_terse_errors_of_the_jvm_are_reported_with_a_remedy():
    with (
        pytest.raises(KproxyError, match=r"in tables, or in /fast, where Spark works .*; nothing was written$"),
        _name_remedy("tables", ("spark.local.dir=/fast",)),
    ):
        raise KproxyError(_plain("java.io.IOException: No space left on device"))
    for message in (
        "Broken pipe",
        "Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent failure: Lost task 0.0 in "
        "stage 3.0 (TID 3) (127.0.0.1 executor driver): org.apache.spark.SparkException: Python worker exited "
        "unexpectedly (crashed). Consider setting",
    ):
        expected = pytest.raises(KproxyError, match=r"^a task's process ended: was it short of memory")
        with expected, _name_remedy("t", ()):
            raise KproxyError(message)
    with pytest.raises(KproxyError, match=r"^another$"), _name_remedy("tables", ()):
        raise KproxyError("another")


@pytest.mark.ring2
def test_a_failed_start_of_spark_is_reported_in_one_line(tables):
    code = "from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", "latency", str(tables), "--master", "nosuch"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr == "kproxy: Spark does not start: Master must either be yarn or start with spark, k8s, or local\n"
    )


@pytest.mark.ring2
def test_the_start_of_spark_is_shown_as_progress():
    """Meanwhile the JVM's log does not reach the terminal, but the progress line does."""
    code = """
import os, time
from kproxy.cli.spark import _log_kept
from kproxy.views import progress
with progress.waiting("starting Spark"), _log_kept():
    os.write(2, b"what the JVM logs")
    time.sleep(progress.AFTER_S + 1)
    os._exit(0)
"""
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, **files)
    os.set_blocking(ours, False)
    shown = os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)
    assert b"starting Spark" in shown and b"JVM" not in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PATH": "/nowhere", "JAVA_HOME": ""}, "kproxy: Spark needs Java 17 or newer, and there is none: "),
        ({"JAVA_HOME": "/nowhere"}, "kproxy: JAVA_HOME is /nowhere, which has no bin/java: set it to where "),
    ],
)
def test_a_missing_java_is_reported_with_a_remedy(tables, changed, message):
    code = "from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", "latency", str(tables)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **changed})
    assert (done.returncode, done.stderr[: len(message)], done.stderr.count("\n")) == (2, message, 1)


@pytest.mark.ring2
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nonsense", "--conf nonsense: KEY=VALUE is needed, like spark.driver.memory=4g"),
        ("spark.driver.memory=lots", "Spark does not start: Invalid maximum heap size: -Xmxlots"),
        ("spark.driver.memory=200m", "Spark does not start: Insufficient driver memory: System memory 20"),
        ("spark.driver.memory=3m", "Spark does not start: its memory is too small: give it more, as by --conf "),
    ],
)
def test_a_setting_that_prevents_the_start_of_spark_is_reported_in_one_line(tables, setting, message):
    code = "from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", "latency", str(tables), "--conf", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and f"kproxy: {message}" in done.stderr, done.stderr


@pytest.mark.ring2
def test_an_unreachable_master_is_reported_at_once(tables, monkeypatch):
    """Spark tries a master for a minute and then prints a stack trace; a Spark Connect client tries for ten."""
    monkeypatch.setattr(kproxy.spark, "CONNECT_TIMEOUT_S", 0.5)
    with socket.socket() as bound:  # without a listener
        bound.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(KproxyError) as raised:
            kproxy.spark._require_answer(f"spark://{place},{place}")
        refused = f"{place}: Connection refused"
        assert str(raised.value) == f"spark://{place},{place}: no master of Spark answers: {refused}; {refused}"
        with pytest.raises(KproxyError, match=rf"^sc://{place}/: no server of Spark Connect has answered"):
            kproxy.spark._require_answer(f"sc://{place}/;token=secret")
        bound.listen()
        kproxy.spark._require_answer(f"spark://localhost:1,{place}")
        code = "from kproxy.cli import main; main()"
        command = [sys.executable, "-c", code, "spark", "latency", str(tables), "--master", "spark://localhost:1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        message = "kproxy: spark://localhost:1: no master of Spark answers: localhost:1: Connection refused\n"
        assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.ring2
def test_follow_reports_that_there_is_nothing_new(spark, tmp_path):
    """For example with the checkpoint of other tables: without a message, the new ones would just stay empty."""
    folder, notes = tmp_path / "captures", tmp_path / "notes"
    folder.mkdir()
    (folder / "a.pcap").symlink_to(capture("k41_midstream"))
    message = f"{folder}: nothing new: what is complete in it was read already, says the checkpoint\n"
    for out, is_reported in (("tables", False), ("others", True)):
        more = ("--checkpoint", f"file:{notes}", "--once", "--quiet-s", "0")
        command = ["spark", "follow", str(folder), "--out", str(tmp_path / out), *more]
        done = CliRunner().invoke(cli, command, catch_exceptions=False)
        assert (done.exit_code, message in done.stderr) == (0, is_reported), done.output


@pytest.mark.ring2
def test_ctrl_c_while_captures_are_read_shows_no_traceback(tmp_path):
    """By default py4j prints two, and pyspark one when it asks for the end of all jobs."""
    ours, theirs = os.openpty()
    code = "import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    code += "from kproxy.cli import main; main()"
    arguments = ["spark", "ingest", str(capture("k41_java_cluster")), "--out", str(tmp_path / "tables")]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    files = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **files)
    os.close(theirs)
    shown, is_sent = b"", False
    with suppress(OSError):  # at its end
        while more := os.read(ours, 65536):
            shown += more
            if not is_sent and b"reading k41_java_cluster.pcap" in shown:
                is_sent = os.write(ours, b"\x03") == 1
    os.close(ours)
    assert (process.wait(), is_sent) == (1, True), shown
    assert b"Aborted!" in shown and b"Traceback" not in shown and not (tmp_path / "tables").exists()


@pytest.mark.ring2
def test_ctrl_c_ends_follow_after_the_current_batch(tmp_path):
    """pyspark's own handler would end the batch's jobs, with stack traces of Python and Java."""
    folder, tables = tmp_path / "captures", tmp_path / "tables"
    folder.mkdir()
    shutil.copy(capture("k41_java_cluster"), folder)
    code = "from kproxy.cli import main; main()"
    arguments = ["spark", "follow", str(folder), "--out", str(tables), "--quiet-s", "0", "--interval-s", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, **pipes) as process:
        while process.poll() is None and not (tables / ".unfinished-spark").is_dir():
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate()
    assert process.returncode == 0 and errors == "ends after the batch under way; Ctrl-C again drops it\n"
    assert "k41_java_cluster.pcap" in shown and (tables / "_kproxy.json").is_file()
    assert not (tables / ".unfinished-spark").exists()


def test_a_file_in_place_of_the_tables_folder_is_reported_before_spark_starts(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "tables"):
        with pytest.raises(KproxyError, match=r"cannot be written to: .*/file is no folder$"):
            pipeline.check([capture("k41_midstream")], out, Settings())


def test_a_mistake_that_only_spark_finds_is_reported_in_one_line(run, tables, monkeypatch):
    logged = []
    for name in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logger = PySparkLogger.getLogger(name)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "handle", logged.append)
    for where, message in (
        ("api =", "--where cannot be read near '\\)': give a condition in SQL"),
        ("bigint(api) > 5", "Produce|bigint|BIGINT"),
    ):
        with pytest.raises(KproxyError, match=message) as fault:
            run("latency", tables, "--where", where)
        assert "\n" not in str(fault.value) and not re.search(r"[A-Z]+_[A-Z_]+|SQLSTATE", str(fault.value)), fault.value
    assert not logged


@pytest.mark.ring2
def test_spark_itself_is_silent(tables):
    """In a process of its own, so that the JVM's log at its start would be visible."""
    code = "from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", "quality", str(tables), "--master", "local[1]"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("\x1b[1m" + "source") or done.stdout.startswith("source")


def test_ingest_writes_tables(run, tmp_path):
    summary = run("ingest", capture("k41_BASE"), "--out", tmp_path / "tables", "--port", 9092, "--cluster", "east")
    assert "rows" in summary and "packet records read" in summary
    done = CliRunner().invoke(
        cli, ["spark", "ingest", str(capture("k41_BASE")), "--out", str(tmp_path / "none"), "--port", "1", "--strict"]
    )
    assert done.exit_code == 1 and "No Kafka in it" in done.output
    done = CliRunner().invoke(
        cli, ["spark", "ingest", str(capture("k41_BASE")), "--out", str(tmp_path / "other"), "--format", "nosuch"]
    )
    assert isinstance(done.exception, KproxyError) and "the session knows no such format" in str(done.exception)
    files = list((tmp_path / "tables" / "exchanges").rglob("*.parquet"))
    assert {row["cluster"] for file in files for row in pq.ParquetFile(file).read().to_pylist()} == {"east"}


def test_a_file_that_retention_removes_meanwhile_is_named_with_a_remedy(spark, tables, tmp_path):
    recorded = tmp_path / "exchanges"
    recorded.mkdir()
    file = next((tables / "exchanges").glob("*.parquet"))
    names = [f"20261130T10000{number}.000000000Z-00000{number}.parquet" for number in range(2)]
    for name in names:
        shutil.copy(file, recorded / name)
    frame = kproxy.spark.table(spark, str(tmp_path), "exchanges")
    (recorded / names[0]).unlink()
    for ask in (frame.count, frame.collect, lambda: list(frame.toLocalIterator())):
        with pytest.raises(KproxyError, match=r"retention removed files .*: ask again, or ask a copy"), _said_plainly():
            ask()


def test_other_missing_files_are_not_attributed_to_retention():
    assert _removed("File file:/t/exchanges/20261130T100000.000000000Z-000000.parquet does not exist")
    assert not _removed("File file:/t/exchanges/part-00000.parquet does not exist")
    assert not _removed("a task failed")
