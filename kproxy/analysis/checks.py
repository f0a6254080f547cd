"""What can be wrong with a question, found before an engine starts: which takes seconds, and says it in its own words.

Duty: names of columns in groups and conditions, against the schema; spans of time; releases. Each fault names what is
there instead. A condition is SQL, which only an engine reads: here it is only searched for names that no table has.

Refuses to know files and engines.
"""

import re
from collections.abc import Sequence

from kproxy.analysis.shared import GROUP_COLUMNS, did_you_mean
from kproxy.errors import KproxyError
from kproxy.tables import schema

BY_HOUR = ("date", "hour")  # of tables that Spark wrote: parts of their paths

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.)*")|`(?P<quoted>[^`]+)`|(?P<name>[A-Za-z_]\w*)|(?P<number>\d[\w.]*)|"""
    r"(?P<arrow>->)|(?P<other>\S)"
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
_WORDS = frozenset(_SQL.split())  # that may stand in a condition and are no names
_SPAN = re.compile(r"\s*(interval\s+)?\d+\s+(microsecond|millisecond|second|minute|hour|day|week)s?\s*", re.IGNORECASE)


def names_in(condition: str) -> list[str]:
    """The names in a condition that can only be columns; none where that takes an SQL parser."""
    tokens = list(_TOKEN.finditer(condition))
    if any(token["arrow"] or (token["name"] or "").lower() in ("select", "lateral") for token in tokens):
        return []
    found = []
    for index, token in enumerate(tokens):
        name = token["quoted"] or token["name"]
        before, behind = (tokens[at][0] if 0 <= at < len(tokens) else "" for at in (index - 1, index + 1))
        known_word = token["name"] is not None and name.lower() in _WORDS
        if name is None or behind[:1] in ("(", "'") or before == "." or before.lower() == "as" or behind == ".":
            continue
        if name not in found and (not known_word or name in _ALL_COLUMNS):
            found.append(name)
    return found


_ALL_COLUMNS = frozenset(name for table in schema.BY_NAME.values() for name in table.schema.names)


def check_condition(condition: str, table: str) -> None:
    """Raise KproxyError if a condition names what is no column of a table."""
    columns = [*schema.BY_NAME[table].schema.names, *BY_HOUR]
    lower = {column.lower() for column in columns}
    for name in names_in(condition):
        if name.lower() not in lower and name.lower() not in _WORDS:
            raise KproxyError(f"--where: {table} has no column {name!r}: {did_you_mean(name, columns)}")


def check_groups(by: Sequence[str], table: str) -> None:
    """Raise KproxyError for a group that rows of a table cannot be put in."""
    columns = [*schema.BY_NAME[table].schema.names, *BY_HOUR]
    groups = [group for group, needed in GROUP_COLUMNS.items() if set(needed) <= set(columns)]
    for name in by:
        if name not in groups and name not in columns:
            raise KproxyError(f"--by: {table} has no column {name!r}: {did_you_mean(name, [*groups, *columns])}")


def check_span(every: str) -> None:
    """Raise KproxyError for what is no span of time."""
    if not _SPAN.fullmatch(every):
        raise KproxyError(f"--every {every!r} is no span of time: give a number and a unit, like '10 seconds'")
