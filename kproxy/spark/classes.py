"""The classes of Spark in a file from which the JVM takes them ready to use: Spark starts in two thirds of the time.

Duty: where the archive of this Java and this pyspark is, how a JVM is told of it, and one that makes it while work is
done. The JVM looks itself whether Java and the jars are those of the archive, and reads the classes from the jars where
they are not (https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html). The archive, 190 MB, lies in the
user's cache folder (XDG_CACHE_HOME), is made on request only, and has its size in its name.

Refuses to know which work is worth its classes.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kproxy.errors import KproxyError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OPTIONS = "spark.driver.defaultJavaOptions"  # which stand before those that a user gives
_SUFFIX = ".jsa"
_ENDS_S = 120.0  # the JVM writes the archive when it ends, in some ten seconds


def archive() -> Path | None:
    """The archive of this Java, this pyspark and the place of its jars, if there is a whole one."""
    stem = _stem()
    for path in stem.parent.glob(f"{stem.name}.*{_SUFFIX}"):
        with suppress(OSError):  # it goes as another one is made
            if path.name == f"{stem.name}.{path.stat().st_size}{_SUFFIX}":  # of one that is cut a JVM dies
                return path
    return None


def _stem() -> Path:
    """What the archive is called, but for its size and suffix."""
    import pyspark

    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else shutil.which("java")
    home = os.environ.get("SPARK_HOME", os.path.dirname(pyspark.__file__))  # noqa: PTH120 - it is a name only
    named = "\0".join((os.path.realpath(java or ""), home, pyspark.__version__))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kproxy")
    return folder / f"spark-{blake2b(named.encode(), digest_size=6).hexdigest()}"


def used(config: Mapping[str, str]) -> Mapping[str, str]:
    """Settings of Spark, with the archive if there is one and they name none. What does not fit is said to nobody."""
    if any("Archive" in config.get(name, "") for name in (OPTIONS, "spark.driver.extraJavaOptions")):
        return config
    place = archive()
    if place is None:
        return config
    options = f'-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off "-XX:SharedArchiveFile={place}"'
    return {**config, OPTIONS: f"{config.get(OPTIONS, '')} {options}".strip()}


@contextmanager
def made() -> Iterator[str]:
    """An option (OPTIONS) of a JVM that keeps the classes it loads, and that is to have ended at the end of this.

    Raises KproxyError where no file can be written, that Java keeps none, or the JVM is not to be one of ours.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        raise KproxyError("spark-submit started this JVM: run kproxy itself, whose sessions take what is kept")
    stem = _stem()
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=stem.parent, prefix=".unfinished-") as folder:
            draft = Path(folder, stem.name)
            yield f'-Xlog:disable "-XX:ArchiveClassesAtExit={draft}"'
            if not draft.is_file():
                raise KproxyError(
                    f"Java kept no classes in {stem.parent}: is there room for 200 MB, and an archive of Java's own "
                    "classes (java -Xshare:dump makes it)?"
                )
            for old in stem.parent.glob(f"{stem.name}.*{_SUFFIX}"):
                old.unlink()
            draft.replace(f"{stem}.{draft.stat().st_size}{_SUFFIX}")
    except OSError as fault:
        raise KproxyError(f"{stem.parent}: cannot be written to: {fault.strerror or fault}") from fault


def end(spark: "SparkSession") -> None:
    """Stop a session of this process, and wait for its JVM to end."""
    from pyspark import SparkContext

    jvm = SparkContext._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    jvm.stdin.close()  # by which it ends
    try:
        jvm.wait(_ENDS_S)
    except TimeoutExpired:
        jvm.kill()
