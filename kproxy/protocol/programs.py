"""Programs with which the compiled core reads frames: they detect plain responses, and collect values from requests.

A program is a tuple of integers, operations with their operands, which `native/src/program.rs` lists and runs. It is
made from the layout like the plans of `codec`. A response is plain if `codec.response_scan` would return (0 or -1, 0 or
None, (), False) for it: no throttle time, no error, no broker address. A request's names are the values of given
fields, as bytes: requests of one API and version with equal bytes have equal values in them. For a Produce that is
counted, the record batches of each topic-partition are added up, and the offsets are collected from its response. A
frame that does not fit a program is read in Python; a request with tagged fields never fits.

Refuses to know the use of a frame.
"""

from collections.abc import Mapping
from functools import cache

from kproxy.protocol.apis import API_VERSIONS
from kproxy.protocol.codec import api_message, is_noted, paths_of
from kproxy.protocol.plans import FIXED, Walk, join, size_of
from kproxy.protocol.schema import Field, Message, address_path

Program = tuple[int, ...]

SKIP, ZERO, TEXT, FIXED_ARRAY, EACH, EMPTY, MAYBE, TAGS, NAME, ID, PARTITION, RECORDS, OFFSET = range(1, 14)
NO_TAGS = [ZERO, 1]  # an empty tag section: one byte
COMPACT = 0  # the width of a varint length, which is the length plus one


# The fields of a Produce that is counted, with their operations.
_TOPICS = frozenset(("topicData.name", "topicData.topicId"))
_COUNTED = {"topicData.partitionData.index": [PARTITION]}
_OFFSETS = {
    "responses.partitionResponses.index": [PARTITION],
    "responses.partitionResponses.baseOffset": [OFFSET],
}
_ANSWERED_TOPICS = ("responses.name", "responses.topicId")
_NO_OPERATIONS: Mapping[str, list[int]] = {}


@cache
def plain_response(api_key: int, version: int, *, offsets: bool = False) -> Program | None:
    """Return the program for a response from the byte after its correlation id on; None: it is never plain.

    offsets: for a Produce: collect the topic-partitions with the offset of the first record of each.
    """
    carrier = address_path(api_key, version)
    if carrier == "" or api_key == API_VERSIONS:  # ApiVersions may be answered in version 0
        return None
    message = api_message(api_key, version, "response")
    header = [TAGS, 0] if message.header_version(version) else []
    layout = _Response(message, version, carrier, _OFFSETS if offsets else _NO_OPERATIONS)
    return (*header, *layout.operations(message.fields, ""))


@cache
def collecting(api_key: int, version: int, paths: frozenset[str], *, records: bool = False) -> Program:
    """Return the program for a request with a client id, from the byte after its correlation id on.

    paths: fields to collect, strings or of fixed size, as in `codec.paths_of`. records: for a Produce: also collect the
    topic-partitions, with the sums over the record batches of each.
    """
    message = api_message(api_key, version, "request")
    header_version = message.header_version(version)
    header = [TEXT, 2, 1, *(NO_TAGS if header_version > 1 else ())]
    flexible = version in message.flexible_versions
    if records:
        layout = _Request(message.name, version, flexible, paths | _TOPICS, _COUNTED, RECORDS)
    else:
        layout = _Request(message.name, version, flexible, paths, _NO_OPERATIONS, TEXT)
    return (*header, *layout.operations(message.fields, ""))


