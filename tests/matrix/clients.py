"""The clients of the matrix: how each driver is started, and what it can do at all."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.broker.jvm import SMALL_JVM
from tests.matrix import setup

_ALL = ("none", "gzip", "snappy", "lz4", "zstd")
_PYTHON = Path(__file__).parent / "clients/python/driver.py"


@dataclass(frozen=True)
class Client:
    """One row. library: as the driver calls it; family: what must be installed, see `setup.available`."""

    name: str
    library: str
    family: str
    command: Callable[[], list[str]]  # which builds the driver if need be
    mode: str = "groups"
    codecs: tuple[str, ...] = _ALL
    text: bool = False  # keys and headers that stand on a command line
    unsigned: bool = False  # it makes its tokens itself, unsigned

    @property
    def ordered(self) -> bool:
        """Whether its records come back in the order of their partitions."""
        return self.mode in ("groups", "transactions")

    @property
    def dense(self) -> bool:
        """Whether its records alone have offsets: a transaction's end has one too."""
        return self.mode == "groups"


def _python() -> list[str]:
    return [sys.executable, str(_PYTHON)]


def _java(release: str) -> Callable[[], list[str]]:
    return lambda: ["java", *SMALL_JVM, "-Xmx256m", "-cp", setup.java_client(release), "Driver"]


def _go() -> list[str]:
    return [str(setup.go_driver())]


def _node() -> list[str]:
    return ["node", str(setup.node_driver())]


def _java_rows(release: str) -> list[Client]:
    short = ".".join(release.split(".")[:2])
    modes = ("groups", "transactions", "streams", *(["share"] if release >= "4" else []))
    names = {"groups": "", "transactions": ", transactions", "streams": ", Streams", "share": ", share group"}
    return [Client(f"Java {short}{names[mode]}", release, "java", _java(release), mode) for mode in modes]


def _of(distribution: str) -> str:
    return f"{distribution} {version(distribution)}"


CLIENTS = (
    Client(_of("confluent-kafka"), "confluent-kafka", "python3", _python),
    Client(_of("kafka-python"), "kafka-python", "python3", _python),
    Client(_of("aiokafka"), "aiokafka", "python3", _python),
    *(row for release in setup.JAVA_CLIENTS for row in _java_rows(release)),
    Client("franz-go 1.22.2", "franz-go", "go", _go),
    Client("Sarama 1.61.1", "Sarama", "go", _go),
    Client("kafka-go 0.4.51", "kafka-go", "go", _go),
    Client("KafkaJS 2.2.4", "KafkaJS", "node", _node, codecs=("none", "gzip", "snappy", "lz4")),
    Client("kcat 1.7.1", "kcat", "kcat", _python, text=True, unsigned=True),
)
