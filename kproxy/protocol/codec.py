"""Kafka messages between bytes and dicts, and the partial reads that the relay needs, compiled from the schema.

A frame is bytes without the 4-byte size. A message is a dict keyed by the schema's field names: `bytes` for bytes and
records, `uuid.UUID` for uuid, None for null. A tagged field has a key only if it is on the wire. Two keys are reserved:
`_tags` holds the unknown tagged fields of a struct, {tag: bytes}, and `_trailing` holds the bytes after a body (some
clients send them, and brokers ignore them). Both are written again. When encoding, a missing key means the default.

Invalid bytes raise Malformed. An API, version or message that the schema lacks raises Unsupported. No other exception
is raised, and no length on the wire causes an allocation by itself. Decoding rejects content that would not survive a
round trip (text that is not UTF-8, a repeated tag). The partial reads check only the fields that they need, and accept
what brokers accept.

Partial reads take (buffer, start, end): `start` is the byte after the correlation id, `end` is the end of the frame or
of the part that has arrived. The buffer may continue after `end`. Bytes beyond `end` may be read, since a check per
field would cost more than the read itself, but they are never trusted: a position past `end` voids the result.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from struct import error as struct_error
from typing import Any, TypeVar, cast

from kproxy.errors import Malformed, ProtocolError, Unsupported
from kproxy.protocol.apis import API_VERSIONS, UNSUPPORTED_VERSION
from kproxy.protocol.plans import SLICE_BYTES, TRAILING, Length, Walk, join
from kproxy.protocol.primitives import Buffer
from kproxy.protocol.schema import Field, Message, address_path, schema
from kproxy.protocol.shown.misfits import misfit
from kproxy.protocol.write_plans import Write

Span = tuple[int, int, int]  # (index of the path, or TAG_SIZE; start; end) as offsets in the buffer
TAG_SIZE = -1

_LAST_CLASSIC_API_VERSIONS = 2  # newer ones are flexible
_HEADER_BYTES = 4  # of ApiVersions responses: the correlation id, in every version
_CLIENT_ID = "header.clientId"
_MOST_FLAT_SLICES = 3  # a long token or text ends one slice, and so may a tagged field of a later release after it
_MISFITS = (AttributeError, TypeError, ValueError, ArithmeticError, struct_error)  # raised for values of a wrong type

Body = dict[str, Any]
Header = dict[str, Any]

T = TypeVar("T")
# Work done in slices: it yields between two slices, and returns its result.
Slices = Generator[None, None, T]


def at_once(slices: Slices[T]) -> T:
    """Run all slices and return the result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def decode_request(frame: Buffer) -> tuple[Header, Body]:
    """Decode a request frame without its size; returns (header, body), dicts by the field names of Kafka's messages.

    Values are int, float, bool, str, bytes, uuid.UUID, lists and dicts of these, and None for null; times are in
    Kafka's units, mostly milliseconds. A tagged field has a key only if it was sent. Raises Malformed if the bytes do
    not match the API and version in them, Unsupported for an unknown API or version. Format:
    https://kafka.apache.org/protocol
    """
    try:
        return _decode_request(frame)
    except (Malformed, Unsupported) as fault:
        raise _hinting_at_size(frame, fault) from None


def _decode_request(frame: Buffer) -> tuple[Header, Body]:
    if len(frame) < 4:
        raise Malformed(f"a request of {len(frame)} bytes: too short for an API key and a version")
    api_key = int.from_bytes(frame[0:2], "big", signed=True)
    version = int.from_bytes(frame[2:4], "big", signed=True)
    header_version = api_message(api_key, version, "request").header_version(version)
    header, pos = _reader("RequestHeader", header_version)(frame, 0, len(frame))
    return header, _body(_reader((api_key, "request"), version), frame, pos)


def decode_response(frame: Buffer, api_key: int, api_version: int) -> tuple[Header, Body]:
    """Decode a response frame without its size, by the API key and version of its request; returns (header, body).

    Values, faults and format are those of `decode_request`.
    """
    if api_key == API_VERSIONS and is_unsupported_version(frame, _HEADER_BYTES, len(frame)):
        api_version = min(api_version, schema().apis[API_VERSIONS].response.versions[-1])
    header_version = api_message(api_key, api_version, "response").header_version(api_version)
    try:
        header, pos = _reader("ResponseHeader", header_version)(frame, 0, len(frame))
        if api_key == API_VERSIONS:
            api_version = api_versions_version(frame, pos, len(frame), api_version)
        return header, _body(_reader((api_key, "response"), api_version), frame, pos)
    except Malformed as fault:
        raise _hinting_at_size(frame, fault) from None


