"""Faults of a question, found before an engine starts: a start takes seconds, and engines report faults in other words.

Duty: names of columns in groups and conditions, against the schema; spans of time; and a condition in the words of both
engines: names in backquotes, texts as literals, so that it is one condition and nothing else. Each fault names the
valid alternatives.

Refuses to know files and engines.
"""

import re
from collections.abc import Mapping, Sequence

from kproxy.analysis.questions.pieces import GROUP_COLUMNS, GROUPS, did_you_mean, literal, name, span_us
from kproxy.errors import KproxyError
from kproxy.tables import schema

BY_HOUR = ("date", "hour")  # columns of tables that Spark wrote: parts of their paths

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*")|`(?P<quoted>[^`]+)`|(?P<name>[A-Za-z_]\w*)|"""
    r"""(?P<number>(?:\d[\w.]*)(?:(?<=[eE])[+-]?\d+)?)|(?P<never>--|/\*|->|[;{}'"`])|(?P<other>\S)"""
)
_SQL = """
    all and any array as asc at between bigint binary boolean both by byte case cast char collate cross current_date
    current_timestamp current_timezone current_user date day dayofweek days decimal desc distinct div double else
    end escape except exists extract false first float for from full hour hours ilike in int integer intersect
    interval is last leading like limit localtimestamp long map microsecond microseconds millisecond milliseconds
    minute minutes month months not null nulls numeric on or over overlay partition placing position quarter real
    regexp rlike row rows second seconds set short similar smallint some string struct substring table then time
    timestamp timestamp_ltz timestamp_ntz tinyint to trailing trim true try_cast unbounded union unknown user using
    varchar void week weeks when where with within year years zone
"""
_WORDS = frozenset(_SQL.split())  # words of conditions that are no names
_NOT_HERE = {
    "select": "a condition has no query in it: `kproxy analyze sql` takes queries",
    "rlike": "write regexp_like(column, 'pattern')",
    "regexp": "write regexp_like(column, 'pattern')",
}
_COMPARED = ("=", ">", "<", "(", ",", "like", "in")  # tokens that may precede a text
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}


def names_of(table: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names for conditions on rows of a table, each with the text that it stands for."""
    columns = [*schema.BY_NAME[table].schema.names, *BY_HOUR]
    groups = {group: GROUPS[group] for group, needed in GROUP_COLUMNS.items() if set(needed) <= set(columns)}
    return groups | {column: name(column) for column in columns} | dict(more or {})


def condition(text: str, known: Mapping[str, str], what: str, option: str = "--where") -> str:
    """A condition as people write it, as one that both engines take; `known` as of `names_of`, of `what`.

    Raises KproxyError for an unknown name, and for anything but a single condition.
    """
    lower = {each.lower(): each for each in known}
    depth, found, reached = 0, [], 0
    tokens = list(_TOKEN.finditer(text))
    for index, token in enumerate(tokens):
        before, behind = (tokens[at][0] if 0 <= at < len(tokens) else "" for at in (index - 1, index + 1))
        found.append(text[reached : token.start()])
        reached = token.end()
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token["never"] or depth < 0:
            raise KproxyError(f"{option} cannot be read near {token[0]!r}: {_EXAMPLE}")
        found.append(_translated(token, before, behind, lower, known, what, option))
    if depth or not tokens:
        raise KproxyError(f"{option} cannot be read near the end: {_EXAMPLE}")
    return f"({''.join(found)})"


_EXAMPLE = "give a condition in SQL, like \"api = 'Fetch'\""


def _translated(
    token: re.Match[str],
    before: str,
    behind: str,
    lower: Mapping[str, str],
    known: Mapping[str, str],
    what: str,
    option: str,
) -> str:
    if token["text"]:
        return literal(_unescaped(token["text"]))
    plain = token["name"]
    if token["quoted"] is None and (plain is None or (behind.startswith("(") and plain.lower() not in lower)):
        return token[0]  # a sign, a number, or a function
    given = token["quoted"] or plain
    is_type = plain is not None and (behind[:1] == "'" or before.lower() == "as" or behind.lower() in ("'", "as"))
    if given.lower() in lower and before != "." and not (is_type and given.lower() in _WORDS):
        return known[lower[given.lower()]]
    if plain is not None and plain.lower() in _NOT_HERE:
        raise KproxyError(f"{option} cannot be read near {plain!r}: {_NOT_HERE[plain.lower()]}")
    if plain is not None and (plain.lower() in _WORDS or is_type):
        return plain
    hint = f" (a text stands in quotes: {given!r})" if before in _COMPARED else ""
    raise KproxyError(f"{option}: {what} has no column {given!r}{hint}: {did_you_mean(given, list(known))}")


def _unescaped(token: str) -> str:
    """The text that a quoted text means; a backslash as in Spark, Python and shells."""
    inner = token[1:-1].replace("''", "'") if token[0] == "'" else token[1:-1]
    return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), inner, flags=re.DOTALL)


def compared(text: str, known: Mapping[str, str]) -> list[tuple[str, str]]:
    """The names that a condition compares with a text by =, each with that text."""
    lower = {each.lower(): each for each in known}
    tokens = list(_TOKEN.finditer(text))
    found = []
    for left, sign, right in zip(tokens, tokens[1:], tokens[2:], strict=False):
        name_ = lower.get((left["quoted"] or left["name"] or "").lower())
        if name_ is not None and sign[0] == "=" and right["text"]:
            found.append((name_, _unescaped(right["text"])))
    return found


def names_in(text: str, known: Sequence[str]) -> set[str]:
    """Which of the known names are in a condition."""
    words = {(token["quoted"] or token["name"] or "").lower() for token in _TOKEN.finditer(text)}
    return {each for each in known if each.lower() in words}


def check_groups(by: Sequence[str], table: str, more: Sequence[str] = ()) -> None:
    """Raise KproxyError for a group that rows of a table cannot be put in; more: groups of the job's own."""
    known = [*names_of(table), *more]
    for each in by:
        if each not in known:
            raise KproxyError(f"--by: {table} has no column {each!r}: {did_you_mean(each, known)}")


def check_span(every: str) -> None:
    """Raise KproxyError for an invalid span of time."""
    try:
        span_us(every)
    except ValueError as fault:
        raise KproxyError(f"--every {fault}") from fault
