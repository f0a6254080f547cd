"""Valid requests of every API, and mutations that a hostile client could send."""

import random
from collections.abc import Callable, Iterable, Iterator

from kproxy.errors import ProtocolError
from kproxy.protocol import codec
from kproxy.protocol.schema import Field, schema
from kproxy.proxy.filters.policy.resources import NAMED
from tests.protocol.messages import Layout
from tests.proxy.filters.policy.policies import random_body

HEAD_BYTES = 8  # key, version, correlation id: not mutated, so that both readers use the same API
APIS = dict(schema().apis)
NAMING = [key for key, api in APIS.items() if api.name in NAMED]  # APIs with names that policy rules match
KEYS = sorted((*APIS, *NAMING, *NAMING))  # NAMING three times as often


def _tagged(fields: tuple[Field, ...], version: int, above: str = "") -> Iterator[str]:
    for field in fields:
        if version in field.versions:
            path = f"{above}.{field.name}" if above else field.name
            if version in field.tagged_versions:
                yield path
            yield from _tagged(field.fields, version, path)


# APIs in NAMING with known tagged fields in some version.
TAGGED = [
    key
    for key in NAMING
    for api in (APIS[key],)
    if any(next(iter(_tagged(api.request.fields, version)), None) for version in api.request.versions)
]


def valid(dice: random.Random, key: int) -> bytes:
    """Return a request of that API without its size field, most often in its lowest or highest version."""
    versions = APIS[key].request.versions
    version = dice.choice((versions[0], versions[-1], dice.choice(versions)))
    body = random_body(Layout(APIS[key].request, version, key, "request"), dice)
    header = {"requestApiKey": key, "requestApiVersion": version, "correlationId": 1}
    if APIS[key].request.header_version(version):
        header["clientId"] = dice.choice((None, "c"))
    return bytes(codec.encode_request(header, body))


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _beyond(dice: random.Random, value: int) -> bytes:
    """A varint of five bytes with bits beyond 32, which Java drops."""
    return bytes((*(value >> shift & 127 | 128 for shift in (0, 7, 14, 21)), value >> 28 | dice.choice((16, 32, 112))))


def _flip(dice: random.Random, frame: bytearray, at: int) -> None:
    """Change one byte, often by one: a size, a count, a tag, a marker."""
    frame[at] = dice.choice((frame[at] + 1 & 255, frame[at] - 1 & 255, 0, 1, 255, 128, dice.randrange(256)))


def _truncate(dice: random.Random, frame: bytearray, at: int) -> None:
    del frame[at:]


def _trail(dice: random.Random, frame: bytearray, at: int) -> None:
    frame += dice.randbytes(dice.randrange(1, 9))


def _widen(dice: random.Random, frame: bytearray, at: int) -> None:
    """A varint longer than necessary, whose fifth byte can exceed 32 bits."""
    value, width = frame[at] & 127, dice.choice((2, 3, 4, 5, 5, 5, 6, 10))
    wide = bytearray((value | 128, *(128 for _ in range(width - 2)), 0))
    if width == 5:
        wide[-1] = dice.choice((0, 0, 8, 16, 127))
    frame[at : at + 1] = wide


def _null(dice: random.Random, frame: bytearray, at: int) -> None:
    """A null of any type, or a length below -1."""
    null = dice.choice((b"\xff\xff", b"\xff\xfe", b"\x80\x00", b"\xff" * 4, b"\xff\xff\xff\xfe", b"\0", b"\0\0\0\0"))
    frame[at : at + len(null)] = null


def _negative(dice: random.Random, frame: bytearray, at: int) -> None:
    """A length, count or tag as a varint that Java reads as negative or as the largest int32."""
    value = dice.choice((1 << 31, (1 << 31) - 1, (1 << 32) - 1, (1 << 32) - 2, frame[at] | 1 << 31))
    frame[at : at + 1] = _uvarint(value) if dice.random() < 0.8 else _beyond(dice, frame[at])


def _insert(dice: random.Random, frame: bytearray, at: int) -> None:
    frame[at:at] = dice.choice((dice.randbytes(dice.randrange(1, 5)), bytes(dice.randrange(1, 5))))


def _remove(dice: random.Random, frame: bytearray, at: int) -> None:
    del frame[at : at + dice.randrange(1, 5)]