def _hinting_at_size(frame: Buffer, fault: ProtocolError) -> ProtocolError:
    """Return the fault, with a hint if the frame begins with its own size, as on a socket."""
    if len(frame) > 4 and int.from_bytes(frame[:4], "big") == len(frame) - 4:
        return Malformed(f"{fault}; the frame begins with its own size: leave these 4 bytes out")
    return fault


def decode_flat_request(frame: Buffer) -> tuple[Header, Body]:
    """Like `decode_request`, for an API whose requests have few elements, in bounded time; Malformed if there are many.

    Further elements could only be unknown tagged fields, and a few MiB of these take seconds to decode.
    """
    slices = _request_in_slices(frame)
    for _ in range(_MOST_FLAT_SLICES):
        try:
            next(slices)
        except StopIteration as end:
            decoded: tuple[Header, Body] = end.value
            return decoded
    raise Malformed(f"a request of {len(frame)} bytes with more tagged fields than its API has")


def request_in_slices(frame: Buffer) -> Slices[Body]:
    """Return the body of a request, like `decode_request`. Raises Malformed or Unsupported."""
    _, body = yield from _request_in_slices(frame)
    return body


def _request_in_slices(frame: Buffer) -> Slices[tuple[Header, Body]]:
    if len(frame) < 4:
        raise Malformed(f"a request of {len(frame)} bytes: too short for an API key and a version")
    api_key = int.from_bytes(frame[0:2], "big", signed=True)
    version = int.from_bytes(frame[2:4], "big", signed=True)
    header_version = api_message(api_key, version, "request").header_version(version)
    header, pos = yield from _sliced_reader("RequestHeader", header_version)(frame, 0, len(frame))
    body, pos = yield from _sliced_reader((api_key, "request"), version)(frame, pos, len(frame))
    if pos < len(frame):
        body[TRAILING] = bytes(frame[pos:])
    return header, body


def decoded_in_slices(frame: Buffer, api_key: int, api_version: int) -> Slices[tuple[Header, Body]]:
    """Decode a response other than ApiVersions, like `decode_response`. Raises the same faults."""
    header_version = api_message(api_key, api_version, "response").header_version(api_version)
    header, pos = yield from _sliced_reader("ResponseHeader", header_version)(frame, 0, len(frame))
    body, pos = yield from _sliced_reader((api_key, "response"), api_version)(frame, pos, len(frame))
    if pos < len(frame):
        body[TRAILING] = bytes(frame[pos:])
    return header, body


def response_in_slices(api_key: int, api_version: int, header: Header, body: Body) -> Slices[bytes]:
    """Encode like `encode_response`. Raises the same faults."""
    header_version = api_message(api_key, api_version, "response").header_version(api_version)
    head = _writer("ResponseHeader", header_version)(header)
    written = yield from _sliced_writer((api_key, "response"), api_version)(body)
    return bytes(head + written)


def decode_data(name: str, frame: Buffer) -> tuple[Header, Body]:
    """Decode a message that is neither request nor response; returns (header, body).

    The leading int16 (int32 for Streams) is its version, or the record type if the message is the key of a log record.
    Raises Malformed or Unsupported.
    """
    message = _message(name)
    size = message.version_bytes
    if len(frame) < size:
        raise Malformed(f"{name}: {len(frame)} bytes, too short for a version")
    prefix = int.from_bytes(frame[0:size], "big", signed=True)
    if message.role != "key":
        return {"version": prefix}, _body(_reader(name, prefix), frame, size)
    if prefix != message.record_type:
        raise Unsupported(f"{name} is record type {message.record_type}, not {prefix}")
    return {"recordType": prefix}, _body(_reader(name, message.versions[-1]), frame, 2)


def encode_request(header: Header, body: Body) -> bytes:
    """Encode a request frame without its size, the inverse of `decode_request`.

    The header has its API and version (`requestApiKey`, `requestApiVersion`); other fields missing in it, or in the
    body, get their defaults. Raises Malformed for values that do not fit and names that the message lacks, Unsupported
    for an unknown API or version.
    """
    try:
        api_key, version = header["requestApiKey"], header["requestApiVersion"]
    except (KeyError, TypeError):
        raise Malformed("a request's header is a dict with requestApiKey and requestApiVersion at least") from None
    header_version = api_message(api_key, version, "request").header_version(version)
    return bytes(_writer("RequestHeader", header_version)(header) + _writer((api_key, "request"), version)(body))


