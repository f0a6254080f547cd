"""A question as users ask it: a job, its options, and the choice of rows. The same for both engines.

Duty: report faults of it before an engine starts, choose the rows (from, to, where), run the job, and choose
among the rows of the answer (having). Refuses to know engines, the command line, and how answers look.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from kproxy.analysis import checks
from kproxy.analysis.engine import Frame, ask, columns, rows
from kproxy.analysis.jobs import Job
from kproxy.analysis.questions import parties
from kproxy.analysis.questions.pieces import LONGEST_US, span_us
from kproxy.errors import KproxyError
from kproxy.tables import schema
from kproxy.wording import counted

# First and last moments of rows, in microseconds; a connection is there from its first packet to its last.
# The contents of messages from which each table has its rows.
_FILLED_BY = {
    "exchanges": "a request or a response of Kafka",
    "partitions": "topic-partitions: those of Produce, Fetch, OffsetCommit and the like, in versions that kproxy knows",
    "batches": "record batches of Produce or Fetch",
    "records": "records of topics that --records chooses",
    "connections": "a connection of Kafka",
    "group_events": "an event of a group: its members' requests, or records of its coordinator",
    "rebalances": "a generation of a group: JoinGroup and SyncGroup, or records of its coordinator",
    "assignments": "an assignment to a member of a group",
    "committed_offsets": "committed offsets in the log of a coordinator, __consumer_offsets",
    "leadership": "leaders of partitions: Metadata, LeaderAndIsr, UpdateMetadata, or errors that name them",
    "topology": "brokers and topics: Metadata, DescribeCluster, UpdateMetadata, or registrations of brokers",
    "changes": "an administrator's request, such as CreateTopics",
    "registry": "operations of ZooKeeper",
    "transactions": "a transactional id's state",
}
_FIRST_US = {
    "connections": "cast(floor(start_ns / 1e3) as bigint)",
    "quality": "cast(floor(first_ns / 1e3) as bigint)",
}
_LAST_US = {
    "connections": "cast(floor(coalesce(end_ns, start_ns) / 1e3) as bigint)",
    "quality": "cast(floor(last_ns / 1e3) as bigint)",
}
_VALUES = 10_000  # values of a column to compare a text in --where with
_LISTED = 8  # values to list if none is similar
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d)(\.\d{1,6})?)?")


@dataclass
class Question:
    """A job with its options. Times are as `moment` reads them; conditions are SQL; None: no such choice.

    other_since, other_until: times of the other dataset of a comparison; without both, it has the times of this one.
    """

    job: Job
    options: dict[str, Any] = field(default_factory=dict)
    since: str | None = None
    until: str | None = None
    where: str | None = None
    having: str | None = None
    other_since: str | None = None
    other_until: str | None = None

    def check(self) -> list[str]:
        """Return warnings to print before the answer. Raises KproxyError for faults that are already certain."""
        notes = []
        if "by" in self.options:
            checks.check_groups(self.options["by"], self.job.tables[0], self.job.groups)
        if self.options.get("every") is not None:
            checks.check_span(self.options["every"])
        if "slower_than_ms" in self.options and not 0 <= self.options["slower_than_ms"] <= LONGEST_US / 1000:
            raise KproxyError(f"--slower-than-ms {self.options['slower_than_ms']:g}: give milliseconds, 0 or more")
        if "kafka" in self.options:
            try:
                release, _ = parties.served_by(self.options["kafka"])
            except ValueError as fault:
                raise KproxyError(str(fault)) from fault
            if release != self.options["kafka"]:
                notes.append(f"Kafka {self.options['kafka']} is judged as {release}, the newest of its line")
        self._condition()
        for option, text in (
            ("--from", self.since),
            ("--to", self.until),
            ("--with-from", self.other_since),
            ("--with-to", self.other_until),
        ):
            if text is not None:
                moment(text, option)
        return notes

    def answer(self, tables: Mapping[str, Frame], other: Frame | None = None) -> Frame:
        """The answer from these tables; `other`: the first table of the other dataset of a comparison."""
        frames = [tables[name] for name in self.job.tables]
        options = dict(self.options)
        chosen, own, traffic = self._condition()

        def those(frame: Frame, since: str | None, until: str | None) -> Frame:
            """The chosen rows; moments without a date refer to the frame's own rows."""
            conditions = [*times(self.job.tables[0], since, until), *([chosen] if chosen else [])]
            text = f"select * from answered where {' and '.join(conditions)}"
            return ask({"answered": frame}, chosen=text) if conditions else frame

        frames[0] = those(frames[0], self.since, self.until)
        if other is not None:
            has_times = self.other_since is not None or self.other_until is not None
            options["other"] = those(
                other, *((self.other_since, self.other_until) if has_times else (self.since, self.until))
            )
        for name in self.job.timed:
            conditions = times(name, self.since, self.until, self.job.tables[0])
            if conditions:
                text = f"select * from answered where {' and '.join(conditions)}"
                both = {"answered": tables[name], "first_table": tables[self.job.tables[0]]}
                frames[self.job.tables.index(name)] = ask(both, chosen=text)
        if own is not None:
            options["where"] = own
        if traffic is not None:
            options["traffic"] = traffic
        answer = self.job.run(*frames, **options)
        if self.having is None:
            return answer
        known = {column.name: f"`{column.name}`" for column in columns(answer)}
        condition = checks.condition(self.having, known, "the answer", "--having")
        return ask({"answer": answer}, some=f"select * from answer where {condition}")

    def why_empty(self, tables: Mapping[str, Frame]) -> str:
        """The message for an answer without rows: the rows of the table, and the options that choose none of them."""
        table = self.job.tables[0]
        first = f"min({_FIRST_US.get(table, 'unix_micros(`time`)')})"
        last = f"max({_LAST_US.get(table, 'unix_micros(`time`)')})"
        moments = [moment(text)(first, last) for text in (self.since, self.until) if text is not None]
        counts = ask(
            {"t": tables[table]},
            counted=f"""
                select count(*) as n, timestamp_micros({first}) as first, timestamp_micros({last}) as last,
                    {" >= ".join(moments) if len(moments) == 2 else "false"} as is_backwards
                from t""",
        )
        ((count, began, ended, is_backwards),) = rows(counts)
        if not count and table == "quality":
            return "No packet was read: the captures are empty, or nothing was recorded yet."
        if not count:
            return f"The table {table} has no rows: no packet or message that was read has {_FILLED_BY[table]}."
        span = "" if began is None else ", from {} to {} UTC".format(*(_second(us) for us in (began, ended)))
        has = f"table {table} has {counted(count, 'row')}{span}"
        if is_backwards:
            return f"--from {self.since} is not before --to {self.until}; the {has}."
        given = (("--from", self.since), ("--to", self.until), ("--where", self.where), ("--having", self.having))
        chose = " and ".join(option for option, text in given if text is not None)
        if not chose:
            return f"The {has}; {self.job.name} finds nothing in it."
        never = self._never(tables[table])
        if chose == "--where" and not never and (chosen := self._chosen(tables[table])):
            return f"--where chooses {counted(chosen, 'row')} of {table}; {self.job.name} finds nothing in it."
        return f"The {has}; none is chosen by {chose}.{never}"

    def _chosen(self, frame: Frame) -> int:
        """How many rows of the first table --where chooses; 0 too where it names more than that table's columns."""
        assert self.where is not None
        table = self.job.tables[0]
        known = checks.names_of(table)
        if checks.names_in(self.where, list(dict(self.job.names))) - set(known):
            return 0
        text = f"select count(*) from t where {checks.condition(self.where, known, table)}"
        ((count,),) = rows(ask({"t": frame}, some=text))
        return int(count)

    def _never(self, frame: Frame) -> str:
        """A message about texts in --where that the table does not have: similar values, or all values, if few."""
        if self.where is None:
            return ""
        known = checks.names_of(self.job.tables[0])
        hint = ""
        for name, given in checks.compared(self.where, known):
            text = f"select distinct {known[name]} as v from t where {known[name]} is not null order by 1"
            values = [str(value) for (value,) in rows(ask({"t": frame}, some=f"{text} limit {_VALUES}"))]
            if given in values:
                continue
            alike = {value.lower(): value for value in values}
            near = [alike[each] for each in get_close_matches(given.lower(), alike, 3, 0.6)]
            hint += f" {name} is never {given!r}: "
            if near:
                hint += f"did you mean {' or '.join(map(repr, near))}?"
            elif len(values) > _LISTED:
                column = known[name].replace("`", "")  # which a shell would run as a command
                listing = f'kproxy analyze sql "select distinct {column} from {self.job.tables[0]}" TABLES'
                hint += f"`{listing}` lists its {len(values):,} values."
            else:
                hint += f"there is {', '.join(map(repr, values)) or 'none'}."
        return hint

    def _condition(self) -> tuple[str | None, str | None, str | None]:
        """The condition as one on rows of the first table, else as one of the two that the job applies itself."""
        if self.where is None:
            return None, None, None
        job, table = self.job, self.job.tables[0]
        known = checks.names_of(table, dict(job.names))
        text = checks.condition(self.where, known, table)
        if not job.has_condition:
            return text, None, None
        if job.only is None or checks.names_in(self.where, list(known)) <= set(job.only):
            return None, text, None
        return None, None, text


