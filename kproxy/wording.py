"""Words for people that several rooms say alike."""

from collections.abc import Sequence


def few(words: Sequence[object], most: int, between: str = ", ") -> str:
    """The first `most` of some words, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return between.join(map(str, words[:most])) + more
