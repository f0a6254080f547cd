"""Patterns of names, compiled into one matcher whose time for a name does not grow with their number.

`*` is any text, `?` any character, a backslash makes the next character literal. Literal patterns are in a dict,
`text*` and `*text` in dicts by length, and all others in one automaton: the bits of an integer are the reachable
positions in the patterns (shift-and, Baeza-Yates and Gonnet 1992). Each set of positions is computed once and cached
with its transitions, so that a character costs one lookup. Clients choose names, so at most MAX_STEPS transitions of
MAX_BYTES are cached; then the cache is cleared.

A pattern has a rank, and the result is the set of ranks that match.
"""

import re
from collections.abc import Iterable

MAX_STEPS = 16 * 1024  # transitions of one automaton
MAX_BYTES = 8 * 1024 * 1024  # their memory: a set of positions has a bit for each character of a pattern
_STEP_BYTES = 500  # memory of a transition without its positions

_Token = str | None  # a literal character, "" for any character, None for any text


class Matcher:
    """Finds the patterns that match a name."""

    def __init__(self, patterns: Iterable[tuple[int, str]]) -> None:
        """patterns: (rank, pattern); several patterns may have the same rank."""
        self._exact: dict[str, int] = {}  # values: the bits of ranks
        self._prefixes: dict[int, dict[str, int]] = {}  # by length
        self._suffixes: dict[int, dict[str, int]] = {}
        rest: list[tuple[int, list[_Token]]] = []
        for rank, pattern in patterns:
            tokens = _tokens(pattern)
            wild = [at for at, token in enumerate(tokens) if not token]
            text = "".join(token for token in tokens if token)
            if not wild:
                where = self._exact
            elif wild == [len(tokens) - 1] and tokens[-1] is None:
                where = self._prefixes.setdefault(len(text), {})
            elif wild == [0] and tokens[0] is None:
                where = self._suffixes.setdefault(len(text), {})
            else:
                rest.append((rank, tokens))
                continue
            where[text] = where.get(text, 0) | 1 << rank
        self._automaton = _Automaton(rest) if rest else None

    def ranks(self, name: str) -> int:
        """Return the ranks of matching patterns, as bits 1 << rank."""
        found = self._exact.get(name, 0)
        for length, prefixes in self._prefixes.items():
            found |= prefixes.get(name[:length], 0)
        for length, suffixes in self._suffixes.items():
            if len(name) >= length:
                found |= suffixes.get(name[len(name) - length :], 0)
        return found if self._automaton is None else found | self._automaton.ranks(name)


class Patterns:
    """A list of names, some with wildcards."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.texts = tuple(patterns)
        self.is_all = any(_tokens(text) == [None] for text in self.texts)
        self._matcher = Matcher((0, text) for text in self.texts)

    def match(self, name: str) -> bool:
        return self._matcher.ranks(name) != 0


class _Positions:
    """A set of positions, the ranks of patterns that end there, and the transitions of characters seen here."""

    __slots__ = ("bits", "next", "ranks")

    def __init__(self, bits: int, ranks: int) -> None:
        self.bits = bits
        self.ranks = ranks
        self.next: dict[str, _Positions] = {}


class _Automaton:
    """Patterns with wildcards, as consecutive bits of an integer."""

    def __init__(self, patterns: Iterable[tuple[int, list[_Token]]]) -> None:
        self._steps_by: dict[str, int] = {}  # character -> the positions whose next token it is
        self._steps_any = 0  # the positions whose next token is any character
        self._stays = 0  # the positions where any text may follow
        self._ranks: dict[int, int] = {}  # position of a pattern's end -> the bit of its rank
        self._start_bits = self._end_bits = position = 0
        for rank, tokens in patterns:
            self._start_bits |= 1 << position
            for token in tokens:
                bit = 1 << position
                if token is None:
                    self._stays |= bit
                    continue
                if token:
                    self._steps_by[token] = self._steps_by.get(token, 0) | bit
                else:
                    self._steps_any |= bit
                position += 1
            self._end_bits |= 1 << position
            self._ranks[position] = 1 << rank
            position += 1
        self._max_steps = min(MAX_STEPS, max(1, MAX_BYTES // (_STEP_BYTES + position // 7)))
        self._forget()

    def _forget(self) -> None:
        self._start = self._positions(self._start_bits)
        self._known = {self._start_bits: self._start}
        self._steps = 0

    def ranks(self, name: str) -> int:
        positions = self._start
        for character in name:
            following = positions.next.get(character)
            positions = self._step(positions, character) if following is None else following
        return positions.ranks

    def _step(self, positions: _Positions, character: str) -> _Positions:
        steps = self._steps_by.get(character, 0) | self._steps_any
        bits = (positions.bits & steps) << 1 | positions.bits & self._stays
        if self._steps >= self._max_steps:
            self._forget()
        following = self._known.get(bits)
        if following is None:
            following = self._known[bits] = self._positions(bits)
        positions.next[character] = following
        self._steps += 1
        return following

    def _positions(self, bits: int) -> _Positions:
        ends, ranks = bits & self._end_bits, 0
        while ends:
            last = ends.bit_length() - 1
            ranks |= self._ranks[last]
            ends ^= 1 << last
        return _Positions(bits, ranks)


def _tokens(pattern: str) -> list[_Token]:
    """Return literal characters and wildcards; several stars in a row become one."""
    tokens: list[_Token] = []
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part != "*":
            tokens.append("" if part == "?" else part[-1])
        elif not tokens or tokens[-1] is not None:
            tokens.append(None)
    return tokens
