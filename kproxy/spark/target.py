"""The folder of tables that an ingest writes, in any file system of Spark, completely or not at all.

Duty: Spark writes files into a staging folder inside it (`stage`, see `store`), with its own committers, which handle
attempts that fail or run twice. `publish` moves the files to their places, removes the files that they replace, and
writes the manifest last. It writes a log of all moves and removals first, so that the next run finishes a run that died
midway: tables never disappear, and no row is duplicated. This process moves files of this machine; the file systems of
Hadoop, as Spark finds them, move others.

A folder of this machine is locked during a run. Elsewhere two runs must not write to one folder at the same time.
Memory: names of the tables' files.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kproxy.errors import KproxyError, why_no_folder
from kproxy.spark import is_connect
from kproxy.spark.store import NONE
from kproxy.tables import schema
from kproxy.tables.dataset import MANIFEST, UNFINISHED
from kproxy.tables.folders import refuse_file, sync, writing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STAGE, LOG = UNFINISHED.split("/")  # LOG: moves and removals, written when all staged files are complete
CAPTURES = "_captures"  # a folder with a file for each run: the captures that it added
_PACKAGES = {  # packages of file systems that Spark lacks, by scheme; in the version of Hadoop
    "s3a": "org.apache.hadoop:hadoop-aws:{}",
    "abfs": "org.apache.hadoop:hadoop-azure:{}",
    "abfss": "org.apache.hadoop:hadoop-azure:{}",
}
PART_BYTES = 1 << 20  # bytes that a call passes from or to the JVM


class Files(Protocol):
    """The operations of a file system that `Target` uses; paths are relative to its root."""

    root: str

    def read(self, path: str) -> str | None: ...
    def lines(self, path: str) -> Iterator[str]: ...
    def write(self, path: str, parts: Iterable[str]) -> None: ...
    def found(self, path: str) -> list[str]: ...
    def move(self, path: str, to: str) -> None: ...
    def remove(self, path: str) -> None: ...


class Target:
    """A folder of tables. Call `begin`, let Spark write to `stage`, then call `publish`; call `abandon` in any case."""

    def __init__(self, spark: "SparkSession", folder: str) -> None:
        self.folder = folder
        self.is_local = "://" not in folder
        self._files: Files = _Local(folder) if self.is_local else _Hadoop(spark, folder)
        self._claim = -1
        self._made: list[Path] = []
        self._begun = False

    @property
    def url(self) -> str:
        """Return the folder as a URL that does not depend on Spark's default file system."""
        return f"file:{self._files.root}" if self.is_local else self._files.root

    @property
    def stage(self) -> str:
        """Return the URL of the staging folder, where Spark writes a run's tables."""
        return f"{self.url}/{STAGE}"

    @property
    def is_unfinished(self) -> bool:
        """Return whether a run is moving tables to their places, or died while it did so."""
        return self._files.read(UNFINISHED) is not None

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the tables, empty without tables. Raises KproxyError for tables of a newer kproxy."""
        try:
            found = json.loads(self._files.read(MANIFEST) or "{}")
        except ValueError:
            found = {}
        version = found.get("schema_version") if isinstance(found, dict) else None
        if isinstance(version, int) and version > schema.VERSION:
            raise KproxyError(
                f"{self.folder}: these tables were written by a newer kproxy ({found.get('kproxy')}, schema version "
                f"{version}; this one knows {schema.VERSION}): upgrade kproxy, or name another folder"
            )
        return found if isinstance(found, dict) else {}

    def refuse(self, *, append: bool, overwrite: bool) -> dict[str, Any]:
        """Return the manifest.

        Raises KproxyError for existing tables without `append` and `overwrite`, and for a file in place of the folder.
        """
        if self.is_local:
            refuse_file(Path(self.folder))
        known = self.manifest()
        if append or overwrite:
            return known
        if known:
            raise KproxyError(
                f"{self.folder} holds tables already: name another folder, or say --append or --overwrite"
            )
        if there := [name for name in schema.BY_NAME if self._files.found(name)]:
            raise KproxyError(
                f"{self.folder} holds {', '.join(there)} and no {MANIFEST} that says whose they are: name another "
                "folder, or say --overwrite"
            )
        return known

    def without_files(self, tables: Iterable[str], manifest: dict[str, Any]) -> list[str]:
        """Return the tables without files. Only tables without rows are listed: others may have thousands of files."""
        rows = manifest.get("rows", {})
        return [name for name in tables if not rows.get(name) and not self._files.found(name)]

    def captures(self) -> Iterator[str]:
        """Yield the lines that the tables store about their captures, one per capture (see `Catalogue.lines`)."""
        for path in self._files.found(CAPTURES):
            yield from self._files.lines(path)

    def begin(self) -> None:
        """Lock the folder; finish the `publish` of an earlier run, and remove its other files."""
        if self.is_local:
            self._lock()
        self._begun = True
        self._finish()
        self._files.remove(STAGE)
        if self.is_local:
            (Path(self.folder) / STAGE).mkdir(parents=True, exist_ok=True)

    def publish(
        self,
        manifest: dict[str, Any],
        captures: Iterable[str] | None = None,
        *,
        replace: bool,
        committed: Collection[str] = (),
    ) -> None:
        """Add the staged files to the tables; with `replace` they replace all tables.

        captures: one line per capture. committed: tables that a format wrote and replaced with its own commits; their
        files stay as they are.
        """
        if captures is not None:
            numbers = [int(path.rpartition("/")[2].partition(".")[0]) for path in self._files.found(CAPTURES)]
            self._files.write(f"{STAGE}/{CAPTURES}/{max(numbers, default=0) + 1:06d}.jsonl", captures)
        staged = [path for path in self._files.found(STAGE) if _is_table_file(path)]
        old = [name for name in (*schema.BY_NAME, CAPTURES) if name not in committed] if replace else []
        before = [path for name in old for path in self._files.found(name)]
        log = {"move": staged, "remove": before, "manifest": manifest}
        self._files.write(f"{STAGE}/{LOG}", [json.dumps(log)])
        self._finish()

    def abandon(self) -> None:
        """Remove unpublished files and the folders that this run created and left empty; unlock the folder."""
        if self._begun and self._files.read(f"{STAGE}/{LOG}") is None:
            self._files.remove(STAGE)
        self._begun = False
        if self._claim >= 0:
            os.close(self._claim)
            self._claim = -1
            with suppress(OSError):  # not empty: something was published
                for folder in self._made:
                    folder.rmdir()

    def _finish(self) -> None:
        """Do the moves and removals in the log, if a log exists; safe to repeat."""
        text = self._files.read(f"{STAGE}/{LOG}")
        if text is None:
            return
        log = json.loads(text)
        for path in log["move"]:
            self._files.move(path, _published(path))
        for path in log["remove"]:
            self._files.remove(path)
        self._files.write(MANIFEST, [json.dumps(log["manifest"], indent=2, sort_keys=True) + "\n"])
        self._files.remove(STAGE)

    def _lock(self) -> None:
        folder = Path(self.folder)
        self._made = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._claim = os.open(folder, os.O_RDONLY)
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._claim)
            self._claim = -1
            raise KproxyError(f"{folder}: another kproxy writes to it; wait, or name another folder") from None
        except OSError as fault:
            raise KproxyError(f"{folder}: cannot be written to: {why_no_folder(fault)}") from fault


def _is_table_file(path: str) -> bool:
    """Return whether a staged file has rows: committer's markers, checksums and superseded attempts have none."""
    places = path.removeprefix(f"{STAGE}/").removeprefix(f"{CAPTURES}/").split("/")
    return not any(place.startswith(("_", ".")) for place in places)


