"""Parameters of the admin API, from text to values. A ValueError names the given text and the accepted values."""

from collections.abc import Iterator, Mapping

from kproxy.errors import KproxyError

HIGHEST = 1 << 62


class Noting(Mapping[str, str]):
    """Parameters that record which names the handler looked up, present or not."""

    def __init__(self, parameters: Mapping[str, str]) -> None:
        self._parameters = parameters
        self._known: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self._known.add(name)
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        self._known.update(self._parameters)
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def check(self) -> None:
        """Raise ValueError for a name that the handler never looked up: a mistyped filter must not seem to work."""
        for name in self._parameters.keys() - self._known:
            there_are = f"there are {', '.join(sorted(self._known))}" if self._known else "there is none"
            raise ValueError(f"{name[:40]!r} is no parameter here: {there_are}")


class NotNow(KproxyError):
    """The answer is not available yet: 503 with Retry-After."""


def number(query: Mapping[str, str], name: str, default: int, highest: int) -> int:
    """A whole number from 0 to `highest`; `default` if the parameter is missing."""
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= highest):
        raise ValueError(f"{name}={text[:40]!r} is not a number from 0 to {highest}")
    return int(text)


def needed_number(query: Mapping[str, str], name: str) -> int:
    """A whole number from 0 to HIGHEST. Raises ValueError if the parameter is missing."""
    if name not in query:
        raise ValueError(f"{name}=NUMBER is missing")
    return number(query, name, 0, HIGHEST)
