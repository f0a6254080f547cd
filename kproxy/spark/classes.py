"""An archive of Spark's classes, ready for the JVM (class data sharing): Spark starts in two thirds of the time.

Duty: finds the archive of this Java and this pyspark, passes it to a JVM, and has a JVM create it during other work.
The JVM itself checks that Java and the jars match the archive, and reads the classes from the jars if they do not
(https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html). The archive has 190 MB, is in the user's cache
folder (XDG_CACHE_HOME), is created only on request, and has its size in its name.

The caller chooses the work whose classes are archived.
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

OPTIONS = "spark.driver.defaultJavaOptions"  # Spark puts them in front of the user's extraJavaOptions
_SUFFIX = ".jsa"
_JVM_TIMEOUT_S = 120.0  # timeout; the JVM writes the archive at its end, in some ten seconds


def archive() -> Path | None:
    """Return the path of the complete archive of this Java, this pyspark and its jars' folder; None without one."""
    stem = _stem()
    for path in stem.parent.glob(f"{stem.name}.*{_SUFFIX}"):
        with suppress(OSError):  # another process may replace it meanwhile
            if path.name == f"{stem.name}.{path.stat().st_size}{_SUFFIX}":  # a truncated archive crashes the JVM
                return path
    return None


def _stem() -> Path:
    """Return the path of the archive without size and suffix."""
    import pyspark

    java = Path(os.environ["JAVA_HOME"], "bin", "java") if "JAVA_HOME" in os.environ else shutil.which("java")
    home = os.environ.get("SPARK_HOME", os.path.dirname(pyspark.__file__))  # noqa: PTH120 - only its name is used
    named = "\0".join((os.path.realpath(java or ""), home, pyspark.__version__))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kproxy")
    return folder / f"spark-{blake2b(named.encode(), digest_size=6).hexdigest()}"


def used(config: Mapping[str, str]) -> Mapping[str, str]:
    """Return settings of Spark with the archive added, if one exists and `config` names none.

    The JVM ignores an archive that does not match, without a message.
    """
    if any("Archive" in config.get(name, "") for name in (OPTIONS, "spark.driver.extraJavaOptions")):
        return config
    place = archive()
    if place is None:
        return config
    options = f'-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off "-XX:SharedArchiveFile={place}"'
    return {**config, OPTIONS: f"{config.get(OPTIONS, '')} {options}".strip()}


@contextmanager
def made() -> Iterator[str]:
    """Yield a value of OPTIONS that makes a JVM archive its loaded classes; the JVM must end inside the context.

    Raises KproxyError if the folder cannot be written to, if Java wrote no archive, or if spark-submit started the JVM.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        raise KproxyError("spark-submit started this JVM: run kproxy itself, whose sessions use the archive")
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
    jvm.stdin.close()  # the JVM ends at the end of its input
    try:
        jvm.wait(_JVM_TIMEOUT_S)
    except TimeoutExpired:
        jvm.kill()
