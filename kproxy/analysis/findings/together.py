"""Merges findings of one kind that have one reason: several clients or APIs fail for it, or it occurs repeatedly.

A topic that does not exist fails the Metadata, Produce and Fetch of each of its clients; a host without CPU time pauses
its brokers again and again. Only findings without a cause are merged: a consequence stands under its cause. Refuses to
know how anything is found.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import prod
from typing import Any

from kproxy.analysis.findings.finding import SEVERITIES, Finding, at, broker_name, clean, without_advice
from kproxy.analysis.findings.kinds import LARGEST, NAMED, SUMMED, outcome


def together(found: Sequence[Finding]) -> list[Finding]:
    """The findings, each matter once; found: those without a cause."""
    matters: dict[Hashable, list[Finding]] = {}
    for index, one in enumerate(_groups_first(found)):
        of_kind = _MATTERS.get(one.kind)
        matter = None if of_kind is None else of_kind[0](one)
        key = index if matter is None else (one.kind, one.cluster, matter)
        matters.setdefault(key, []).append(one)
    return [each for several in matters.values() for each in _taken(several)]


def _groups_first(found: Sequence[Finding]) -> list[Finding]:
    """A client's lag in a topic is its group's, by fetches instead of commits: it follows from that."""
    of_groups = {
        (one.cluster, _value(one, "topic"), client): index
        for index, one in enumerate(found)
        if one.kind == "growing_lag"
        for client in _value(one, "clients") or ()
    }
    alone: list[tuple[int, Finding]] = []
    followers: dict[int, list[Finding]] = {}
    for index, one in enumerate(found):
        key = (one.cluster, _value(one, "topic"), _value(one, "client"))
        group = of_groups.get(key) if one.kind == "growing_lag" else None
        if group is None:
            alone.append((index, one))
        else:
            followers.setdefault(group, []).append(without_advice(one))
    return [one._replace(consequences=(*one.consequences, *followers.get(index, ()))) for index, one in alone]


def merged(several: Sequence[Finding]) -> dict[str, Any]:
    """The evidence of findings of one kind: counts are summed, times the longest, APIs all; the rest is the first's."""
    numbers = [dict(one.evidence) for one in several]
    evidence = {name: value for each in reversed(numbers) for name, value in each.items()}
    for name in evidence:
        values = [each[name] for each in numbers if each.get(name) is not None]
        if name in SUMMED:
            evidence[name] = sum(values)
        elif name in LARGEST:
            evidence[name] = max(values)
        elif name in (*NAMED, "api") or (name == "clients" and isinstance(values[0], str)):
            evidence[name] = ", ".join(sorted({each for value in values for each in value.split(", ")}))
    if any("asked" not in each for each in numbers):
        evidence.pop("asked", None)
    if "outcome" in evidence:
        evidence["outcome"] = outcome(evidence)
    if len({each.get("happened") for each in numbers}) > 1:
        evidence.pop("happened", None)
    return evidence


def _taken(several: Sequence[Finding]) -> Sequence[Finding]:
    """The finding of one matter, or those given if there is nothing to take together."""
    if len(several) < 2:
        return several
    _, describe = _MATTERS[several[0].kind]
    ordered = sorted(several, key=lambda one: (-one.weight, one.where))
    where, more = describe(ordered)
    places = [dict(one.place) for one in ordered]
    place = {name: value for name, value in places[0].items() if all(each.get(name) == value for each in places)}
    times = [(one.since_ns, one.until_ns) for one in ordered]
    begins, ends = [since for since, _ in times if since is not None], [at for each in times for at in each if at]
    return [
        ordered[0]._replace(
            severity=min((one.severity for one in ordered), key=SEVERITIES.index),
            where=where,
            place=tuple(place.items()),
            since_ns=min(begins, default=None),
            until_ns=max(ends, default=None),
            evidence=tuple({**merged(ordered), **more}.items()),
            weight=1 - prod(1 - one.weight for one in ordered),
            consequences=tuple(each for one in ordered for each in one.consequences),
        )
    ]


def _value(one: Finding, name: str) -> Any:
    return dict(one.place).get(name)


def _refused(several: Sequence[Finding]) -> tuple[str, Mapping[str, Any]]:
    """Requests of one client, or about one topic, that are refused."""
    clients = {_value(one, "client") for one in several}
    topics = sorted({topic for one in several if (topic := _value(one, "topic")) is not None})
    named = [f"topic {clean(topics[0])}{f' and {len(topics) - 1} more' if len(topics) > 1 else ''}"] if topics else []
    if len(clients) == 1:
        return at(*clients, *named), {}
    return ", ".join([*named, f"{len(clients)} clients"]), {"clients": len(clients)}


def _paused(several: Sequence[Finding]) -> tuple[str, Mapping[str, Any]]:
    """Pauses of one broker or of several: where, and how often and how long in all."""
    times = [dict(one.evidence)["paused_ns"] for one in several]
    counts: dict[str, int] = {}
    for one in several:
        number = _value(one, "broker_id")
        name = broker_name(_value(one, "broker"), None) if number is None else f"broker {number}"
        counts[name] = counts.get(name, 0) + 1
    more = {
        "paused_ns": max(times),
        "clients": max(dict(one.evidence)["clients"] for one in several),
        "times": len(several),
        "in_all_ns": sum(times),
    }
    if len(counts) == 1:
        return several[0].where, more
    by_frequency = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    often = {1: "once", 2: "twice"}
    return ", ".join(f"{name} ({often.get(count, f'{count} times')})" for name, count in by_frequency), more


def _waited(several: Sequence[Finding]) -> tuple[str, Mapping[str, Any]]:
    """Waits for one follower, or at the same leaders: how often and how long in all."""
    in_all_ns = sum(dict(one.evidence)["longest_ns"] for one in several)
    return several[0].where, {"times": len(several), "in_all_ns": in_all_ns}


def _slow(several: Sequence[Finding]) -> tuple[str, Mapping[str, Any]]:
    """Brokers that are slow together: the numbers of the slowest."""
    return several[0].where, {}


_Matter = tuple[Callable[[Finding], Hashable], Callable[[Sequence[Finding]], tuple[str, Mapping[str, Any]]]]
_BY_TOPIC: _Matter = (lambda one: _value(one, "topic"), _refused)
_BY_CLIENT: _Matter = (lambda one: _value(one, "client"), _refused)
# By kind: the key that findings of one matter share, and the text for several of them.
_MATTERS: Mapping[str, _Matter] = {
    **dict.fromkeys(("unknown_topic", "not_enough_replicas", "no_leader", "timed_out"), _BY_TOPIC),
    **dict.fromkeys(("refused_authorization", "refused_too_large", "refused_records"), _BY_CLIENT),
    "broker_paused": (lambda one: True, _paused),
    "slow_broker": (lambda one: dict(one.evidence).get("numbers_of") and True, _slow),
    "writes_waiting_together": (lambda one: one.where, _waited),
}