def times(table: str, since: str | None, until: str | None, of: str | None = None) -> list[str]:
    """Conditions on rows of a table, in a step with the name `answered`: from `since` on, and before `until`.

    of: the table, named `first_table`, whose rows provide the date of times without one; None: the table itself.
    """
    first, last = _us(table)
    step = "answered" if of is None else "first_table"
    own_first, own_last = _us(of or table)
    found = []
    for option, text, sign, us in (("--from", since, ">=", last), ("--to", until, "<", first)):
        if text is None:
            continue
        at = moment(text, option)(f"(select min({own_first}) from {step})", f"(select max({own_last}) from {step})")
        column = "`time`" if table not in _FIRST_US else f"timestamp_micros({us})"
        found.append(f"{column} {sign} timestamp_micros({at})")
    return found


def chosen_by_time(table: str, tables: Mapping[str, Frame], since: str | None, until: str | None) -> Frame:
    """The rows of one of several tables that are in a span of time; moments without a date are those of exchanges."""
    conditions = times(table, since, until, "exchanges") if table != "exchanges" else times(table, since, until)
    if not conditions:
        return tables[table]
    both = {"answered": tables[table], "first_table": tables["exchanges"]}
    return ask(both, chosen=f"select * from answered where {' and '.join(conditions)}")


