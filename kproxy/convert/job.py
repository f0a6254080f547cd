"""The settings, the captures and the summary of a conversion: shared by `kproxy convert` and Spark.

Duty: `Settings` has the options of reading, `captures_of` returns the captures that paths match, and `refuse_replacing`
prevents a capture from replacing another one's tables. The name of a file is the source in the tables, so two captures
with one name cannot be in one dataset. A capture is recognised by its first bytes (`fingerprint`).

Does not handle rows, or distribute flows among processes or machines.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa

import kproxy
from kproxy.capture.formats.captures import in_time
from kproxy.capture.formats.storage import LOCAL, STDIN, Storage, name_of
from kproxy.capture.quality import Quality
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
)  # the tables whose rows come from flows; `quality` is per capture


@dataclass(frozen=True)
class Settings:
    """The options of reading captures. Raises KproxyError for a wrong value, and for settings that exclude each other.

    ports: of brokers; empty: Kafka is detected by content, on any port.
    zookeeper_ports: of ZooKeeper, which is detected by content, too; if `ports` are set, only on the ports of both.
    cluster: the value of the column `cluster`.
    rotated: the files are one capture, read in the order of their first packets.
    key_log: an SSLKEYLOGFILE of the TLS connections, which tshark decrypts.
    detail: level of detail of bodies: "headers" gives no rows of `partitions` and `batches`, "topics" none of
        `batches`, "batches" all.
    checksums: verify the checksum of every batch (`crc_valid`), which requires reading every byte of it.
    records: topics whose records become rows of `records`; None: no topic.
    overwrite: replace the tables of another capture with the same name, or with Spark all tables of the folder.
    append: add to a folder that has the tables of other captures (`convert`; Spark has an option of its own).
    storage: the access to captures in a storage (s3://, webhdfs://, gs://, abfs://).
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
        """Return the options of `kproxy show` that find the same connections and exchanges in the captures."""
        return [
            *(text for port in self.ports for text in ("--port", str(port))),
            *(text for port in self.zookeeper_ports for text in ("--zookeeper-port", str(port))),
            *(["--key-log", str(self.key_log)] if self.key_log else []),
        ]

    @property
    def look(self) -> int:
        """Return the level of detail: one of `bodies.DETAILS`, or CHECKED."""
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
    records: Chosen | None = None  # if set, there is a table `records` too
    zookeeper_ports: tuple[int, ...] = ()
    storage: Storage = LOCAL

    @property
    def is_known(self) -> bool:
        """Return whether insight gets the exchanges of the capture: only if bodies are read."""
        return self.detail > ERRORS

    @property
    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables whose rows come from flows."""
        return OF_FLOWS if self.records is None else (*OF_FLOWS, schema.RECORDS.name)

    @property
    def all_tables(self) -> tuple[str, ...]:
        """Return the names of the tables that the job writes, with and without rows."""
        return *self.tables, schema.QUALITY.name, *(table.name for table in schema.KNOWLEDGE)


@dataclass
class Summary:
    """The result of a conversion of captures."""

    folder: Path
    rows: dict[str, int] = field(default_factory=dict)  # by table
    quality: dict[str, Quality] = field(default_factory=dict)  # by source
    failed: list[CaptureError] = field(default_factory=list)
    key_log: str | None = None  # from the settings
    chosen: Chosen | None = None  # the topics whose records were requested
    topics: list[str] = field(default_factory=list)  # topics seen, if none of them was chosen; of many only some
    paths: dict[str, Sequence[str]] = field(default_factory=dict)  # the files of each source

    @property
    def found_kafka(self) -> bool:
        """Return whether any connection of any capture is a Kafka connection."""
        return any(quality.count("kafka") for quality in self.quality.values())

    @property
    def found_zookeeper(self) -> bool:
        """Return whether any connection of any capture is a ZooKeeper connection."""
        return any(quality.count("zookeeper") for quality in self.quality.values())


def captures_of(captures: Sequence[Path | str], settings: Settings) -> list[Job]:
    """Return the captures that paths match: one for each file, or with `rotated` one of all files.

    A folder matches the captures in it, recognised by their names; a pattern matches files. Raises KproxyError for two
    captures with one name, and for a folder without captures.
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
    """Return the folder of the tables. Raises KproxyError for a URL, instead of creating a folder of that name, and for
    an empty name.
    """
    refuse_no_name(out)
    if "://" in str(out):
        raise KproxyError(
            f"--out {out}: tables are written to folders of this machine: name one, and copy it from there"
        )
    return Path(out)


def refuse_no_name(out: Path | str) -> None:
    """Raise KproxyError for an empty name, such as an unset shell variable: it would mean the current folder."""
    if not str(out):
        raise KproxyError("--out is empty: name a folder")


def fingerprint(path: str, size: int = FINGERPRINT_BYTES, storage: Storage = LOCAL) -> str | None:
    """Return "<number>:<BLAKE2b in hex>" of the first bytes of a file, which stay the same while a capture grows.

    Returns None for a pipe, which can be read only once, and for an unreadable file.
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
    if others and not sources <= known:  # otherwise all existing tables are replaced
        raise KproxyError(
            f"{folder} has the tables of {few(others, _NAMED)}, and questions to it are about all captures in it: add "
            "to them with --append, or name another folder"
        )


def manifest(jobs: Sequence[Job], summary: Summary) -> dict[str, Any]:
    """Return the manifest of a dataset, without clock, host or absolute path."""
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