class Layout(Walk):
    """The operations for the fields of one version of a message."""

    special: Mapping[str, list[int]]  # operations of some fields, by path

    def operations(self, fields: tuple[Field, ...], path: str) -> list[int]:
        """Return the operations for a struct."""
        present = [field for field in fields if self.version in field.versions]
        operations: list[int] = []
        skips = False  # the last operation skips a number of bytes
        for field in present:
            if self.version not in field.tagged_versions:
                found = self.of_field(field, join(path, field.name))
                if skips and is_skip(found):
                    operations[-1] += found[1]
                else:
                    operations += found
                    skips = is_skip(found)
        if self.flexible:
            operations += self.of_tags([field for field in present if self.version in field.tagged_versions], path)
        return operations

    def of_field(self, field: Field, path: str) -> list[int]:
        nullable = int(self.version in field.nullable_versions)
        compact = self.flexible and field.compactable
        if field.is_array:
            return self.of_array(field, path, COMPACT if compact else 4, nullable)
        if not field.is_struct:
            return self.of_primitive(field.type, path, compact, nullable)
        body = self.operations(field.fields, path)
        return [MAYBE, 0, len(body), *body] if nullable else body

    def of_array(self, field: Field, path: str, width: int, nullable: int) -> list[int]:
        type_ = field.element_type
        size = self.fixed_size(field, type_)
        if size is not None and not self.looks_below(path + "[]"):
            return [FIXED_ARRAY, width, nullable, size]
        if field.is_struct:
            body = self.operations(field.fields, path)
        else:
            body = self.of_primitive(type_, path + "[]", self.flexible and field.compactable, 0)
        return [EACH, width, nullable, max(self.least_size(field, type_), 1), len(body), *body]

    def of_primitive(self, type_: str, path: str, compact: bool, nullable: int) -> list[int]:
        if path in self.special:
            return self.special[path]
        fixed, text = self.operations_at(path)
        if type_ in FIXED:
            return [fixed, size_of(FIXED[type_])]
        return [text, COMPACT if compact else 2 if type_ == "string" else 4, nullable]

    def operations_at(self, path: str) -> tuple[int, int]:
        """Return the operation for a value of fixed size, and the one for a value with a length before it."""
        raise NotImplementedError

    def of_tags(self, tagged: list[Field], path: str) -> list[int]:
        """Return the operations for a tag section; `tagged`: the known fields in it."""
        raise NotImplementedError


def is_skip(operations: list[int]) -> bool:
    """Return whether the operations only skip a number of bytes."""
    return len(operations) == 2 and operations[0] == SKIP


class _Response(Layout):
    """The operations for a plain response; `carrier`: the path of its brokers."""

    def __init__(self, message: Message, version: int, carrier: str | None, special: Mapping[str, list[int]]) -> None:
        noted = {path for path in paths_of(message.fields, version) if is_noted(path)}
        flexible = version in message.flexible_versions
        super().__init__(message.name, version, flexible, noted | {carrier} if carrier else noted)
        self._carrier = carrier
        self.special = special

    def of_array(self, field: Field, path: str, width: int, nullable: int) -> list[int]:
        if path == self._carrier:
            return [EMPTY, width, nullable]
        return super().of_array(field, path, width, nullable)

    def operations_at(self, path: str) -> tuple[int, int]:
        if self.special and path in _ANSWERED_TOPICS:
            return ID, NAME
        return ZERO if path in self.wanted else SKIP, TEXT

    def of_tags(self, tagged: list[Field], path: str) -> list[int]:
        looked_at = [field.tag or 0 for field in tagged if self.looks_below(join(path, field.name))]
        return [TAGS, len(looked_at), *looked_at]


class _Request(Layout):
    """The operations that collect values from a request."""

    def __init__(
        self,
        title: str,
        version: int,
        flexible: bool,
        paths: frozenset[str],
        special: Mapping[str, list[int]],
        records: int,
    ) -> None:
        super().__init__(title, version, flexible, paths)
        self.special = special
        self._records = records  # the operation for record batches

    def of_primitive(self, type_: str, path: str, compact: bool, nullable: int) -> list[int]:
        if type_ == "records":
            return [self._records, COMPACT if compact else 4, nullable]
        return super().of_primitive(type_, path, compact, nullable)

    def operations_at(self, path: str) -> tuple[int, int]:
        return (ID, NAME) if path in self.wanted else (SKIP, TEXT)

    def of_tags(self, tagged: list[Field], path: str) -> list[int]:
        return NO_TAGS
