"""On a cluster, executors without kproxy get it from `spark-submit`; killed and duplicated tasks change no row. A Spark
Connect client ingests and asks like any other.

A cluster takes half a minute to start: its test runs only if it is named, `./dev test tests/spark/test_cluster.py`.
"""

import json
import os
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from sysconfig import get_path

import psutil
import pyspark
import pytest
from click.testing import CliRunner

import kproxy
from kproxy.cli import cli
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.spark import is_remote
from kproxy.spark.follow import follow
from kproxy.spark.target import Target
from tests.captures import capture
from tests.spark.test_pipeline import assert_same_rows

NAMES = ("k41_BASE", "k41_quota", "k0102_python147", "k41_sasl_plain")
# As in docs/scale.md, but with splits so small that captures have several.
MAIN = """
import sys
from kproxy.spark import pipeline, session
pipeline.ingest(session(), sys.argv[2:], sys.argv[1], split_bytes=400_000)
"""
QUICK = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "20ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "1ms",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.eventLog.rolling.enabled": "false",
}


def bare_python(folder):
    """A Python with every package that kproxy needs, but without kproxy."""
    venv.create(folder, symlinks=True)
    (folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages" / "others.pth").write_text(
        get_path("purelib") + "\n"
    )
    python = folder / "bin" / "python"
    lacks = subprocess.run([python, "-c", "import kproxy"], cwd=folder, env=_environment(), capture_output=True)
    assert lacks.returncode and b"No module named 'kproxy'" in lacks.stderr
    return python


def packed(path):
    """kproxy as an archive for `--py-files`."""
    package = Path(kproxy.__file__).parent
    with zipfile.ZipFile(path, "w") as file:
        for each in package.rglob("*"):
            if each.is_file() and each.suffix != ".pyc":
                file.write(each, each.relative_to(package.parent))
    return path


def _environment(**more):
    """The environment of a user without kproxy, and without pytest's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_HOME")}
    return {**kept, "SPARK_LOCAL_IP": "127.0.0.1", **more}


def _executors(process):
    found = []
    for each in psutil.Process(process.pid).children(recursive=True):
        try:
            if "CoarseGrainedExecutorBackend" in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:  # it has just ended
            continue
    return found


def _is_at_work(executor):
    """Whether the executor's Python workers use CPU time."""
    try:
        return any(each.cpu_times().user > 0.2 for each in executor.children(recursive=True))
    except psutil.Error:
        return False


def test_executors_without_kproxy_get_it_and_one_is_killed(request, tmp_path):
    """`spark-submit` to two executors in their own processes, one of which is killed while it decodes."""
    if not any(Path(__file__).name in argument for argument in request.config.args):
        pytest.skip("half a minute: ./dev test tests/spark/test_cluster.py")
    paths = [capture(name) for name in NAMES]
    python = bare_python(tmp_path / "bare")
    (tmp_path / "main.py").write_text(MAIN)
    events = tmp_path / "events"
    events.mkdir()
    conf = {**QUICK, "spark.eventLog.dir": events.as_uri()}
    home = tmp_path / "spark"  # for the workers' folders: the user of the tests may not write to pyspark's own
    home.mkdir()
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name != "work":
            (home / each.name).symlink_to(each)
    command = [
        home / "bin" / "spark-submit",
        "--master",
        "local-cluster[2,1,1024]",
        "--py-files",
        packed(tmp_path / "kproxy.zip"),
    ]
    command += [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    command += [tmp_path / "main.py", tmp_path / "tables", *paths]
    environment = _environment(PYSPARK_PYTHON=str(python), SPARK_HOME=str(home))
    with (tmp_path / "output").open("w+") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
        killed = None
        try:
            while process.poll() is None:
                at_work = [each for each in _executors(process) if _is_at_work(each)]
                if killed is None and at_work:
                    killed = at_work[0]
                    killed.kill()
                time.sleep(0.1)
        finally:
            process.kill()
        output.seek(0)
        text = output.read()
    assert process.returncode == 0, text[-3000:]
    assert killed is not None
    (log,) = events.iterdir()
    happened = [json.loads(line) for line in log.read_text().splitlines()]
    removed = [event for event in happened if event["Event"] == "SparkListenerExecutorRemoved"]
    tasks = [event["Task Info"] for event in happened if event["Event"] == "SparkListenerTaskEnd"]
    assert removed and any(task["Attempt"] or task["Failed"] or task["Killed"] for task in tasks)
    convert(paths, tmp_path / "converted", processes=1)
    assert_same_rows(tmp_path / "tables", tmp_path / "converted")


def kproxy_over_connect(url, *arguments):
    code = "from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "spark", *map(str, arguments), "--master", url]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def connect(spark):
    """The address of a Spark Connect server in the tests' own JVM."""
    jvm = spark.sparkContext._jvm
    kind = getattr(jvm.org.apache.spark.sql.connect.service, "SparkConnectService$")
    service = getattr(kind, "MODULE$")
    service.start(spark.sparkContext._jsc.sc())
    return f"sc://127.0.0.1:{service.localPort()}"  # the server ends with the JVM


def test_a_client_of_spark_connect_ingests_and_asks(connect, tables, tmp_path):
    path = capture("k41_quota")
    assert "packet records read" in kproxy_over_connect(connect, "ingest", path, "--out", tmp_path / "tables")
    convert([path], tmp_path / "converted", processes=1)
    assert_same_rows(tmp_path / "tables", tmp_path / "converted")
    by = ("latency", tables, "--by", "api,client", "--format", "json")
    here = CliRunner().invoke(cli, ["analyze", *map(str, by)], catch_exceptions=False)
    assert kproxy_over_connect(connect, *by) == here.stdout and here.stdout


def test_limits_of_a_spark_connect_client_are_reported(monkeypatch):
    class Session:
        pass

    Session.__module__ = "pyspark.sql.connect.session"
    with pytest.raises(KproxyError, match="a folder that this machine and the server share"):
        Target(Session(), "s3a://tables")
    with pytest.raises(KproxyError, match="use spark-submit"):
        follow(Session(), "in", "out", Settings(), print)
    monkeypatch.setenv("SPARK_REMOTE", "sc://nowhere")
    assert is_remote(None) and is_remote("sc://host:1") and not is_remote("local[2]")
