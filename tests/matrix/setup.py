"""What the matrix needs, fetched and built once into `.cache/matrix`: brokers and the drivers of clients.

Each part has a stamp, the hash of what it was built from. A part whose tools are missing is left out: `available` says
which.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from tests.broker.jvm import JARS

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache/matrix"
JAVA_CLIENTS = ("2.8.2", "3.9.1", "4.1.0")
# Scala and ZooKeeper of each broker. Kafka 4.1 is that of all tests.
BROKERS = {
    "3.9.1": ("2.13", "3.8.4"),
    "2.8.2": ("2.13", "3.5.9"),
    "1.1.1": ("2.12", "3.5.9"),
    "0.10.2.2": ("2.12", "3.5.9"),
    "0.8.2.2": ("2.11", "3.5.9"),
}
_TIMEOUT_S = 900

P = ParamSpec("P")
T = TypeVar("T")
_BUILDING = threading.Lock()


def _one_at_a_time(build: Callable[P, T]) -> Callable[P, T]:
    """Cases run side by side, and may need the same part at once."""

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> T:
        with _BUILDING:
            return build(*args, **kwargs)

    return built


@_one_at_a_time
def jars(version: str) -> Path:
    """The folder of a broker's jars, fetched if need be."""
    if version not in BROKERS:
        return JARS
    folder = CACHE / f"broker-{version}"
    scala, zookeeper = BROKERS[version]
    if _due(folder, [HERE / "brokers.pom.xml"], version, scala, zookeeper):
        options = (f"-Dscala.version={scala}", f"-Dzookeeper.version={zookeeper}")
        _maven(HERE / "brokers.pom.xml", version, folder, *options)
        _done(folder, [HERE / "brokers.pom.xml"], version, scala, zookeeper)
    return folder


@_one_at_a_time
def java_client(version: str) -> str:
    """The class path of the Java driver with Kafka's clients of a release, built if need be."""
    folder, sources = CACHE / f"java-{version}", HERE / "clients/java"
    files = sorted(sources.rglob("*.*"))
    if _due(folder, files, version):
        _maven(sources / "pom.xml", version, folder / "lib")
        (folder / "classes").mkdir()
        own = [*(sources / "src").glob("*.java")]
        if version >= "4":
            own += (sources / "share").glob("*.java")
        compiler = Path(shutil.which("java") or "java").with_name("javac")
        _run([str(compiler), "-nowarn", "-d", f"{folder}/classes", "-cp", f"{folder}/lib/*", *map(str, own)])
        _done(folder, files, version)
    return f"{folder}/classes:{folder}/lib/*"


@_one_at_a_time
def go_driver() -> Path:
    """The program of the Go clients, built if need be."""
    folder, sources = CACHE / "go", HERE / "clients/go"
    files = sorted(sources.iterdir())
    if _due(folder, files):
        _run(["go", "build", "-o", str(folder / "driver"), "."], cwd=sources)
        _done(folder, files)
    return folder / "driver"


@_one_at_a_time
def node_driver() -> Path:
    """The script of the Node client, beside its packages, installed if need be."""
    folder, sources = CACHE / "node", HERE / "clients/node"
    files = sorted(sources.iterdir())
    if _due(folder, files):
        for file in files:
            shutil.copy(file, folder)
        _run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder)
        _done(folder, files)
    return folder / "driver.js"


def available(family: str) -> bool:
    """Whether what builds and runs the drivers of a family is installed."""
    return all(shutil.which(tool) for tool in {"java": ("java", "mvn"), "node": ("node", "npm")}.get(family, (family,)))


def go_is_built() -> bool:
    """Whether the Go driver need not be built, which takes minutes."""
    files = sorted((HERE / "clients/go").iterdir())
    stamp = CACHE / "go/stamp"
    return stamp.exists() and stamp.read_text() == _stamp(files)


def _stamp(files: Iterable[Path], *parts: str) -> str:
    return hashlib.sha256(repr([*parts, *(file.read_bytes() for file in files)]).encode()).hexdigest()


def _due(folder: Path, files: Iterable[Path], *parts: str) -> bool:
    """Whether something is to be built; then its folder is empty."""
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == _stamp(files, *parts):
        return False
    print(f"matrix: building {folder.name}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return True


def _done(folder: Path, files: Iterable[Path], *parts: str) -> None:
    (folder / "stamp").write_text(_stamp(files, *parts))


def _maven(pom: Path, version: str, folder: Path, *options: str) -> None:
    copy = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}")
    _run(["mvn", "-q", "-B", "-f", str(pom), *copy, f"-Dkafka.version={version}", *options])


def _run(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}\n{(done.stdout + done.stderr).decode()}")
