"""Parameters of the admin API, as text, to values. Raises ValueError with what was written and what is wanted."""

from collections.abc import Iterator, Mapping

from kproxy.errors import KproxyError

HIGHEST = 1 << 62


class Noting(Mapping[str, str]):
    """Parameters that note which names somebody looked for, whether they are there or not."""

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
        """Raises ValueError for a name that nobody looked for: a filter that is not there must not seem to work."""
        for name in self._parameters.keys() - self._known:
            there_are = f"there are {', '.join(sorted(self._known))}" if self._known else "there is none"
            raise ValueError(f"{name[:40]!r} is no parameter here: {there_are}")


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
