"""Frames from hex or binary to decoded messages, and these as JSON: the work of `kproxy decode`.

Duty: find the bytes in the input (hex or binary, with the size prefix or without), decode them as the requested
message, and render that as JSON. The machine form is a contract: one JSON object per line, in and out, bodies exactly
as Kafka's own converters render them, each fault an {"error": ...} of its line. The form for readers is `views.decode`.

Memory: one frame and its decoded form, or one line and a record of its answer.
"""

import json
import mmap
import re
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from struct import Struct
from typing import Any, BinaryIO

from kproxy.errors import Malformed, ProtocolError, Unsupported
from kproxy.protocol.codec import decode_data, decode_request, decode_response
from kproxy.protocol.compression import codec_name
from kproxy.protocol.primitives import Buffer
from kproxy.protocol.records import Batch, Record, read_batches
from kproxy.protocol.schema import Message, api_name, schema
from kproxy.protocol.shown.literals import bytes_of_literal
from kproxy.protocol.shown.render import render
from kproxy.protocol.shown.secrets import redact

Json = dict[str, Any]


@dataclass(frozen=True)
class Decoded:
    title: str
    message: Message
    header_message: Message | None
    header: dict[str, Any]
    body: dict[str, Any]
    size_bytes: int


# ----------------------------------------------------------------------------------------------------------- the bytes

# A line of a dump: its offset, pairs of digits, and after two blanks (xxd, tcpdump), three (tshark) or a bar the text.
_DUMPED = re.compile(
    rb"\s*(?:0x)?(?P<offset>[0-9a-fA-F]{4,8})"  # tcpdump writes 0x
    rb"(?::\s+(?P<of_xxd>(?:[0-9a-fA-F]{2}){1,2}(?: (?:[0-9a-fA-F]{2}){1,2})*)(?:  .*)?"
    rb"|(?:\s+(?P<of_others>[0-9a-fA-F]{2}(?: {1,2}[0-9a-fA-F]{2})*)(?:(?: {3}|\s+[|>]).*)?)?)\s*"
)
# A line of 16-bit words, as hexdump and od -x print them without further options.
_WORDS = re.compile(rb"\s*(?P<offset>[0-9a-fA-F]{6,8})(?P<words>(?:\s+[0-9a-fA-F]{4})*)\s*")
_BASES = (16, 8, 10)  # of the offsets of a dump: od's are octal, or decimal with -A d
_HEX = re.compile(rb"[0-9A-Fa-f\s:,]*")
_PREFIXED = re.compile(rb"[0-9A-Fa-f\s:,xX\\]*")  # digits with 0x or \x before them, as in source code
_ONE_DIGIT = re.compile(rb"(?:(?<![0-9A-Fa-f])0[xX]|\\x)([0-9A-Fa-f])(?![0-9A-Fa-f])")
_PREFIXES = re.compile(rb"(?<![0-9A-Fa-f])0[xX]|\\x")
_FOREIGN = re.compile(rb"[^0-9A-Fa-f\s:,xX\\]|(?<![0\\])[xX]|(?<=[0-9A-Fa-f]0)[xX]|\\(?!x)")  # in no such text
_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]+")
_COMPRESSED = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")  # gzip, zstd, lz4
_NOT_HEX = re.compile(rb"[\s:,]+")
_HEAD = Struct(">hhi")  # API key, version and correlation id of a request
_LEAST_FRAME_BYTES = 4  # a response without a body
_SHOWN_CHARS = 40
_PCAPNG = (b"\n\r\r\n",)
_PCAP = tuple(bytes.fromhex(magic) for magic in ("a1b2c3d4", "d4c3b2a1", "a1b23c4d", "4d3cb2a1"))


def contents(file: BinaryIO) -> Buffer:
    """Return the content of a file, mapped if possible: a log segment may have a gigabyte."""
    try:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return file.read()


