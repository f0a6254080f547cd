"""Phrases that several packages print in the same way."""

from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural: "1 row", "2,000 rows"."""
    return f"{count:,} {noun if count == 1 else noun + 's'}"


def few(words: Sequence[object], most: int, between: str = ", ") -> str:
    """Return the first `most` words and the number of further ones: "a, b and 3 more"."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return between.join(map(str, words[:most])) + more
