"""Programs with which the compiled core reads the bodies of captured frames.

A program is a tuple of integers, operations with their operands, which `native/src/bodies.rs` lists and runs. It reads
the same fields, with the same meaning, as `bodies.Wanted` selects for the Python session; a property test compares
them. Bodies with errors inside, or with records that are not complete batches of magic 2 do not fit a program: the
session reads them.
"""

from collections.abc import Collection
from functools import cache

from kproxy.protocol.apis import API_VERSIONS, LIST_OFFSETS
from kproxy.protocol.plans import FIXED, join, size_of
from kproxy.protocol.programs import COMPACT, SKIP, TEXT, ZERO, Layout, Program
from kproxy.protocol.schema import Field, address_path
from kproxy.wire import bodies
from kproxy.wire.bodies import RACK_ID, REPLICA_ID, Partition, Wanted

NUMBER, FINE, NAME, ID, ROW, BATCHES, TAGGED, TAG = range(14, 22)

TEXTS = ("topic", "topic_id", "group_id", "metadata", "rack_id")
COLUMNS = tuple(name for name in Partition._fields if name not in TEXTS)  # of a topic-partition
OF_BODY = ("throttle_ms", "error_code of the body", "replica_id")
VALUES = (*COLUMNS, *OF_BODY)

_OF_RESPONSE = {"throttleTimeMs": "throttle_ms", "errorCode": "error_code of the body"}
_OF_ASKER = {REPLICA_ID: "replica_id", f"replicaState.{REPLICA_ID}": "replica_id", RACK_ID: "rack_id"}


@cache
def reading(api_key: int, version: int, side: str, detail: int) -> Program | None:
    """Return the program for a body, from the byte after its correlation id on; None: the session has to read it.

    side: "request" or "response". detail: as `bodies.Wanted` has it, at most `bodies.BATCHES`.
    """
    if api_key == API_VERSIONS:  # its responses may be of another version
        return None
    if api_key == LIST_OFFSETS and side == "request" and detail:  # no column has the timestamps that it asks for
        return None
    wanted = Wanted(api_key, version, side, detail)
    if side == "response" and (wanted.named or wanted.statements):
        return None
    header_version = wanted.message.header_version(version)
    header = [TEXT, 2, 1] if side == "request" and header_version else []  # the client id
    if header_version == (2 if side == "request" else 1):
        header += [TAGGED, 0]
    # At this level the session scans responses, and a scan also walks the addresses of brokers.
    carrier = address_path(api_key, version) if side == "response" and detail == bodies.ERRORS else None
    body = _Body(wanted, version, (carrier,) if carrier else ())
    return (*header, *body.operations(wanted.message.fields, ""))


class _Body(Layout):
    """The operations that read the wanted fields of a body."""

    def __init__(self, wanted: Wanted, version: int, scanned: Collection[str]) -> None:
        """scanned: paths whose fields must end inside the body, although no value of theirs is read."""
        self._names = {path: name.removeprefix("of_") for path, name in wanted.attributes.items()}
        for path, name in (_OF_ASKER if not wanted.noted else {}).items():
            if path in wanted.statements:
                self._names[path] = name
        self._noted = wanted.noted
        self._partitions = wanted.partitions
        self._keeps_headers = wanted.detail >= bodies.BATCHES
        flexible = version in wanted.message.flexible_versions
        super().__init__(wanted.message.name, version, flexible, {*self._names, *self._noted, *scanned})

    def of_array(self, field: Field, path: str, width: int, nullable: int) -> list[int]:
        operations = super().of_array(field, path, width, nullable)
        if path + "[]" not in self._partitions:
            return operations
        body = operations[5:]
        return [*operations[:4], len(body) + 2, ROW, len(body), *body]

    def of_primitive(self, type_: str, path: str, compact: bool, nullable: int) -> list[int]:
        size = size_of(FIXED[type_]) if type_ in FIXED else None
        width = COMPACT if compact else 2 if type_ == "string" else 4
        name = self._names.get(path)
        if type_ == "records" and self._partitions:
            return [BATCHES, width, nullable, int(self._keeps_headers)]
        if path in _OF_RESPONSE and path in self._noted and size:
            return [NUMBER, VALUES.index(_OF_RESPONSE[path]), size]
        if name in TEXTS:
            return [ID, TEXTS.index(name), size] if size else [NAME, TEXTS.index(name), width, nullable]
        if name is not None and size:
            return [FINE if path in self._noted else NUMBER, VALUES.index(name), size]
        if size:
            return [ZERO if path in self._noted else SKIP, size]
        return [TEXT, width, nullable]

    def of_tags(self, tagged: list[Field], path: str) -> list[int]:
        read = [field for field in tagged if self.looks_below(join(path, field.name))]
        found: list[int] = []
        for field in read:
            operations = self.of_field(field, join(path, field.name))
            found += [TAG, field.tag or 0, len(operations), *operations]
        return [TAGGED, len(found), *found]