def framed_request(api_key: int, version: int, correlation_id: int, client_id: str, body: Body) -> bytes:
    """Return a request of our own with its 4-byte size. Raises as `encode_request` does."""
    header = {
        "requestApiKey": api_key,
        "requestApiVersion": version,
        "correlationId": correlation_id,
        "clientId": client_id,
    }
    frame = encode_request(header, body)
    return len(frame).to_bytes(4, "big") + frame


def encode_response(api_key: int, api_version: int, header: Header, body: Body) -> bytes:
    """Encode a response frame without its size, the inverse of `decode_response`. Raises as `encode_request` does."""
    header_version = api_message(api_key, api_version, "response").header_version(api_version)
    return bytes(_writer("ResponseHeader", header_version)(header) + _writer((api_key, "response"), api_version)(body))


def data_in_slices(name: str, frame: Buffer) -> Slices[Body]:
    """Return the body of a message that begins with its version, like `decode_data`. Raises the same faults."""
    size = _message(name).version_bytes
    if len(frame) < size:
        raise Malformed(f"{name}: {len(frame)} bytes, too short for a version")
    read = _sliced_reader(name, int.from_bytes(frame[0:size], "big", signed=True))
    body, pos = yield from read(frame, size, len(frame))
    if pos < len(frame):
        body[TRAILING] = bytes(frame[pos:])
    return body


def encoded_in_slices(name: str, version: int, body: Body) -> Slices[bytes]:
    """Encode a message that begins with its version, like `encode_data`. Raises the same faults."""
    written = yield from _sliced_writer(name, version)(body)
    return version.to_bytes(_message(name).version_bytes) + written


def encode_data(name: str, version: int, body: Body) -> bytes:
    """Encode a message that is neither request nor response; the inverse of `decode_data`."""
    message = _message(name)
    prefix = version if message.role != "key" or message.record_type is None else message.record_type
    return prefix.to_bytes(message.version_bytes, "big", signed=True) + _writer(name, version)(body)


@cache
def response_scan(
    api_key: int, version: int
) -> Callable[[Buffer, int, int], tuple[int, int | None, tuple[int, ...], bool]]:
    """Compile scan(buffer, start, end) -> (throttle_ms, error_code, errors, carries_addresses) of a whole response.

    throttle_ms: milliseconds; -1 where the version has none.
    error_code: the top level's if the version has one there, else the first that is not 0, else None.
    errors: every code other than 0, at all levels, in wire order.
    carries_addresses: whether a structure of schema.ADDRESS_CARRIERS is present and not empty.

    Trailing bytes are allowed. Raises Malformed.
    """
    message = api_message(api_key, version, "response")
    scan = _Scan(message, version, address_path(api_key, version)).plan()
    if api_key != API_VERSIONS or version == 0:
        return scan
    downgraded = response_scan(api_key, 0)

    def scan_api_versions(buffer: Buffer, start: int, end: int) -> tuple[int, int | None, tuple[int, ...], bool]:
        plan = downgraded if api_versions_version(buffer, start, end, version) == 0 else scan
        return plan(buffer, start, end)

    return scan_api_versions


@cache
def request_prefix(
    api_key: int, version: int, fields: tuple[str, ...]
) -> Callable[[Buffer, int, int], tuple[tuple[Any, ...], int] | None]:
    """Compile prefix(buffer, start, end) -> ((client id, *fields), stop), which reads no byte from `stop` on.

    The fields are untagged ones of the body's top level. A field that the version lacks is None, and so is the client
    id where the header has none. The same bytes before `stop` give the same values. Returns None while some field is
    not completely before `end`; a complete frame is truncated then. Text that is not UTF-8 is read with replacement
    characters. Raises Malformed.
    """
    message = api_message(api_key, version, "request")
    return _Prefix(message, version, fields).plan()


