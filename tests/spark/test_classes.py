"""The archive of Spark's classes: which sessions start from it; a damaged archive does no harm.

./dev makes it (`kproxy spark prepare`) before the tests; see tests/cli/test_prepare.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kproxy.errors import KproxyError
from kproxy.spark import classes

START = """
import sys
from kproxy.spark import session
spark = session("local[1]", {"spark.driver.extraJavaOptions": sys.argv[1]}, with_source=False)
print(spark.range(3).count())
"""


def start(log: Path, **environment):
    """Start Spark in its own process; returns how many classes its JVM loaded from the archive."""
    options = f"-Xlog:class+load=info:file={log}"
    done = subprocess.run(
        [sys.executable, "-c", START, options], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0 and done.stdout == "3\n", done.stderr
    assert "jsa" not in done.stderr and "cds" not in done.stderr
    return sum("shared objects file (top)" in line for line in log.read_text().splitlines())


@pytest.fixture(scope="module")
def kept():
    found = classes.archive()
    assert found is not None, "Spark's classes are not kept yet: ./dev test does that, by kproxy spark prepare"
    return found


def test_a_session_starts_from_the_archive_and_without_one_from_the_jars(kept, tmp_path):
    assert start(tmp_path / "kept.log") > 5000
    assert start(tmp_path / "none.log", XDG_CACHE_HOME=str(tmp_path)) == 0


def test_a_truncated_archive_is_not_given_to_a_jvm_which_it_would_crash(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "kproxy" / kept.name
    place.parent.mkdir()
    place.write_bytes(kept.read_bytes()[:-4096])
    assert classes.archive() is None and classes.used({"a": "b"}) == {"a": "b"}
    place.write_bytes(kept.read_bytes())
    assert classes.archive() == place and str(place) in classes.used({})[classes.OPTIONS]


def test_an_archive_of_another_java_is_silently_ignored(kept, tmp_path):
    """As after an update of Java in place: the first bytes of the archive identify its format and the Java."""
    place = tmp_path / "kproxy" / kept.name
    place.parent.mkdir()
    data = kept.read_bytes()
    place.write_bytes(bytes(len(data[:512])) + data[512:])
    assert start(tmp_path / "other.log", XDG_CACHE_HOME=str(tmp_path)) == 0


def test_an_archive_in_the_settings_takes_precedence(kept):
    own = {"spark.driver.extraJavaOptions": "-XX:SharedArchiveFile=own.jsa"}
    assert classes.used(own) == own
    given = classes.used({classes.OPTIONS: "-Dmine=1"})[classes.OPTIONS]
    assert given.startswith("-Dmine=1 ") and str(kept) in given


def test_obstacles_to_making_an_archive_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KproxyError, match=r"Java kept no classes in .*: is there room"), classes.made():
        pass
    assert not list((tmp_path / "kproxy").iterdir())
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KproxyError, match="cannot be written to: Not a directory"), classes.made():
        pass
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    with pytest.raises(KproxyError, match="spark-submit started this JVM: run kproxy itself"), classes.made():
        pass