def bytes_of(given: Buffer, *, must_be_hex: bool = False) -> Buffer:
    """Return the bytes of hexadecimal digits; other input unchanged.

    Blanks, line breaks, colons, commas, 0x and \\x are skipped, and a byte order mark, as PowerShell writes it; so
    are the offsets and characters of a dump by xxd, `hexdump -C`, od or tshark. Literals of source code are read, see
    `bytes_of_literal`, and base64 if its first byte is zero, as that of a frame is. Raises Malformed for an odd number
    of digits, for a dump of 16-bit words, and with `must_be_hex` for any other input.
    """
    unmarked = _without_mark(given)
    if is_text(unmarked) and (content := bytes_of_literal(bytes(unmarked))) is not None:
        return content
    text = _without_prefixes(_without_offsets(unmarked))
    if _HEX.fullmatch(text) is None:
        if (content := _of_base64(text)) is not None:
            return content
        if must_be_hex:
            shown = bytes(text).decode(errors="replace")
            place = found.start() if (found := _FOREIGN.search(text)) else 0
            where = f"{_shown(shown[place])} in {_shown(shown)}"
            raise Malformed(f"not hexadecimal: {where}; binary frames come by --file or standard input")
        return given
    digits = _NOT_HEX.sub(b"", bytes(text))
    if len(digits) % 2:
        digit = "1 hexadecimal digit" if len(digits) == 1 else f"{len(digits)} hexadecimal digits"
        raise Malformed(f"{digit}: a byte is two of them, so one is missing")
    return bytes.fromhex(digits.decode())