@cache
def locate(api_key: int, version: int, side: str, paths: tuple[str, ...]) -> Callable[[Buffer, int, int], list[Span]]:
    """Compile locate(buffer, start, end) -> the spans of these paths in a whole "request" or "response".

    A path is field names joined by dots ("brokers.host"); a path that ends in "[]" means each element of an array
    ("apiKeys[]"). A span (i, s, e) means that buffer[s:e] is an occurrence of paths[i], including its length prefix
    (classic or compact, as the version has it) or null marker. A path that the version lacks has no spans. Spans are
    ordered by their end: inner spans come before the span around them.

    A span (TAG_SIZE, s, e) means that buffer[s:e] is the size varint of a tagged field on one of the paths, and that
    the field's content is buffer[e:e + size]. A change of the size of anything inside requires a rewrite of that
    varint, which may itself grow. It comes before all spans inside the field. No other length in a body depends on the
    size of its content; outside the body only the frame's size does.

    Trailing bytes are allowed. Raises Malformed.
    """
    message = api_message(api_key, version, side)
    plan = _Locate(message, version, side, paths).plan()
    if api_key != API_VERSIONS or version == 0 or side != "response":
        return plan
    downgraded = locate(api_key, 0, side, paths)

    def locate_api_versions(buffer: Buffer, start: int, end: int) -> list[Span]:
        return (downgraded if api_versions_version(buffer, start, end, version) == 0 else plan)(buffer, start, end)

    return locate_api_versions


@cache
def locate_in_slices(
    api_key: int, version: int, side: str, paths: tuple[str, ...]
) -> Callable[[Buffer, int, int], Slices[list[Span]]]:
    """Compile the same as `locate`, as a generator. Refuses ApiVersions, whose responses may have another version."""
    if api_key == API_VERSIONS:
        raise Unsupported("ApiVersions is not read in slices")
    plan = _Locate(api_message(api_key, version, side), version, side, paths)
    plan.sliced = True
    read: Any = plan.plan()
    return cast(Callable[[Buffer, int, int], Slices[list[Span]]], read)


def is_unsupported_version(buffer: Buffer, start: int, end: int) -> bool:
    """Return whether the ApiVersions response with the body buffer[start:end] is error 35, first in every version."""
    return end - start >= 2 and int.from_bytes(buffer[start : start + 2], "big") == UNSUPPORTED_VERSION


def scan_unknown_api_versions(buffer: Buffer, start: int, end: int) -> tuple[int, int | None, tuple[int, ...], bool]:
    """Scan the response to an ApiVersions request of a version that the schema lacks, like `response_scan`.

    Only error 35 (UNSUPPORTED_VERSION) is read: the broker does not know the version either.
    """
    if is_unsupported_version(buffer, start, end):
        return -1, UNSUPPORTED_VERSION, (UNSUPPORTED_VERSION,), False
    return -1, None, (), False


def api_versions_version(buffer: Buffer, start: int, end: int, version: int) -> int:
    """Return the version of the ApiVersions response with the body buffer[start:end] to a request of `version`.

    A broker that does not support that version answers error 35 in version 0 (KIP-511), librdkafka's mock broker in the
    requested version. Like Kafka's client, this tries the requested version first, then version 0.
    """
    if not is_unsupported_version(buffer, start, end):
        return version
    if version > _LAST_CLASSIC_API_VERSIONS:  # in version 0 the first byte of a count, where it is invalid
        return version if end - start > 2 and buffer[start + 2] else 0
    count = int.from_bytes(buffer[start + 2 : start + 6], "big")
    throttle_at = start + 6 + 6 * count  # three int16 each
    return version if throttle_at + 4 <= end else 0


def _message(name: str) -> Message:
    message = schema().data.get(name)
    if message is None:
        raise Unsupported(f"no message is called {name}")
    return message


def api_message(api_key: int, version: int, side: str) -> Message:
    try:
        api = schema().apis.get(api_key)
    except TypeError:  # a list, a dict
        api = None
    if api is None:
        raise Unsupported(f"API key {api_key!r} is not known; known are 0 to {max(schema().apis)}")
    return _of_version(api.request if side == "request" else api.response, version, api.name)


def _of_version(message: Message, version: int, name: str) -> Message:
    if version not in message.versions:
        known = f"{message.versions[0]} to {message.versions[-1]}"
        raise Unsupported(f"{name} version {version!r} is not known; known are {known}")
    return message


def _layout(what: str | tuple[int, str], version: int) -> Message:
    if isinstance(what, tuple):
        return api_message(what[0], version, what[1])
    return _of_version(_message(what), version, what)


