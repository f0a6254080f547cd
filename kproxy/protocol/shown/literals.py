"""Bytes from the literals of source code: a Python bytes literal, or an array or a string of C.

Duty: `bytes_of_literal` reads what logs of Python programs print and what Wireshark copies. Refuses to know frames.
"""

import re
from ast import literal_eval
from contextlib import suppress

_QUOTED = re.compile(rb"(?:bytearray)?[\s(]*[bB]?[\"']")
_UNQUOTED = re.compile(rb"b(?:\\x[^\n\"']*)")  # a bytes literal whose quotes the shell removed
_ARRAY = re.compile(rb"[\w\s\[\]=]*\{(?P<numbers>[\w\s,]*)\}[\s;]*")  # a declaration may precede it
_COMMENT = re.compile(rb"/\*.*?\*/|//[^\n]*", re.DOTALL)
_NUMBER = re.compile(rb"0[xX][0-9A-Fa-f]{1,2}")


def bytes_of_literal(text: bytes) -> bytes | None:
    """Return the bytes of a literal; None for other text.

    It is one like b'\\x00\\x12', also in several lines or without its quotes, "\\x00\\x12", or { 0x00, 0x12 };
    """
    if _QUOTED.match(text) is not None:
        return _of_quoted(text)
    if _UNQUOTED.fullmatch(text.strip()) is not None:
        return _of_quoted(b"b'" + text.strip()[1:] + b"'")
    found = _ARRAY.fullmatch(_COMMENT.sub(b" ", text)) if b"{" in text else None
    return None if found is None else _of_numbers(found["numbers"])


def _of_quoted(text: bytes) -> bytes | None:
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        content = literal_eval(f"({text.decode().strip().removeprefix('bytearray').rstrip(';')})")
        if isinstance(content, str) and "\\x" in text.decode():
            return content.encode("latin-1")
        return content if isinstance(content, bytes) else None
    return None


def _of_numbers(text: bytes) -> bytes | None:
    numbers = [number.strip() for number in text.strip().removesuffix(b",").split(b",")]
    if not all(map(_NUMBER.fullmatch, numbers)):
        return None
    return bytes(int(number, 16) for number in numbers)