def _repeat(dice: random.Random, frame: bytearray, at: int) -> None:
    """Repeat a part of the frame, tagged fields among others."""
    part = frame[at : at + dice.randrange(1, 24)]
    frame[at:at] = part


def _tag(dice: random.Random, frame: bytearray, at: int) -> None:
    """Replace an empty section by tagged fields, known and unknown, in any order, with right and wrong sizes."""
    zeros = [place for place in range(HEAD_BYTES, len(frame)) if not frame[place]]
    if not zeros:
        return
    place = dice.choice(zeros[-6:] if dice.random() < 0.7 else zeros)
    section = bytearray(_uvarint(count := dice.choice((1, 1, 2, 3, 200))))
    for _ in range(min(count, 3)):
        content = dice.choice(
            (b"", b"\1", b"\2x", b"\3ab", bytes(4), bytes(12), b"\2\7secret\0\1\0", dice.randbytes(5))
        )
        size = len(content) + dice.choice((0, 0, 0, 1, -1, 3, 1 << 20, 1 << 31))
        section += _uvarint(dice.choice((0, 0, 1, 1, 2, 3, 100, 1 << 31))) + _uvarint(max(size, 0)) + content
    frame[place : place + 1] = section


def _text(dice: random.Random, frame: bytearray, at: int) -> None:
    """Invalid UTF-8 (truncated, overlong, surrogates, beyond U+10FFFF) or unusual text of the same length."""
    broken = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xed\xa0\x80\xed\xb0\x80", b"\xf0\x9f", b"\xc0\x80", b"\xc0\xaf")
    bad = dice.choice(
        (*broken, b"\xe2\x28", b"\xe0\x80\x80", b"\xf4\x90\x80\x80", b"\xf0\x80\x80\x80", b"\0", b"\xef\xbb\xbf")
    )
    letters = [place for place in range(HEAD_BYTES, len(frame)) if 97 <= frame[place] <= 122]
    if letters:
        place = dice.choice(letters)
        frame[place : place + len(bad)] = bad


def _version(dice: random.Random, frame: bytearray, at: int) -> None:
    """The bytes of one version under the number of another, which may not exist."""
    versions = APIS[int.from_bytes(frame[:2])].request.versions
    version = dice.choice((*versions, *versions, versions[0] - 1, versions[-1] + 1, 32_767, -32_768))
    frame[2:4] = version.to_bytes(2, signed=True)


def _sizes(frame: bytearray) -> list[tuple[int, int]]:
    """Return the spans of the sizes of known tagged fields."""
    paths = _tagged(APIS[int.from_bytes(frame[:2])].request.fields, int.from_bytes(frame[2:4]))
    return [(start, end) for kind, start, end in _spans(frame, paths) if kind == codec.TAG_SIZE and frame[start] < 128]


def _names(frame: bytearray) -> list[tuple[int, int]]:
    """Return the spans of the names that policy rules match."""
    paths = NAMED.get(APIS[int.from_bytes(frame[:2])].name, {})
    return [(start, end) for kind, start, end in _spans(frame, paths) if kind != codec.TAG_SIZE]


def _spans(frame: bytearray, paths: Iterable[str]) -> list[codec.Span]:
    key, version = int.from_bytes(frame[:2]), int.from_bytes(frame[2:4])
    try:
        return codec.locate(key, version, "request", tuple(paths))(frame, HEAD_BYTES, len(frame))
    except ProtocolError:
        return []


def _lie(dice: random.Random, frame: bytearray, at: int) -> None:
    """A known tagged field with a wrong size: a broker reads its content and ignores the size."""
    if sizes := _sizes(frame):
        start, end = dice.choice(sizes)
        frame[start:end] = _uvarint(max(0, frame[start] + dice.choice((-9, -1, 1, 2, 7, 12, 20, 40, 100))))


def _hide(dice: random.Random, frame: bytearray, at: int) -> None:
    """Two readings of one request: skipping a known tagged field by size leads to other names than reading its content.

    A reader that skips by size continues inside the content of an unknown tagged field at the end of the request.
    """
    sizes = _sizes(frame)
    if not sizes or frame[-1]:
        return
    _two_readings(frame, *dice.choice(sizes))


