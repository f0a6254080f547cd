"""What is to be converted, how, and what came of it: shared by `kproxy convert` and Spark.

Duty: `Settings` says how captures are read, `captures_of` which captures paths stand for, and `refuse_replacing` keeps
a capture from taking the place of another one's tables. Tables name their source by a file's name, so two captures with
one name cannot stand in one dataset; a capture is known again by its first bytes (`fingerprint`).

Refuses to know rows, and how flows are shared out among processes or machines.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa

import kproxy
from kproxy.capture.captures import in_time
from kproxy.capture.quality import Quality
from kproxy.capture.storage import LOCAL, STDIN, Storage, name_of
from kproxy.errors import CaptureError, KproxyError
from kproxy.tables import schema
from kproxy.tables.dataset import read_manifest
from kproxy.tables.records import Chosen
from kproxy.wire.bodies import BATCHES, CHECKED, DETAILS, ERRORS
from kproxy.wording import few

FINGERPRINT_BYTES = 64 << 10
_NAMED = 3  # captures in a message
OF_FLOWS = (
    "exchanges",
    "partitions",
    "batches",
    "connections",
)  # the tables whose rows come from flows; `quality` is of a whole capture


@dataclass(frozen=True)
class Settings:
    """How captures are read. Raises KproxyError for what cannot be, and where two settings exclude each other.

    ports: of brokers; empty: Kafka is found by content, on any port.
    zookeeper_ports: of ZooKeeper; it is found by content too, but where `ports` are named on those of both only.
    cluster: the column `cluster`.
    rotated: the files are one capture, read in the order of their first packets.
    key_log: an SSLKEYLOGFILE of the TLS connections, which are decrypted with tshark.
    detail: how closely bodies are read: "headers" gives no rows of `partitions` and `batches`, "topics" none of
        `batches`, "batches" all.
    checksums: check that of every batch (`crc_valid`), for which every byte of it is read.
    records: topics whose records become rows of `records`; None: of none.
    overwrite: replace the tables of another capture that has the same name, or with Spark all that the folder holds.
    append: add to a folder that has the tables of other captures (`convert`; Spark has an option of its own).
    storage: how captures are reached that lie in a storage (s3://, webhdfs://, gs://, abfs://).
    """

    ports: tuple[int, ...] = ()
    cluster: str = "default"
    rotated: bool = False
    key_log: Path | str | None = None
    detail: str = "batches"
    checksums: bool = False
    records: Chosen | None = None
    overwrite: bool = False
    append: bool = False
    zookeeper_ports: tuple[int, ...] = ()
    storage: Storage = LOCAL

    def __post_init__(self) -> None:
        for port in (*self.ports, *self.zookeeper_ports):
            if not 0 < port < 1 << 16:
                raise KproxyError(f"port {port}: ports are from 1 to 65535")
        if not self.cluster:
            raise KproxyError("the name of the cluster is empty: leave it out, or name it")
        if self.key_log is not None and not os.path.isfile(self.key_log):  # noqa: PTH113 - raises never
            raise KproxyError(f"{self.key_log}: the key log is no file; name the SSLKEYLOGFILE that a client wrote")
        if (self.checksums or self.records is not None) and DETAILS[self.detail] < BATCHES:
            raise KproxyError(
                f"checksums and records are of batches, which detail {self.detail} does not look at: leave it out"
            )

    @property
    def reading(self) -> list[str]:
        """The options with which `kproxy show` finds the same connections and exchanges in the captures."""
        return [
            *(text for port in self.ports for text in ("--port", str(port))),
            *(text for port in self.zookeeper_ports for text in ("--zookeeper-port", str(port))),
            *(["--key-log", str(self.key_log)] if self.key_log else []),
        ]

    @property
    def look(self) -> int:
        """One of `bodies.DETAILS`, or CHECKED."""
        return CHECKED if self.checksums else DETAILS[self.detail]


@dataclass(frozen=True)
class Job:
    """One capture: a file, or rotated files in their order."""

    source: str
    paths: tuple[str, ...]
    cluster: str
    ports: tuple[int, ...]
    key_log: str | None = None  # SSLKEYLOGFILE of its TLS connections
    detail: int = BATCHES  # one of bodies.DETAILS
    records: Chosen | None = None  # then there is a table of them too
    zookeeper_ports: tuple[int, ...] = ()
    storage: Storage = LOCAL

    @property
    def is_known(self) -> bool:
        """Whether it is fed to insight: not where nothing but headers is looked at."""
        return self.detail > ERRORS

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables whose rows come from flows."""
        return OF_FLOWS if self.records is None else (*OF_FLOWS, schema.RECORDS.name)


@dataclass
class Summary:
    """What came of captures that were turned into tables."""

    folder: Path
    rows: dict[str, int] = field(default_factory=dict)  # by table
    quality: dict[str, Quality] = field(default_factory=dict)  # by source
    failed: list[CaptureError] = field(default_factory=list)
    key_log: str | None = None  # that was given
    chosen: Chosen | None = None  # the topics whose records were asked for
    topics: list[str] = field(default_factory=list)  # that were seen, where none of them was chosen; not all, if many
    paths: dict[str, Sequence[str]] = field(default_factory=dict)  # the files of each source

    @property
    def found_kafka(self) -> bool:
        """Whether any connection of any capture speaks Kafka."""
        return any(quality.count("kafka") for quality in self.quality.values())

    @property
    def found_zookeeper(self) -> bool:
        """Whether any connection of any capture speaks ZooKeeper's protocol."""
        return any(quality.count("zookeeper") for quality in self.quality.values())


def captures_of(captures: Sequence[Path | str], settings: Settings) -> list[Job]:
    """The captures that paths stand for: one for each path, or with `rotated` one of all.

    A folder stands for the captures that lie in it, by their names, a pattern for what it matches. Raises KproxyError
    for two of one name, and for a folder without any.
    """
    paths = [file for path in captures for file in settings.storage.captures(str(path))]
    ports = tuple(sorted(set(settings.ports)))
    key_log = str(settings.key_log) if settings.key_log else None
    zookeeper_ports = tuple(sorted(set(settings.zookeeper_ports)))
    rest = (settings.cluster, ports, key_log, settings.look, settings.records, zookeeper_ports, settings.storage)
    if settings.rotated:
        paths = in_time(paths, settings.storage)
        return [Job(_source(paths[0]), tuple(paths), *rest)]
    jobs = [Job(_source(path), (path,), *rest) for path in paths]
    seen: dict[str, str] = {}
    for job in jobs:
        if job.source in seen:
            raise KproxyError(
                f"{seen[job.source]} and {job.paths[0]} have the same name, and tables name their source by it: "
                "convert them into separate folders, or rename one"
            )
        seen[job.source] = job.paths[0]
    return jobs


def _source(path: str) -> str:
    return "stdin" if path == STDIN else name_of(path)


def output_folder(out: Path | str) -> Path:
    """Where tables go; raises KproxyError for a URL, before a folder of that name is made, and for no name."""
    refuse_no_name(out)
    if "://" in str(out):
        raise KproxyError(
            f"--out {out}: tables are written to folders of this machine: name one, and copy it from there"
        )
    return Path(out)


def refuse_no_name(out: Path | str) -> None:
    """Raise KproxyError for an empty name, as of a variable of the shell that is not set: it would be this folder."""
    if not str(out):
        raise KproxyError("--out is empty: name a folder")


def fingerprint(path: str, size: int = FINGERPRINT_BYTES, storage: Storage = LOCAL) -> str | None:
    """The first bytes of a file as "<how many>:<BLAKE2b in hex>": the same as long as a capture only grows.

    None for what can be read but once, and for what cannot be read.
    """
    try:
        if not storage.is_file(path):
            return None
        head = storage.read(path, 0, size)
    except (OSError, CaptureError):
        return None
    return f"{len(head)}:{blake2b(head, digest_size=16).hexdigest()}"


def refuse_replacing(folder: Path, jobs: Sequence[Job]) -> None:
    """Raise KproxyError if the dataset has tables of another capture under the name of one of these."""
    manifest = read_manifest(folder)
    for job in jobs:
        if job.source in manifest.get("sources", ()):
            known = str(manifest.get("fingerprints", {}).get(job.source, ""))
            size = known.partition(":")[0]
            files = manifest["sources"][job.source]
            goes_on = files == [name_of(path) for path in job.paths[: len(files)]]
            if not size.isdecimal() or not goes_on or fingerprint(job.paths[0], int(size), job.storage) != known:
                raise KproxyError(
                    f"{folder} has tables of another capture that is called {job.source}: "
                    "name another folder, rename the capture, or replace those tables with --overwrite"
                )


def refuse_adding(folder: Path, jobs: Sequence[Job]) -> None:
    """Raise KproxyError if the dataset has tables of other captures, and not those of all of these."""
    known, sources = set(read_manifest(folder).get("sources", ())), {job.source for job in jobs}
    others = sorted(known - sources)
    if others and not sources <= known:  # else those that are there are made anew
        raise KproxyError(
            f"{folder} has the tables of {few(others, _NAMED)}, and questions to it are about all captures in it: add "
            "to them with --append, or name another folder"
        )


def manifest(jobs: Sequence[Job], summary: Summary) -> dict[str, Any]:
    """What a dataset says of itself: no clock, host or absolute path."""
    shown = {} if jobs[0].records is None else {"records": list(jobs[0].records.topics)}
    done = [job for job in jobs if job.source in summary.quality]
    prints = {job.source: fingerprint(job.paths[0], storage=job.storage) for job in done}
    return {
        "kproxy": kproxy.__version__,
        "pyarrow": pa.__version__,
        "settings": {"cluster": jobs[0].cluster, "ports": list(jobs[0].ports), **shown},
        "sources": {job.source: [name_of(path) for path in job.paths] for job in done},
        "fingerprints": {source: print_ for source, print_ in prints.items() if print_ is not None},
        "rows": summary.rows,
    }
