"""Judges the names of a request by the rules for its API, in slices; other connections have their turn between slices.

Duty: return error codes and one verdict for names. Refuses to know the request's bytes and the effect of a verdict.
"""

from collections.abc import Callable, Iterable, Iterator
from uuid import UUID

from kproxy.protocol.apis import UNKNOWN_TOPIC_ID as UNKNOWN_TOPIC_ID_CODE
from kproxy.protocol.codec import Slices
from kproxy.proxy.filters.policy.policy import LISTS, UNKNOWN_TOPIC_ID, ApiRules, Verdict
from kproxy.proxy.filters.policy.refusals import CODES
from kproxy.proxy.filters.policy.resources import CLUSTER, GROUP, TOPIC, TRANSACTIONAL_ID, Names

SLICE_NAMES = 128  # names judged between two yields; a long name counts as several (`work_of`)
NAME_SHIFT = 6

Denied = dict[tuple[str, str | UUID], int]  # (kind, name or topic id) -> the error code


def judge(
    rules: ApiRules, names: Names, api: str, name_of: Callable[[UUID], str | None]
) -> Slices[tuple[Denied, Verdict]]:
    """Return (error codes of denied names, verdict for the audit: the first denied name's, otherwise any name's)."""
    if rules.is_of_cluster and not rules.cluster().allowed:
        return {(CLUSTER, ""): CODES[CLUSTER]}, rules.cluster()
    denied: Denied = {}
    work = 0
    first: Verdict | None = None
    verdict: Verdict | None = None

    for kind, found in (
        (TOPIC, names.topic),
        (GROUP, names.group),
        (TRANSACTIONAL_ID, names.transactional_id),
    ):
        for name in found:
            if work >= SLICE_NAMES:
                work = 0
                yield
            work += 1 + (len(name) >> NAME_SHIFT)
            verdict = rules.named(kind, name)
            if not verdict.allowed:
                first = first or verdict
                denied[kind, name] = CODES[kind]
    for topic_id in names.topic_id:
        if work >= SLICE_NAMES:
            work = 0
            yield
        work += 1
        verdict = by_id(rules, topic_id, name_of)
        if not verdict.allowed:
            first = first or verdict
            denied[TOPIC, topic_id] = UNKNOWN_TOPIC_ID_CODE if verdict is UNKNOWN_TOPIC_ID else CODES[TOPIC]
    if names.all_of is not None:
        verdict = rules.nothing((names.all_of,)) if api in LISTS else rules.all_of(names.all_of)
        if not verdict.allowed:
            first = first or verdict
            denied[CLUSTER, ""] = CODES[CLUSTER]
    if names.expression is not None:
        verdict = rules.all_of(TOPIC)
        if not verdict.allowed:
            first = first or verdict
            denied[CLUSTER, ""] = CODES[TOPIC]
    if names.cluster:
        verdict = rules.cluster()
        if not verdict.allowed:
            first = first or verdict
            denied[CLUSTER, ""] = CODES[CLUSTER]
    if verdict is None:
        verdict = rules.nothing()
        if not verdict.allowed:
            first = verdict
            denied[CLUSTER, ""] = CODES[CLUSTER]
    return denied, first or verdict


def by_id(rules: ApiRules, topic_id: UUID, name_of: Callable[[UUID], str | None]) -> Verdict:
    """Return the verdict about a topic id. name_of: returns the name of a topic id, None for an unknown one."""
    if not rules.depends_on(TOPIC):
        return rules.named(TOPIC, "")
    name = name_of(topic_id)
    return UNKNOWN_TOPIC_ID if name is None else rules.named(TOPIC, name)


def judge_created(also: ApiRules, names: Names, verdict: Verdict) -> Slices[tuple[Denied, Verdict]]:
    """Return the result of `judge` for the topics that a broker would create."""
    denied: Denied = {}
    for some in in_slices(names.also):
        yield
        for name in some:
            found = also.named(TOPIC, name)
            if not found.allowed:
                verdict = found if not denied else verdict
                denied[TOPIC, name] = CODES[TOPIC]
    return denied, verdict


def may_not_create(also: ApiRules | None, names: Iterable[str]) -> Slices[bool]:
    """Return whether the client may not create one of the topics that its Metadata names."""
    if also is not None:
        for some in in_slices(names):
            yield
            if not all(also.named(TOPIC, name).allowed for name in some):
                return True
    return False


def work_of(names: Iterable[str]) -> int:
    """Return the work of judging names, as a number of names of usual length."""
    return sum(1 + (len(name) >> NAME_SHIFT) for name in names)


def in_slices(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of names, each to be judged between two yields."""
    some: list[str] = []
    work = 0
    for name in names:
        some.append(name)
        work += 1 + (len(name) >> NAME_SHIFT)
        if work >= SLICE_NAMES:
            yield some
            some, work = [], 0
    yield some
