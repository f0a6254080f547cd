"""Secrets: a type whose texts hide them, and removal of known secrets from other texts.

Refuses to know the origin of secrets and their use.
"""

from collections.abc import Iterable
from typing import NoReturn

HIDDEN = "***"


class Secret:
    """A password or a token. Only `reveal` shows it: its repr and str do not, and it cannot be pickled."""

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
    """Return a peer's text on one line, shortened and without these secrets: a peer may repeat its input."""
    for secret in secrets:
        if secret.reveal():
            text = text.replace(secret.reveal(), HIDDEN)
    text = " ".join(text.split())
    return text if len(text) <= at_most else f"{text[:at_most]}..."