def _us(table: str) -> tuple[str, str]:
    """When rows of a table begin and end, in microseconds."""
    return _FIRST_US.get(table, "unix_micros(`time`)"), _LAST_US.get(table, "unix_micros(`time`)")


def moment(text: str, option: str = "--from") -> Callable[[str, str], str]:
    """A moment as people write it; returns a function: moments of the first and the last row -> its SQL, in us.

    ISO 8601, in UTC if it has no zone: "2026-01-31T10:15:00", "2026-01-31"; a time of the day of the first row,
    "10:15"; "-5m", before the last row; "+30s", after the first. Raises KproxyError for any other text.
    """
    given = text.strip()
    if given[:1] in ("-", "+"):
        try:
            span = span_us(given[1:])
        except ValueError:
            raise _no_moment(text, option) from None
        return lambda first, last: f"{last} - {span}" if given[0] == "-" else f"{first} + {span}"
    if found := _CLOCK.fullmatch(given):
        hours, minutes, seconds = (int(part or 0) for part in found.groups()[:3])
        if hours < 25 and minutes < 60 and seconds < 60:
            us = (hours * 3600 + minutes * 60 + seconds) * 1_000_000 + round(float(found[4] or 0) * 1e6)
            return lambda first, last: f"{first} - {first} % 86400000000 + {us}"
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        raise _no_moment(text, option) from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    since = at - datetime.fromtimestamp(0, UTC)
    us = (since.days * 86400 + since.seconds) * 1_000_000 + since.microseconds
    return lambda first, last: str(us)


def _second(us: int) -> str:
    return f"{datetime.fromtimestamp(us // 1_000_000, UTC):%Y-%m-%d %H:%M:%S}"


def _no_moment(text: str, option: str) -> KproxyError:
    return KproxyError(
        f"{option} {text!r} is no time: give one of UTC like '2026-01-31T10:15:00' or '10:15', or one before the end, "
        "like '-5m', or after the beginning, like '+30s'"
    )


def has_time(table: str) -> bool:
    """Whether rows of a table can be chosen by time."""
    return table in _FIRST_US or "time" in schema.BY_NAME[table].schema.names
