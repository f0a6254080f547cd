"""The questions behind the plots and lists of a report, each with its answer and its command line.

Duty: choose the step of time, and the few APIs, clients and topics that get a line in a plot; answer each question by
the `Question` that `kproxy analyze` uses, so that a figure in a report equals the result of its command.

Bounds: each answer has a limit of rows; names in conditions have at most LONGEST_NAME characters. Refuses to know
drawing.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kproxy.analysis import findings
from kproxy.analysis.beside import COMPARED, Beside, beside
from kproxy.analysis.beside import TABLES as PAIRED
from kproxy.analysis.conclusions import TABLES as OF_CONCLUSIONS
from kproxy.analysis.conclusions import conclusions
from kproxy.analysis.engine import Frame, first_rows, rows
from kproxy.analysis.jobs import JOBS
from kproxy.analysis.question import Question, chosen_by_time
from kproxy.analysis.questions import sections
from kproxy.analysis.questions.pieces import FEW
from kproxy.analysis.verdict import Verdict

if TYPE_CHECKING:
    import pyarrow as pa

# Fetches that may wait for data and answers that wait for a group's other members, and all others.
WAITING = "api in ('JoinGroup', 'SyncGroup') or (api in ('Fetch', 'ShareFetch') and coalesce(max_wait_ms, 1) > 0)"
AT_ONCE = "api not in ('JoinGroup', 'SyncGroup', 'Fetch', 'ShareFetch') or max_wait_ms = 0"

STEPS = 60  # of time, about
APIS = 6  # that have plots of their own
WAITING_APIS = 3
NAMES = 6  # lines in a plot
LONGEST_NAME = 200
MOST_ROWS = 20_000
LISTED = 12
SLOWEST = 10
# The sections of the overview that no question here has, with their rows.
SECTIONS = dict.fromkeys(("brokers", "clients", "topics", "groups"), LISTED)
SECTIONS |= {"span": 1, "apis": 20, "coordinators": 5, "leaders": 5, "zookeeper": 10}
MANY = 400  # rebalances in a plot
TABLES = tuple(
    dict.fromkeys((*sections.TABLES, *OF_CONCLUSIONS, *PAIRED))
)  # tables of sections, findings, the verdict and pairs

_STEPS_MS = (
    *(10**power * step for power in range(4) for step in (1, 2, 5)),
    *(10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000),
    *(3_600_000 * hours for hours in (1, 2, 3, 6, 12, 24, 48, 168, 336, 720, 2160, 8760)),
)


@dataclass(frozen=True)
class Figure:
    """A question and its answer. `asked` is the command line behind `kproxy analyze JOB PLACE`."""

    name: str
    question: Question
    rows: "pa.Table"
    limit: int

    def command(self, places: Sequence[str], more: Sequence[str] = ()) -> str:
        """The command that gives the same figures; `more`: options of captures."""
        question = self.question
        words = ["kproxy", "analyze", question.job.name, *places]
        for option, value in question.options.items():
            words += [f"--{option}", ",".join(value) if isinstance(value, list) else str(value)]
        given = (("--from", question.since), ("--to", question.until), ("--where", question.where))
        for flag, text in (*given, ("--having", question.having)):
            words += [flag, text] if text is not None else []
        return shlex.join([*words, "--limit", str(self.limit), *more])


@dataclass
class Figures:
    """The answers by name, with the span of time in microseconds since the epoch, and its step."""

    first_us: int
    last_us: int
    every: str
    by_name: dict[str, Figure] = field(default_factory=dict)
    sections: dict[str, tuple[Frame, int]] = field(default_factory=dict)
    beside: Mapping[str, Beside] = field(default_factory=dict)  # where there is another dataset
    other_findings: "Sequence[findings.Finding]" = ()
    findings: "Sequence[findings.Finding]" = ()
    verdict: Verdict | None = None

    def __getitem__(self, name: str) -> "pa.Table":
        return self.by_name[name].rows


def step_of(first_us: int, last_us: int) -> str:
    """A round step of time that cuts a span into about STEPS parts, as `--every` takes it."""
    least = (last_us - first_us) / 1000 / STEPS
    step = next((step for step in _STEPS_MS if step >= least), _STEPS_MS[-1])
    for size, unit in ((3_600_000, "hours"), (60_000, "minutes"), (1000, "seconds"), (1, "ms")):
        if step % size == 0:
            return f"{step // size} {unit}"
    raise AssertionError(step)


def answered(
    tables: Mapping[str, Frame],
    since: str | None = None,
    until: str | None = None,
    other: Mapping[str, Frame] | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> Figures | None:
    """All figures of tables between two moments, which are as `question.moment` reads them.

    None where there is no exchange. other: TABLES of an earlier dataset, to compare: its figures come first in
    `compare`. progress gets the name of the next question.
    """
    chosen = {name: chosen_by_time(name, tables, since, until) for name in TABLES}
    ((first_us, last_us, *_),) = rows(sections.span(chosen))
    if first_us is None:
        return None
    found = Figures(first_us, last_us, step_of(first_us, last_us))
    for name, question, limit, of_other in _questions(found, since, until, other is not None):
        progress(name)
        if of_other and other is not None:  # the other dataset is the earlier one
            frame = question.answer(other, tables["exchanges"])
        else:
            frame = question.answer(tables)
        found.by_name[name] = Figure(name, question, first_rows(frame, limit).arrow(), limit)
    progress("overview")
    found.sections = sections.overview(chosen, chosen=SECTIONS)
    progress("findings")
    found.findings, found.verdict = conclusions(chosen)
    if other is not None:
        theirs = {name: chosen_by_time(name, other, since, until) for name in TABLES}
        progress("both")
        found.beside = {name: beside(name, chosen, theirs) for name in COMPARED}
        found.other_findings = findings.findings(theirs)
    return found


def _questions(
    found: Figures, since: str | None, until: str | None, has_other: bool
) -> Iterator[tuple[str, Question, int, bool]]:
    """The questions in their order, with their limits, and whether it is about the other dataset as well.

    `found` has earlier answers, from which names are chosen.
    """

    def asked(name: str, job: str, limit: int = MOST_ROWS, **how: Any) -> tuple[str, Question, int, bool]:
        texts = {key: how.pop(key, None) for key in ("where", "having")}
        return name, Question(JOBS[job], how, since, until, **texts), limit, job == "compare"

    every = found.every
    for name, chosen, most in (("at_once", AT_ONCE, APIS), ("waiting", WAITING, WAITING_APIS)):
        yield asked(f"latency_{name}", "latency", 100, by=["api"], where=chosen)
        apis = _most(found[f"latency_{name}"], "api", "exchanges", most, FEW)
        if apis:
            only = f"({chosen}) and {_among('api', apis)}"
            yield asked(f"latency_{name}_over_time", "latency", by=["api"], every=every, where=only)
            yield asked(f"spread_{name}", "spread", by=["api"], every=every, where=only)
    yield asked("slow", "slow", SLOWEST, having="cause != 'long_poll'")
    yield asked("talkers", "talkers", by=["api"], every=every)
    yield asked("errors", "errors", LISTED, by=["api", "error"])
    yield asked("errors_over_time", "errors", by=["api", "error"], every=every)
    yield asked("throttle", "throttle", LISTED, by=["client"])
    if names := _most(found["throttle"], "client", "throttle_ms", NAMES):
        yield asked("throttle_over_time", "throttle", by=["client"], every=every, where=_among("client", names))
    yield asked("skew", "skew", LISTED, having="bytes > 0")
    yield asked("batch_sizes", "batch-sizes", 200)
    yield asked("batching", "batching", LISTED)
    yield asked("behind", "behind", LISTED)
    pairs = [
        (row["client"], row["topic"])
        for row in found["behind"].to_pylist()
        if row["lag_records"] and _is_typed(row["client"]) and _is_typed(row["topic"])
    ][:NAMES]
    if pairs:
        each = [f"(client = {quoted(client)} and topic = {quoted(topic)})" for client, topic in pairs]
        yield asked("behind_over_time", "behind", every=every, where=" or ".join(each))
    yield asked("group_lag", "group-lag", LISTED)
    yield asked("rebalances", "rebalances", MANY)
    yield asked("leader_changes", "leader-changes", every=every, where="change != 'created'")
    yield asked("retransmissions", "retransmissions", by=["broker"], every=every)
    yield asked("connections", "connections", LISTED, by=["broker"])
    yield asked("quality", "quality", 200)
    if has_other:
        yield asked("compare", "compare", 50, by=["api"])


def _most(answer: "pa.Table", name: str, value: str, count: int, least: int = 0) -> list[str]:
    """The names with the largest values, the largest first; names below `least` only if they are the first."""
    pairs = [(row[value] or 0, row[name]) for row in answer.to_pylist() if _is_typed(row[name])]
    largest = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:count]
    return [each for number, (amount, each) in enumerate(largest) if amount >= least or not number]


def _is_typed(name: Any) -> bool:
    """Whether somebody can type it into a condition."""
    return isinstance(name, str) and len(name) <= LONGEST_NAME and name.isprintable()


def _among(column: str, names: Sequence[str]) -> str:
    return f"{column} in ({', '.join(map(quoted, names))})"


def quoted(name: str) -> str:
    """A text as `--where` reads it."""
    return "'" + name.replace("\\", "\\\\").replace("'", "''") + "'"
