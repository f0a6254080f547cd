"""A finding, and a probe: the question whose rows are judged to give findings.

Duty: the two types, the order of findings, and the number of findings of one kind. Refuses to know any single kind.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kproxy.analysis.engine import Frame
from kproxy.analysis.findings.kinds import CONTROLLED_SHUTDOWN, KINDS
from kproxy.analysis.findings.thresholds import Limits

CRITICAL, WARNING, NOTE = "critical", "warning", "note"
SEVERITIES = (CRITICAL, WARNING, NOTE)  # a standstill or a loss; a cost; worth knowing

Tables = Mapping[str, Frame]


class Moment(NamedTuple):
    """Failures in a step of time: counts by the names of the evidence, for one API or one error."""

    at_ns: int
    name: str  # of the API or the error
    counts: Mapping[str, int]
    is_replicated: bool = False  # the API's answers wait until other brokers have a record, or the coordinator's log


class Finding(NamedTuple):
    """A remarkable fact, with its place and evidence.

    `place` has the names of conditions (client, topic, broker, ...) with their values, `where` is the same in words.
    `evidence` has numbers by name, with units in the names, like columns of tables. Times are nanoseconds since the
    epoch, None if unknown. `weight` orders findings of one severity, from 0 to 1. `more` is the number of further
    places of the same kind that were left out after this one. `consequences` are findings that this one explains:
    they have no advice of their own.
    """

    kind: str
    severity: str
    cluster: str | None
    where: str
    place: tuple[tuple[str, Any], ...]
    since_ns: int | None
    until_ns: int | None
    evidence: tuple[tuple[str, Any], ...]
    why: str
    change: str
    settings: tuple[str, ...]
    job: str | None  # job of `kproxy analyze` with more details
    weight: float
    more: int = 0
    consequences: "tuple[Finding, ...]" = ()

    @property
    def title(self) -> str:
        return CONTROLLED_SHUTDOWN if self.is_controlled_shutdown else KINDS[self.kind].title

    @property
    def is_controlled_shutdown(self) -> bool:
        """Whether a broker handed its leaders over before it was gone."""
        return self.kind == "broker_gone" and bool(dict(self.evidence).get("handed_over"))

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Finding":
        """The finding that `as_dict` made plain."""
        plain = {name: row[name] for name in cls._fields if name in row}
        plain["consequences"] = tuple(map(cls.of, row.get("consequences", ())))
        pairs = {name: tuple(plain[name].items()) for name in ("place", "evidence")}
        return cls(**{**plain, **pairs, "settings": tuple(plain["settings"])})

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            **self._asdict(),
            "title": self.title,
            "place": dict(self.place),
            "evidence": dict(self.evidence),
            "settings": list(self.settings),
            "consequences": [one.as_dict() for one in self.consequences],
        }


def found(
    kind: str,
    severity: str,
    weight: float,
    cluster: str | None,
    where: str,
    place: Mapping[str, Any],
    times_us: tuple[int | None, int | None],
    evidence: Mapping[str, Any],
    change: str | None = None,
) -> Finding:
    """A finding of a kind; times in microseconds since the epoch. change: where it is not that of the kind."""
    known = KINDS[kind]
    since, until = (None if us is None else us * 1000 for us in times_us)
    return Finding(
        kind,
        severity,
        cluster,
        where,
        tuple(place.items()),
        since,
        until,
        tuple((name, value) for name, value in evidence.items() if value is not None),
        known.why,
        change or known.change,
        known.settings,
        known.job,
        min(1.0, max(0.0, weight)),
    )


class BetweenHostAndBroker(Protocol):
    """A row about a host and a broker that it connects to."""

    @property
    def cluster(self) -> str | None: ...
    @property
    def host(self) -> str: ...
    @property
    def broker(self) -> str: ...  # its address
    @property
    def broker_id(self) -> int | None: ...
    @property
    def first_us(self) -> int: ...
    @property
    def last_us(self) -> int: ...


def found_between(
    row: BetweenHostAndBroker,
    kind: str,
    severity: str,
    weight: float,
    evidence: Mapping[str, Any],
    change: str | None = None,
) -> Finding:
    """A finding about a host and a broker; change: as for `found`."""
    return found(
        kind,
        severity,
        weight,
        row.cluster,
        f"host {clean(row.host)}, {broker_name(row.broker, row.broker_id)}",
        {"host": row.host, "broker": row.broker, "broker_id": row.broker_id},
        (row.first_us, row.last_us),
        evidence,
        change,
    )


@dataclass(frozen=True)
class Probe:
    """A question to tables and how its rows are judged.

    `ask` makes a frame whose columns are the fields of `row`, in their order, the rows with the most weight first;
    `judge` is a function of one row and the limits, and yields only remarkable findings. `shared`: frames of few rows
    that several probes read, computed once; `ask` gets them by their names, like tables. `moments`: the failures of a
    row by time, so that each cause can have its part of a finding.
    """

    kinds: tuple[str, ...]
    tables: tuple[str, ...]
    ask: Callable[[Tables, Limits], Frame]
    row: type[Any]
    judge: Callable[[Any, Limits], Iterable[Finding]]
    shared: Mapping[str, Callable[[Tables], Frame]] = field(default_factory=dict)
    moments: Callable[[Any], Sequence[Moment]] | None = None


def ranked(found: Sequence[Finding], limits: Limits) -> list[Finding]:
    """Findings ordered by severity, then by weight; at most `places_per_kind` of each kind."""

    def order(one: Finding) -> tuple[Any, ...]:
        return (SEVERITIES.index(one.severity), -one.weight, one.kind, one.cluster or "", one.where)

    most = max(1, int(limits.places_per_kind))
    kept: dict[str, list[Finding]] = {}
    left: dict[str, int] = {}
    for one in sorted(found, key=order):
        of_kind = kept.setdefault(one.kind, [])
        if len(of_kind) < most:
            of_kind.append(one)
        else:
            left[one.kind] = left.get(one.kind, 0) + 1
    for kind, count in left.items():
        kept[kind][-1] = kept[kind][-1]._replace(more=count)
    return sorted((one for of_kind in kept.values() for one in of_kind), key=order)


def at(client: str | None, *more: str) -> str:
    """The place in words: the client, if known, and the other parts."""
    return ", ".join([*([f"client {client}"] if client else []), *more]) or "all clients"


def broker_name(address: str, broker_id: int | None) -> str:
    """A broker in words: its id, if known, and its address."""
    return f"broker {address}" if broker_id is None else f"broker {broker_id} ({address})"


def without_advice(one: Finding) -> Finding:
    """A finding as a consequence of another one, whose advice counts."""
    return one._replace(change="", settings=())


def clean(text: str | None, otherwise: str = "unknown") -> str:
    """A name from the wire, or a substitute for none."""
    return otherwise if text is None or text == "" else text
