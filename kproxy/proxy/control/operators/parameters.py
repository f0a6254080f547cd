"""Parameters of the admin API, as text, to values. Raises ValueError with what was written and what is wanted."""

from collections.abc import Mapping

from kproxy.errors import KproxyError

HIGHEST = 1 << 62


class NotNow(KproxyError):
    """What is asked for cannot be said yet: answered with 503 and Retry-After."""


def number(query: Mapping[str, str], name: str, default: int, highest: int) -> int:
    """A whole number from 0 to `highest`; `default` where the parameter is not there."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= highest):
        raise ValueError(f"{name}={text[:40]!r} is not a number from 0 to {highest}")
    return int(text)


def needed_number(query: Mapping[str, str], name: str) -> int:
    """The same, of a parameter that must be there."""
    if name not in query:
        raise ValueError(f"{name}=NUMBER is missing")
    return number(query, name, 0, HIGHEST)