@cache
def _reader(what: str | tuple[int, str], version: int) -> Callable[[Buffer, int, int], tuple[Body, int]]:
    return _Read(_layout(what, version), version).plan()


@cache
def _sliced_reader(what: str | tuple[int, str], version: int) -> Callable[[Buffer, int, int], Slices[tuple[Body, int]]]:
    plan = _Read(_layout(what, version), version)
    plan.sliced = True
    read: Any = plan.plan()
    return cast(Callable[[Buffer, int, int], Slices[tuple[Body, int]]], read)


@cache
def _writer(what: str | tuple[int, str], version: int) -> Callable[[Body], bytearray]:
    message = _layout(what, version)
    title = f"{message.name} v{version}"
    plan = Write(title, version, version in message.flexible_versions).plan(message.fields)

    def write(values: Body) -> bytearray:
        try:
            return plan(values)
        except _MISFITS as fault:
            raise Malformed(f"{title}: {misfit(message.fields, version, values) or fault}") from None

    return write


@cache
def _sliced_writer(what: str | tuple[int, str], version: int) -> Callable[[Body], Slices[bytearray]]:
    message = _layout(what, version)
    title = f"{message.name} v{version}"
    plan: Any = Write(title, version, version in message.flexible_versions, sliced=True).plan(message.fields)

    def write(values: Body) -> Slices[bytearray]:
        try:
            written: bytearray = yield from plan(values)
        except _MISFITS as fault:
            raise Malformed(f"{title}: {misfit(message.fields, version, values) or fault}") from None
        return written

    return write


def _body(read: Callable[[Buffer, int, int], tuple[Body, int]], frame: Buffer, pos: int) -> Body:
    body, pos = read(frame, pos, len(frame))
    if pos < len(frame):
        body[TRAILING] = bytes(frame[pos:])
    return body


class Plan(Walk):
    """A walk over a message that translates a read past the buffer into Malformed."""

    def __init__(self, message: Message, version: int, wanted: Iterable[str] = ()) -> None:
        flexible = version in message.flexible_versions
        super().__init__(f"{message.name} v{version}", version, flexible, wanted)
        self.message = message

    def header(self, side: str) -> None:
        """Walk the header's fields after the correlation id."""
        header = _message("RequestHeader" if side == "request" else "ResponseHeader")
        names = [field.name for field in header.fields]
        body = self.version, self.flexible
        self.version = self.message.header_version(self.version)
        self.flexible = self.version in header.flexible_versions
        self.struct(header.fields[names.index("correlationId") + 1 :], "header")
        self.version, self.flexible = body

    @contextmanager
    def translated(self) -> Iterator[None]:
        with self.block("try:"):
            self.line("pos = start")
            if self.sliced:
                self.line(f"mark = pos + {SLICE_BYTES}")
            yield
            self.settle()
        with self.block("except (IndexError, struct_error):"):
            self.cut()


class _Read(Plan):
    """plan(buffer, start, end) -> (dict, pos)"""

    walks_all_tags = True

    def keeps(self, path: str) -> bool:
        return True

    def looks_below(self, path: str) -> bool:
        return True

    def members(self, values: dict[str, str]) -> str:
        self.settle()
        var = self.fresh("d")
        self.line(f"{var} = {{{', '.join(f'{name!r}: {value}' for name, value in values.items())}}}")
        return var

    def plan(self) -> Callable[[Buffer, int, int], tuple[Body, int]]:
        with self.translated():
            value = self.struct(self.message.fields, "")
        with self.block("except UnicodeDecodeError:"):
            self.line(f"raise Malformed({self.title + ': text that is not UTF-8'!r}) from None")
        self.short("pos > end")
        self.line(f"return {value}, pos")
        return self.function("buffer, start, end")


