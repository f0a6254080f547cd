"""Secrets: a type whose texts hide them, and texts of others with known secrets taken out.

Refuses to know where secrets come from and what they open.
"""

from collections.abc import Iterable
from typing import NoReturn

HIDDEN = "***"


class Secret:
    """A password or a token. Only `reveal` shows it: its repr, its text and a pickle of it do not."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not leave its process")


def without(text: str, secrets: Iterable[Secret], *, at_most: int = 300) -> str:
    """A peer's text on one line, shortened, with those secrets taken out: a peer may repeat what it was sent."""
    for secret in secrets:
        if secret.reveal():
            text = text.replace(secret.reveal(), HIDDEN)
    text = " ".join(text.split())
    return text if len(text) <= at_most else f"{text[:at_most]}..."