def _alias(dice: random.Random, frame: bytearray, at: int) -> None:
    """Like `_hide`, with the tag as a varint beyond 32 bits: only Java recognises it as the known tag."""
    sizes = [(start, end) for start, end in _sizes(frame) if frame[start - 1] < 128]
    if not sizes or frame[-1]:
        return
    start, end = dice.choice(sizes)
    _two_readings(frame, start, end)
    frame[start - 1 : start] = _beyond(dice, frame[start - 1])


def _two_readings(frame: bytearray, start: int, end: int) -> None:
    stop = end + frame[start]
    decoy = bytearray(frame)
    for first, last in _names(frame):
        if first >= stop and last > first:
            decoy[last - 1] ^= 1
    rest = bytes(decoy[stop:])
    inner = bytes(frame[end:stop] + frame[stop:-1]) + b"\1" + _uvarint(99) + _uvarint(len(rest))
    frame[start:] = _uvarint(len(inner)) + inner + rest


def _again(dice: random.Random, frame: bytearray, at: int) -> None:
    """A known tagged field twice with different contents: a broker uses the last one."""
    sizes = [(start, end) for start, end in _sizes(frame) if frame[start - 2] == 1]
    if sizes:
        start, end = dice.choice(sizes)
        content = bytes(frame[end : end + frame[start]])
        frame[start - 2] = 2
        frame[start - 1 : start - 1] = bytes(frame[start - 1 : end]) + bytes(
            each ^ dice.choice((0, 1)) for each in content
        )


def _client(dice: random.Random, frame: bytearray, at: int) -> None:
    """A client id of any kind: null, below null, empty, invalid UTF-8, longer than the request."""
    if len(frame) < HEAD_BYTES + 2:
        return
    size = max(0, int.from_bytes(frame[HEAD_BYTES : HEAD_BYTES + 2], signed=True))
    text = dice.choice((b"", b"c", b"\xff\xfe", b"a\0b", b"\xed\xa0\x80", b"x" * 300))
    length = dice.choice((len(text), len(text), len(text), -1, -2, -32_768, 32_767))
    frame[HEAD_BYTES : HEAD_BYTES + 2 + size] = length.to_bytes(2, signed=True) + (text if length == len(text) else b"")


def _header(dice: random.Random, frame: bytearray, at: int) -> None:
    """Tagged fields in the header, with right or wrong count and sizes."""
    if len(frame) < HEAD_BYTES + 3:
        return
    place = HEAD_BYTES + 2 + max(0, int.from_bytes(frame[HEAD_BYTES : HEAD_BYTES + 2], signed=True))
    count = dice.choice(
        (_uvarint(1), _uvarint(2), _uvarint((1 << 32) - 1), _uvarint(1 << 31), _beyond(dice, 0), _beyond(dice, 1))
    )
    size = dice.choice((_uvarint(1), _uvarint(1), _uvarint(0), _uvarint(99), _uvarint((1 << 32) - 4), _beyond(dice, 1)))
    tag = dice.choice((b"\0", b"\1", _uvarint(1 << 31), _beyond(dice, 0)))
    if place < len(frame):
        frame[place : place + 1] = count + dice.choice((b"", tag + size + b"x", (tag + size + b"x") * 2))


MUTATIONS: dict[str, Callable[[random.Random, bytearray, int], None]] = {
    function.__name__[1:]: function
    for function in (
        _flip,
        _truncate,
        _trail,
        _widen,
        _null,
        _negative,
        _insert,
        _remove,
        _repeat,
        _tag,
        _text,
        _version,
        _lie,
        _hide,
        _alias,
        _again,
        _client,
        _header,
    )
}


def mutated(dice: random.Random, key: int) -> tuple[bytes, tuple[str, ...]]:
    """Return (request, names of its mutations): one to three mutations, or none in one of ten."""
    if dice.random() < 0.15:
        frame = bytearray(valid(dice, dice.choice(TAGGED)))
        kinds = [dice.choice(("lie", "hide", "alias", "again"))]
    else:
        frame = bytearray(valid(dice, key))
        kinds = [] if dice.random() < 0.1 else dice.choices(list(MUTATIONS), k=dice.choice((1, 1, 1, 2, 3)))
    done = []
    for kind in kinds:
        if len(frame) > HEAD_BYTES:
            before = bytes(frame)
            MUTATIONS[kind](dice, frame, dice.randrange(HEAD_BYTES, len(frame)))
            if frame != before:
                done.append(kind)
    return bytes(frame), tuple(done)