def _without_mark(given: Buffer) -> Buffer:
    """The ASCII characters of a text that begins with a byte order mark; other input unchanged."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if given[: len(mark)] == mark:
            with suppress(UnicodeError):
                return bytes(given[len(mark) :]).decode(encoding).encode("ascii")
    return given


def _without_offsets(given: Buffer) -> Buffer:
    """The hexadecimal digits of a dump whose lines begin with the offsets of their bytes; other input unchanged.

    Raises Malformed for a dump of 16-bit words: the order of their bytes is that of the machine which printed them.
    """
    if not is_text(given):
        return given
    lines = bytes(given).splitlines()
    if len(lines) < 2 and _HEX.fullmatch(given) is not None:
        return given  # its first digits are no offset
    for base in _BASES:
        if (digits := _dumped(lines, base)) is not None:
            return digits
        if _is_of_words(lines, base):
            raise Malformed("a dump of 16-bit words, in the byte order of its machine: print bytes, as xxd -p does")
    return given


def _dumped(lines: list[bytes], base: int) -> bytes | None:
    """The hexadecimal digits of a dump with offsets in this base; None for other lines."""
    parts, size = [], 0
    for line in lines:
        found = _DUMPED.fullmatch(line)
        if found is None or _offset(found["offset"], base) != size:
            return None
        parts.append(digits := b"".join((found["of_xxd"] or found["of_others"] or b"").split()))
        size += len(digits) // 2
    return b"".join(parts)


def _is_of_words(lines: list[bytes], base: int) -> bool:
    """Whether the lines are 16-bit words behind their offsets in this base; the last offset is that of the end."""
    size = 0
    for number, line in enumerate(lines):
        found = _WORDS.fullmatch(line)
        ends = (size - 1, size) if number == len(lines) - 1 else (size,)  # a last single byte is a word too
        if found is None or _offset(found["offset"], base) not in ends:
            return False
        size += 2 * len(found["words"].split())
    return len(lines) > 1


def _offset(digits: bytes, base: int) -> int | None:
    with suppress(ValueError):
        return int(digits, base)
    return None


def _of_base64(given: Buffer) -> bytes | None:
    """The bytes of a text in base64 whose first byte is zero, as that of a frame and of a log is; None for others."""
    if not is_text(given):
        return None
    with suppress(ValueError):
        content = b64decode(b"".join(bytes(given).split()), validate=True)
        return content if content[:1] == b"\0" else None
    return None


def _without_prefixes(given: Buffer) -> Buffer:
    """Hexadecimal digits without 0x and \\x, behind which one digit may stand for a byte; other input unchanged."""
    if _HEX.fullmatch(given) is not None or _PREFIXED.fullmatch(given) is None:
        return given
    return _PREFIXES.sub(b"", _ONE_DIGIT.sub(rb"0\1", given))


def count_bytes(count: int) -> str:
    """Return a number of bytes as text: "1 byte", "1,234 bytes"."""
    return f"{count:,} byte{'s' * (count != 1)}"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]!r}..."


def is_capture(given: Buffer) -> bool:
    """Whether the bytes begin like a pcap or pcapng file."""
    head = bytes(given[:8])
    return head[:4] in _PCAPNG or (head[:4] in _PCAP and head[4:8] in (b"\x02\0\x04\0", b"\0\x02\0\x04"))


def is_compressed(given: Buffer) -> bool:
    """Whether the bytes begin like a gzip, zstd or lz4 file; no frame does."""
    return bytes(given[:4]).startswith(_COMPRESSED)


def is_text(given: Buffer) -> bool:
    """Whether all bytes are printable ASCII; a frame has a zero byte in its header."""
    return _TEXT.fullmatch(given) is not None


def sized_frames(given: Buffer) -> list[Buffer] | None:
    """Return the frames, if the input consists of frames with 4-byte sizes from end to end, or None."""
    frames, pos = [], 0
    while pos < len(given):
        size = int.from_bytes(given[pos : pos + 4], "big", signed=True)
        pos += 4
        if not _LEAST_FRAME_BYTES <= size <= len(given) - pos:
            return None
        frames.append(given[pos : pos + size])
        pos += size
    return frames or None


# --------------------------------------------------------------------------------------------------------- the message


def frames(given: Buffer, sized: bool | None, how: Callable[[Buffer], "Decoded"]) -> list["Decoded"]:
    """Decode one frame, or several with sizes; `sized` None: with sizes if they fit from end to end, else without."""
    with_sizes = None if sized is False else sized_frames(given)
    if with_sizes is None:
        if sized:
            raise Malformed(f"not whole frames, each behind its 4-byte size, in input of {count_bytes(len(given))}")
        return [how(given)]
    try:
        return [how(frame) for frame in with_sizes]
    except ProtocolError as fault:
        if not sized:
            with suppress(ProtocolError):
                return [how(given)]
        raise fault


def decoded(
    given: Buffer, *, sized: bool | None = None, response_to: str | None = None, data_name: str | None = None
) -> Iterator[Decoded]:
    """Decode frames as requests, as responses to API:VERSION, or as messages of another kind by name.

    Yields the whole frames before a fault, then raises Malformed or Unsupported. `sized`: see `frames`.
    """
    if data_name is not None:
        yield from frames(given, sized, lambda frame: data(frame, data_name))
        return
    key, version = (None, 0) if response_to is None else api_and_version(response_to)

    def how(frame: Buffer) -> Decoded:
        return request(frame) if key is None else response(frame, key, version)

    found: list[Decoded] = []
    fault: ProtocolError | None = None
    try:
        found = frames(given, sized, how)
        may_misfit = len(found) == 1 and found[0].size_bytes == len(given) and "_trailing" in found[0].body
    except ProtocolError as raised:
        fault, may_misfit = raised, key is None or isinstance(raised, Malformed)
    if sized is not False and may_misfit:
        misfit = _misfit(given) if key is None else _misfit_of_response(given, str(fault), key, version)
        if misfit is not None and (fault is not None or misfit.pos):
            yield from frames(given[: misfit.pos], True, how) if misfit.pos else ()
            raise Malformed(misfit.text) from None
    if fault is not None and key is None:
        raise type(fault)(f"as a request: {fault}; an answer needs --response API:VERSION") from None
    if fault is not None:
        raise fault
    yield from found


@dataclass(frozen=True)
class _Misfit:
    """The first frame that does not match its size: where it begins, behind whole frames, and the fault as text."""

    pos: int
    text: str


def _misfit(given: Buffer) -> _Misfit | None:
    """Return the first request that does not match its size; None if the bytes do not begin with a size."""
    pos, number = 0, 1
    while pos < len(given):
        of_sized = _looks_like_request(given[pos + 4 :])
        size, here = int.from_bytes(given[pos : pos + 4], "big", signed=True), len(given) - pos - 4
        if number == 1 and (not of_sized or size < 0 or _is_bare(given, size, of_sized)):
            return None
        fault = _fault_of_request(given[pos + 4 :], size)
        if fault is not None:
            return _Misfit(pos, fault if number == 1 else f"request {number}: {fault}")
        if not of_sized or not 0 <= size <= here or not _is_request(given[pos + 4 : pos + 4 + size]):
            return _misfit_at(given, pos, number)
        pos, number = pos + 4 + size, number + 1
    return None


def _misfit_at(given: Buffer, pos: int, number: int) -> _Misfit | None:
    """Return how the request at a position, the one of this number, differs from its size."""
    size, here = int.from_bytes(given[pos : pos + 4], "big", signed=True), len(given) - pos - 4
    if number > 1 and (size < 0 or not _looks_like_request(given[pos + 4 :])):
        return _Misfit(pos, _no_frame("request", number - 1, here + 4))
    if size == here:
        return None
    key, version, correlation_id = _HEAD.unpack(bytes(given[pos + 4 : pos + 12]).ljust(_HEAD.size, b"\0"))
    with_id = f", correlation id {correlation_id}" if here >= _HEAD.size else ""
    where = f"request {number}: " if number > 1 else ""
    return _Misfit(pos, _sizes(where, size, here, f"{api_name(key)} request v{version}{with_id}"))


def _fault_of_request(rest: Buffer, size: int) -> str | None:
    """Return why a request whose size is right, since it ends where the input or another size begins, is not decoded.

    None if it is decoded, or if its size may be wrong.
    """
    if not _LEAST_FRAME_BYTES <= size <= len(rest) or not (size == len(rest) or _looks_like_request(rest[size + 4 :])):
        return None
    try:
        request(rest[:size])
    except ProtocolError as fault:
        return str(fault)
    return None


def _is_bare(given: Buffer, size: int, of_sized: int) -> bool:
    """Return whether the bytes look more like a request without its size than like one behind it."""
    return of_sized < _looks_like_request(given) or (of_sized == 1 and _may_be_api(size))


def _is_request(frame: Buffer) -> bool:
    try:
        request(frame)
    except ProtocolError:
        return False
    return True


def _no_frame(title: str, whole: int, size: int) -> str:
    """Return as text that bytes behind whole frames are no frame."""
    return (
        f"too long: what follows {whole} whole {title}{'s' * (whole > 1)}, {count_bytes(size)}, is no {title} "
        "with its size"
    )


def _misfit_of_response(given: Buffer, fault: str, key: int, version: int) -> _Misfit | None:
    """Return the first response that does not match its size; None if the bytes do not begin with a size.

    A correlation id may look like a size: without a whole response behind it, the text has both readings.
    """
    pos, number = 0, 1
    while True:
        size, here = int.from_bytes(given[pos : pos + 4], "big", signed=True), len(given) - pos - 4
        if not _LEAST_FRAME_BYTES <= size < here or not _is_response(given[pos + 4 : pos + 4 + size], key, version):
            break
        pos, number = pos + 4 + size, number + 1
    where = f"response {number}: " if number > 1 else ""
    is_whole = _is_response(given[pos + 4 :], key, version)
    if number > 1 and (here < 0 or size < 0):
        return _Misfit(pos, _no_frame("response", number - 1, here + 4))
    if size < 0 or size == here or here < 0:
        return None
    text = _sizes(where, size, here, f"{api_name(key)} response v{version}")
    if number > 1 or is_whole:
        return _Misfit(pos, text)
    return _Misfit(0, f"{fault}; with its first 4 bytes as its size: {text}") if size > here else None


def _is_response(frame: Buffer, key: int, version: int) -> bool:
    """Return whether the bytes are one whole response."""
    try:
        return not response(frame, key, version).body.get("_trailing")
    except ProtocolError:
        return False


def _sizes(where: str, size: int, here: int, title: str) -> str:
    """Return how a frame differs from its size, as text."""
    return (
        f"{where}{'cut short' if size > here else 'too long'}: the size says {count_bytes(size)}, {here:,} "
        f"follow{'s' * (here == 1)} it: {title}"
    )


def _may_be_api(size: int) -> bool:
    """Return whether a size reads as the API key and the small version of a request without one."""
    return size >> 16 > 0 and size & 0xFFFF < 256


def _looks_like_request(frame: Buffer) -> int:
    """Return 0 without a known API and version; 1 if the client id is truncated; 2 if it is complete.

    An unknown API or version counts if a client id of printable characters is behind it.
    """
    if len(frame) < 4:
        return 0
    key, version, _ = _HEAD.unpack(bytes(frame[: _HEAD.size]).ljust(_HEAD.size, b"\0"))
    client_id_bytes = int.from_bytes(frame[8:10], "big", signed=True)
    is_complete = len(frame) >= 10 and -1 <= client_id_bytes <= len(frame) - 10
    known = schema().apis.get(key)
    if known is None or version not in known.request.versions:
        has_name = is_complete and client_id_bytes > 0 and is_text(frame[10 : 10 + client_id_bytes])
        return 2 if has_name and key >= 0 <= version else 0
    return 2 if is_complete else 1


def api_and_version(text: str) -> tuple[int, int]:
    """Return (3, 12) for "Metadata:12" or "3:12". Raises Unsupported, with a suggestion for a similar name."""
    name, colon, version = text.rpartition(":")
    name = name if colon else text
    names = {api.name.lower(): api for api in schema().apis.values()}
    key = int(name) if name.isdecimal() else names[name.lower()].key if name.lower() in names else None
    if key is not None and colon and version.isdecimal():
        return key, int(version)
    fix = "give API:VERSION, like Metadata:12 or 3:12"
    if key is None and name:
        raise Unsupported(f"no API is called {name!r}{_like(name, [api.name for api in names.values()])}: {fix}")
    if key in schema().apis:
        versions = schema().apis[key].request.versions
        raise Unsupported(f"{text!r} has no version: {api_name(key)} has {versions[0]} to {versions[-1]}: {fix}")
    raise Unsupported(f"{text!r} names no API and version: {fix}")


def _like(name: str, known: list[str]) -> str:
    """Return a suggestion as text, if there is a similar name."""
    by_lower = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[found[0]]}?)" if found else ""


def request(frame: Buffer) -> Decoded:
    header, body = decode_request(frame)
    key, version = header["requestApiKey"], header["requestApiVersion"]
    message = schema().apis[key].request
    return Decoded(f"{api_name(key)} request v{version}", message, _data("RequestHeader"), header, body, len(frame))


def response(frame: Buffer, api_key: int, api_version: int) -> Decoded:
    header, body = decode_response(frame, api_key, api_version)
    message = schema().apis[api_key].response
    title = f"{api_name(api_key)} response v{api_version}"
    return Decoded(title, message, _data("ResponseHeader"), header, body, len(frame))


def data(frame: Buffer, name: str) -> Decoded:
    if name not in schema().data:
        raise Unsupported(f"no message is called {name!r}{_like(name, list(schema().data))}")
    header, body = decode_data(name, frame)
    return Decoded(name, _data(name), None, header, body, len(frame))


def _data(name: str) -> Message:
    return schema().data[name]


# ---------------------------------------------------------------------------------------------------- the machine form


def as_json(decoded: Decoded, *, show_secrets: bool) -> Json:
    header, body = decoded.header, render(decoded.message, decoded.body, reserved=True)
    if decoded.header_message is not None:
        header = render(decoded.header_message, header, reserved=True)
    if not show_secrets:
        body = redact(decoded.message.name, body, lambda value: "(masked)")
    return {"header": header, "body": body}


def _batch_as_json(batch: Batch) -> Json:
    header = batch.header
    return {
        "base_offset": batch.base_offset,
        "last_offset": header.last_offset,
        "producer_id": header.producer_id,
        "epoch": header.producer_epoch,
        "sequence": header.base_sequence,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
        "timestamp_type": header.timestamp_type,
        "crc_valid": batch.crc_valid,
        "magic": header.magic,
        "codec": codec_name(header.codec),
        "size": header.size_bytes,
        "crc": header.crc,
        "leader_epoch": header.leader_epoch,
        "last_sequence": header.last_sequence,
        "max_timestamp": header.max_timestamp,
        "delete_horizon": header.delete_horizon,
    }


def records_as_json(fragment: Buffer) -> Iterator[str]:
    """Yield the text of {"batches": ..., "trailing_bytes": ...} by record: a kilobyte may hold a million of them.

    All records are read first, since a fault replaces the whole answer.
    """
    batches, trailing_bytes = read_batches(fragment)
    heads = [json.dumps(_batch_as_json(batch)).removesuffix("}") for batch in batches]
    for batch in batches:
        deque(batch.records(), maxlen=0)

    def text() -> Iterator[str]:
        yield '{"batches": ['
        for number, (head, batch) in enumerate(zip(heads, batches, strict=True)):
            yield f'{", " if number else ""}{head}, "records": ['
            before = ""
            for record in batch.records():
                yield before + json.dumps(_record_as_json(record))
                before = ", "
            yield "]}"
        yield f'], "trailing_bytes": {trailing_bytes}}}'

    return text()


def answer(line: str | bytes, work: Callable[[Json], Iterable[str]]) -> Iterable[str]:
    """Return the answer to a line of the machine form, in pieces; `work` is `answer_frame` or `answer_records`."""
    try:
        try:
            asked = json.loads(line)
        except ValueError as fault:
            raise Malformed(f"not JSON: {fault}") from None
        if not isinstance(asked, dict):
            raise Malformed("a line is a JSON object")
        return work(asked)
    except (ProtocolError, ValueError, RecursionError) as fault:
        return (json.dumps({"error": str(fault) or type(fault).__name__}),)


def answer_frame(asked: Json) -> Iterable[str]:
    side, frame = asked.get("side"), _frame_asked(asked)
    if side == "request":
        decoded = request(frame)
    elif side == "response":
        decoded = response(frame, _int_asked(asked, "api_key"), _int_asked(asked, "api_version"))
    elif side == "data":
        decoded = data(frame, str(asked.get("message")))
    else:
        raise Unsupported(f"side {side!r} is none of request, response, data")
    return (json.dumps(as_json(decoded, show_secrets=True)),)


def answer_records(asked: Json) -> Iterable[str]:
    return records_as_json(_frame_asked(asked))


def _frame_asked(asked: Json) -> bytes:
    text = asked.get("hex")
    if not isinstance(text, str):
        raise Malformed("hex is missing")
    try:
        return bytes.fromhex(text)
    except ValueError as fault:
        raise Malformed(f"hex: {fault}") from None


def _int_asked(asked: Json, name: str) -> int:
    value = asked.get(name)
    if not isinstance(value, int):
        raise Malformed(f"{name} is missing: an answer does not say what it answers")
    return value


def _record_as_json(record: Record) -> Json:
    return {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": _base64(record.key),
        "value": _base64(record.value),
        "headers": [[name, _base64(value)] for name, value in record.headers],
    }


def _base64(value: bytes | None) -> str | None:
    return None if value is None else b64encode(value).decode()