def _published(path: str) -> str:
    """Return the place of a staged file. Spark named files of tables .txt, and gave tables without times a folder."""
    _, _, place = path.partition("/")
    if not place.startswith("table="):
        return place
    return place.removeprefix("table=").replace(f"/date={NONE}/hour={NONE}/", "/").removesuffix(".txt") + ".parquet"


class _Local:
    """Files of this machine."""

    def __init__(self, folder: str) -> None:
        self.root = folder
        self._folder = Path(folder)

    def read(self, path: str) -> str | None:
        try:
            return (self._folder / path).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as fault:
            raise KproxyError(f"{self._folder / path}: cannot be read: {fault.strerror}") from fault

    def lines(self, path: str) -> Iterator[str]:
        with (self._folder / path).open() as file:
            yield from file

    def write(self, path: str, parts: Iterable[str]) -> None:
        target = self._folder / path
        draft = target.with_name(f".{target.name}.new")
        with writing(self._folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
            sync(target.parent)

    def found(self, path: str) -> list[str]:
        return sorted(
            str(file.relative_to(self._folder)) for file in (self._folder / path).rglob("*") if file.is_file()
        )

    def move(self, path: str, to: str) -> None:
        target = self._folder / to
        with writing(self._folder):
            target.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # an earlier run has moved it
                sync(self._folder / path)
                (self._folder / path).replace(target)
                sync(target.parent)

    def remove(self, path: str) -> None:
        target = self._folder / path
        if target.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            return
        target.unlink(missing_ok=True)
        with suppress(OSError):  # a folder with other files stays
            for parent in (target.parent, target.parent.parent):
                if parent != self._folder:
                    parent.rmdir()


class _Hadoop:
    """Files of any file system of Spark (s3a://, hdfs://, gs://, abfs://), through Hadoop's interface."""

    def __init__(self, spark: "SparkSession", folder: str) -> None:
        if is_connect(spark):
            raise KproxyError(
                f"{folder}: over Spark Connect tables are written to a folder that this machine and the server share; "
                "for a storage use spark-submit"
            )
        context: Any = spark.sparkContext
        self._jvm = context._jvm
        configuration = context._jsc.hadoopConfiguration()
        self.root = folder.rstrip("/")
        self._root = self._jvm.org.apache.hadoop.fs.Path(self.root)
        try:
            self._system = self._root.getFileSystem(configuration)
        except Exception as fault:
            version = self._jvm.org.apache.hadoop.util.VersionInfo.getVersion()
            raise KproxyError(f"{folder}: {_cause(fault)}{_advice(folder, version)}") from fault

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path) if path else self._root

    def read(self, path: str) -> str | None:
        place = self._path(path)
        if not self._system.exists(place):
            return None
        stream = self._system.open(place)
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def lines(self, path: str) -> Iterator[str]:
        stream = self._system.open(self._path(path))
        try:
            rest = b""
            while some := bytes(stream.readNBytes(PART_BYTES)):
                *whole, rest = (rest + some).split(b"\n")
                yield from (line.decode() for line in whole)
            if rest:
                yield rest.decode()
        finally:
            stream.close()

    def write(self, path: str, parts: Iterable[str]) -> None:
        draft, place = self._path(f"{path}.new"), self._path(path)
        stream = self._system.create(draft, True)
        try:
            for some in _together(parts):
                stream.write(bytearray(some.encode()))
        finally:
            stream.close()
        self._rename(draft, place)

    def found(self, path: str) -> list[str]:
        place = self._path(path)
        if not self._system.exists(place):
            return []
        files = []
        listed = self._system.listFiles(place, True)
        prefix = self._system.makeQualified(self._root).toUri().getPath().rstrip("/") + "/"
        while listed.hasNext():
            files.append(str(listed.next().getPath().toUri().getPath()).removeprefix(prefix))
        return sorted(files)

    def move(self, path: str, to: str) -> None:
        source, target = self._path(path), self._path(to)
        if self._system.exists(source):  # otherwise an earlier run has moved it
            self._system.mkdirs(target.getParent())
            self._rename(source, target)

    def _rename(self, source: Any, target: Any) -> None:
        """Rename over an existing file: after a crash, a file system that copies (s3a://) has the file twice."""
        self._system.delete(target, False)  # few file systems rename over an existing file
        if not self._system.rename(source, target):
            raise KproxyError(f"{target.toString()}: the file system did not take the file; run again to finish")

    def remove(self, path: str) -> None:
        self._system.delete(self._path(path), True)


def _together(parts: Iterable[str]) -> Iterator[str]:
    """Join parts up to PART_BYTES: each call of the JVM is expensive."""
    waiting, size = list[str](), 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= PART_BYTES:
            yield "".join(waiting)
            waiting, size = [], 0
    yield "".join(waiting)


def _advice(folder: str, version: str) -> str:
    """Return advice for a URL without a file system in this version of Hadoop; empty if there is none."""
    scheme = folder.partition("://")[0].lower()
    if scheme in ("s3", "s3n"):
        return "; Spark's name of it is s3a://"
    package = _PACKAGES.get(scheme)
    return "" if package is None else f"; give Spark its package: --conf spark.jars.packages={package.format(version)}"


def _cause(fault: BaseException) -> str:
    """Return the message of the innermost exception in an error of the JVM."""
    lines = [line.strip() for line in str(fault).splitlines() if "Exception" in line]
    return (lines[-1] if lines else str(fault)).rpartition("Exception: ")[2]