class _Scan(Plan):
    """plan(buffer, start, end) -> (throttle_ms, error_code, errors, carries_addresses)"""

    def __init__(self, message: Message, version: int, carrier: str | None) -> None:
        paths = (path for path in paths_of(message.fields, version) if is_noted(path))
        super().__init__(message, version, (*paths, carrier) if carrier else paths)
        self.carrier = carrier

    def keeps(self, path: str) -> bool:
        return is_noted(path)

    def kept(self, field: Field, path: str, var: str) -> None:
        if path == "throttleTimeMs":
            self.after(f"throttle = {var}")
        else:
            if path == "errorCode":
                self.after(f"error = {var}")
            self.after(f"if {var}: errors.append({var})")

    def counted(self, path: str, length: Length) -> None:
        if path == self.carrier:
            self.line(f"if {length.is_some}: addresses = True")

    def plan(self) -> Callable[[Buffer, int, int], tuple[int, int | None, tuple[int, ...], bool]]:
        self.line("throttle = -1")
        self.line("error = None")
        self.line("errors = []")
        self.line(f"addresses = {self.carrier == ''}")
        with self.translated():
            self.header("response")
            self.struct(self.message.fields, "")
        self.short("pos > end")
        with self.block("if errors:"):
            top_level = "errorCode" in self.wanted
            self.line(f"return throttle, {'error' if top_level else 'errors[0]'}, tuple(errors), addresses")
        self.line("return throttle, error, (), addresses")
        return self.function("buffer, start, end")


class _Prefix(Plan):
    """plan(buffer, start, end) -> ((client id, *fields), stop) or None

    A fault counts only if all bytes that caused it are before `end`: later bytes belong to something else.
    """

    utf8 = "replace"
    walks_all_tags = True

    def __init__(self, message: Message, version: int, fields: tuple[str, ...]) -> None:
        super().__init__(message, version, (_CLIENT_ID, *fields))
        self.fields = fields
        self.values: dict[str, str] = {}

    def kept(self, field: Field, path: str, var: str) -> None:
        self.values[path] = var

    def short(self, condition: str) -> None:
        self.line(f"if {condition}: return None")

    def tag_loop(self, count: str, looked_at: list[Field], path: str, var: str | None) -> None:
        with self.block(f"for _ in range({count}):"):  # a tag takes at least two bytes
            self.line("tag, size = buffer[pos], buffer[pos + 1]")
            self.line("if tag < 128 > size: pos += 2 + size")
            with self.block("else:"):
                self.line("tag, pos = uvarint(buffer, pos)")
                self.line("size, pos = uvarint(buffer, pos)")
                self.line("pos += size")
            self.short("pos > end")

    def plan(self) -> Callable[[Buffer, int, int], tuple[tuple[Any, ...], int] | None]:
        plain = [field for field in self.message.fields_of(self.version) if self.version not in field.tagged_versions]
        names = [field.name for field in plain]
        needed = max((names.index(name) + 1 for name in self.fields if name in names), default=0)
        with self.block("try:"):
            self.line("pos = start")
            self.header("request")
            for field in plain[:needed]:
                self.field(field, field.name)
            self.settle()
        with self.block("except (IndexError, struct_error):"):
            self.line("return None")
        with self.block("except Malformed:"):
            self.line("if pos + 5 > end: return None")  # the last varint read has at most five bytes
            self.line("raise")
        self.short("pos > end")
        values = (self.values.get(path) or "None" for path in (_CLIENT_ID, *self.fields))
        self.line(f"return ({', '.join(values)},), pos")
        return self.function("buffer, start, end")


class _Locate(Plan):
    """plan(buffer, start, end) -> spans"""

    def __init__(self, message: Message, version: int, side: str, paths: tuple[str, ...]) -> None:
        super().__init__(message, version, paths)
        self.side = side
        self.index = {path: index for index, path in enumerate(paths)}

    def keeps(self, path: str) -> bool:
        return False

    def before(self, path: str) -> None:
        if path in self.index:
            self.settle()
            self.line(f"begin{self.index[path]} = pos")

    def behind(self, path: str) -> None:
        if path in self.index:
            self.settle()
            self.line(f"spans.append(({self.index[path]}, begin{self.index[path]}, pos))")

    def tag_sized(self, start: str) -> None:
        self.line(f"spans.append(({TAG_SIZE}, {start}, pos))")

    def plan(self) -> Callable[[Buffer, int, int], list[Span]]:
        self.line("spans = []")
        with self.translated():
            self.header(self.side)
            self.struct(self.message.fields, "")
        self.short("pos > end")
        self.line("return spans")
        return self.function("buffer, start, end")


def is_noted(path: str) -> bool:
    return path == "throttleTimeMs" or path.endswith(("errorCode", "ErrorCode"))


def paths_of(fields: tuple[Field, ...], version: int, above: str = "") -> Iterator[str]:
    for field in fields:
        if version in field.versions:
            path = join(above, field.name)
            yield path
            yield from paths_of(field.fields, version, path)
