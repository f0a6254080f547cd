"""Checks of a folder of tables, before it is read or added to.

Duty: reads the manifest `_kproxy.json`, checks the version of the kproxy that wrote the tables, and checks that a
requested table exists; each error message names the fix. Does not write tables.
"""

import json
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from kproxy.errors import KproxyError
from kproxy.tables import schema

MANIFEST = "_kproxy.json"
PUBLICATION = "_publish.json"  # there while finished files are moved to their places
UNFINISHED = f".unfinished-spark/{PUBLICATION}"
_CAPTURES = (".pcap", ".pcapng", ".cap")
_MAX_STEM_BYTES = 200  # file systems limit names to 255

# Characters allowed in the name of a table's file. Readers skip files that begin with "_" or "."; Hadoop interprets ":"
# and the characters of globs in paths; "~" is the escape of `file_of`.
_PLAIN = re.compile(r"[A-Za-z0-9._ @+,=()&#!$-]")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest `_kproxy.json` of a dataset; empty if there is no readable one."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def file_of(source: str) -> str:
    """Return the name of the file with a source's rows: the source's name, if all its characters are in _PLAIN.

    Other characters become "~" and a UTF-8 byte in hex, for each byte. A long name is cut and ends in a digest of the
    whole name.
    """
    spelled = "".join(
        character if _PLAIN.fullmatch(character) and (place or character not in "._") else _spelled(character)
        for place, character in enumerate(source)
    )
    if len(spelled) > _MAX_STEM_BYTES:
        digest = blake2b(source.encode(), digest_size=16).hexdigest()
        spelled = f"{spelled[: _MAX_STEM_BYTES - len(digest) - 1]}~{digest}"
    return f"{spelled}.parquet"


def _spelled(character: str) -> str:
    return "".join(f"~{byte:02x}" for byte in character.encode())


def refuse_unfinished(folder: Path) -> None:
    """Raise KproxyError while tables are moved to their places: old and new files exist together."""
    if any(folder.glob(f".unfinished-*/{PUBLICATION}")):
        raise unfinished(str(folder))


def generation(folder: Path) -> tuple[int, ...]:
    """Return what differs after `kproxy convert` or `kproxy spark ingest` has published tables.

    Empty for a live recording, which only adds files.
    """
    if "rows" not in read_manifest(folder):
        return ()
    try:
        found = (folder / MANIFEST).stat()
    except FileNotFoundError:
        return ()
    return found.st_mtime_ns, found.st_ino


def refuse_replaced(folder: Path, before: tuple[int, ...]) -> None:
    """Raise KproxyError if tables were published since `generation` was `before`, or are being so."""
    refuse_unfinished(folder)
    if generation(folder) != before:
        raise KproxyError(f"{folder}: the tables were replaced while they were read: ask again")


def unfinished(folder: str) -> KproxyError:
    return KproxyError(
        f"{folder}: `kproxy convert` or `kproxy spark ingest` is moving tables to their places, or was ended during "
        "that: ask again when it is done, or start it again, which first finishes what was begun"
    )


def check_version(folder: Path) -> None:
    """Raise KproxyError for a dataset with a schema newer than `schema.VERSION`."""
    manifest = read_manifest(folder)
    version = manifest.get("schema_version")
    if isinstance(version, int) and version > schema.VERSION:
        raise KproxyError(
            f"{folder}: these tables were written by a newer kproxy ({manifest.get('kproxy', 'of unknown version')}, "
            f"schema version {version}; this one knows {schema.VERSION}): upgrade kproxy, or name another folder"
        )


def is_older(folder: str, table: str) -> bool:
    """Return whether a dataset is older than a table, so that the table's absence is no property of the captures."""
    version = None if "://" in folder else read_manifest(Path(folder)).get("schema_version")
    return isinstance(version, int) and version < schema.SINCE.get(table, 0)


def has_rows(folder: str, table: str) -> bool:
    """Return whether a dataset on this machine has files of a table; False if the captures had no rows for it.

    Always True for a URL, which is not checked. Raises KproxyError if the folder is no dataset, lacks the table, or was
    written by a newer kproxy.
    """
    if "://" in folder:
        return True
    place = Path(folder)
    if place.is_file():
        if any(ending in place.name for ending in _CAPTURES):
            raise KproxyError(
                f"{folder} is a capture, and questions are put to tables: make them with "
                f"`kproxy convert {folder} --out tables`, and ask `tables`"
            )
        raise KproxyError(f"{folder} is a file: name the folder that `kproxy convert` or `kproxy spark ingest` wrote")
    if not place.is_dir():
        raise KproxyError(f"{folder}: there is no such folder; `kproxy convert` makes tables of a capture")
    check_version(place)
    refuse_unfinished(place)
    form = read_manifest(place).get("format")
    if form is not None:
        raise KproxyError(
            f"{folder} holds tables of the format {form}, and questions are put to Parquet: read them with "
            f"spark.read.format({form!r}).load('{folder}/{table}')"
        )
    if any((place / table).rglob("*.parquet")):
        return True
    if table in schema.TABLES and (place / MANIFEST).is_file():
        return False
    if place.name in schema.BY_NAME and any(place.rglob("*.parquet")):
        raise KproxyError(f"{folder} is one table of a dataset: name the folder that holds all of them, {place.parent}")
    present = sorted(path.name for path in place.glob("[!._]*") if path.is_dir() and path.name in schema.BY_NAME)
    raise KproxyError(
        f"{folder} holds no table {table!r}, only {', '.join(present)}"
        if present
        else f"{folder} holds no tables: name the folder that `kproxy convert` or `kproxy spark ingest` wrote"
    )
