"""Output of a verdict: one sentence, then four figures. Text from the wire cannot move the cursor.

Duty: the words for causes and for their consequences.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kproxy import wording
from kproxy.analysis.findings import KINDS, Finding
from kproxy.analysis.verdict import FAILURES, Figures, Verdict
from kproxy.views import findings, units
from kproxy.views.terminal import printable

EVENTS_SAID = 8  # of the timeline
CAUSES_SAID = 3  # causes with a clause in the sentence; further causes are listed by kind
KINDS_SAID = 6  # kinds of further causes, by their titles

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def _time(one: Finding, name: str) -> str:
    return units.duration(dict(one.evidence).get(name) or 0)


# By kind of cause: its clause in the sentence.
_CLAUSES: Mapping[str, Callable[[Finding], str]] = {
    "broker_gone": lambda one: (
        f"{_broker(one)} was away for {_gone(one)} after a controlled shutdown"
        if one.is_controlled_shutdown
        else f"{_broker(one)} was gone for {_gone(one)}"
    ),
    "broker_absent": lambda one: f"{_broker(one)} was not there from the capture's beginning, {_absent(one)}",
    "broker_standing_still": lambda one: f"{_broker(one)} stood still for {_gone(one)}",
    "broker_paused": lambda one: _paused(one),
    "writes_waiting_together": lambda one: _waited(one),
    "all_brokers_silent": lambda one: f"{one.where} answered nothing for {_time(one, 'silent_ns')} at once",
    "coordinator_lost": lambda one: f"{one.where} was not served by its coordinator for {_time(one, 'outage_ns')}",
    "open_transaction": lambda one: (
        f"{one.where.split(', client')[0]} left a transaction open for {_time(one, 'open_ns')}"
    ),
    "topic_deleted": lambda one: (
        f"{one.where} was deleted while {_number(dict(one.evidence)['clients'])} "
        f"{_plural('client', dict(one.evidence)['clients'])} used it"
    ),
    "producers_standing_still": lambda one: _still(one),
    "offline_partitions": lambda one: (
        f"{one.where} had no leader for {_time(one, 'longest_ns')} from the first report of it"
    ),
}

# Effects of retries without a producer id on records, by the name of the evidence that counts them.
_DOUBLED = {
    "doubled_records": "written twice",
    "reordered_records": "written out of order",
    "doubtful_records": "perhaps written twice",
}


def sentence(verdict: Verdict) -> str:
    """Return the sentence of a verdict: the most severe causes first."""
    figures = verdict.figures
    unread = _unread(figures) if figures.encrypted else ""
    if not figures.requests:
        return f"No readable requests. {unread}" if unread else "No requests."
    chosen = verdict.gravest()
    shown = chosen[:CAUSES_SAID]
    before = [None, *(one.cluster for one in shown)]  # a cluster is named once
    clauses = [printable(_clause(one, one.cluster != of)) for one, of in zip(shown, before, strict=False)]
    failed = figures.unanswered + figures.refused
    if not clauses:
        is_unknown = verdict.is_blind and not failed
        clauses = [] if is_unknown else [_without_cause(figures, failed)]
        clauses += [f"{_count(verdict.total, 'finding')} to note"] if verdict.total else ["nothing stands out"]
    left = len(chosen) - CAUSES_SAID
    if left > 0:
        clauses.append(f"and {_number(left)} more {_plural('cause', left)}: {_kinds(chosen[CAUSES_SAID:])}")
        clauses += _larger_loss(shown, chosen[CAUSES_SAID:])
    text = "; ".join(clauses)
    blind = f" {_lost(figures)}: whether these failed is not known." if verdict.is_blind else ""
    is_name = bool(shown) and text.startswith(f"{printable(str(shown[0].cluster))}: ")
    first = text[0] if is_name else text[0].upper()
    return " ".join(filter(None, (f"{first}{text[1:]}.{blind}{_rigid(verdict)}", unread)))


def _lost(of: Figures) -> str:
    return f"The capture lacks the answers of {of.lost:,} of {_count(of.requests, 'request')}"


def _unread(of: Figures) -> str:
    """Return the sentence about connections that nobody can read."""
    are, them = ("is", "it") if of.encrypted == 1 else ("are", "them")
    share = f"{of.encrypted:,} of {_count(of.connections, 'connection')} {are}"
    return f"{share} encrypted with TLS: what happened in {them} is not known."


def _without_cause(of: Figures, failed: int) -> str:
    """Return the number of failed requests that no finding explains."""
    if not failed:
        return "No readable request failed" if of.encrypted else "Nothing failed"
    text = f"{failed:,} of {_count(of.requests, 'request')} failed"
    if not of.retried:
        return text
    which = "which" if of.retried == failed else f"{of.retried:,} of which"
    return f"{text}, {which} clients send again by themselves, as when leaders move"


def _kinds(others: Sequence[Finding]) -> str:
    """Return the kinds of causes, the most severe first, with a count above one, like "lag that grows (3)"."""
    counts = Counter(map(_title, others))
    named = [kind if count == 1 else f"{kind} ({count:,})" for kind, count in counts.items()]
    more = len(named) - KINDS_SAID
    text = ", ".join(named[:KINDS_SAID])
    return f"{text} and {_number(more)} more {_plural('kind', more)}" if more > 0 else text


def _title(one: Finding) -> str:
    return _inside(one.title)


def _inside(title: str) -> str:
    """Return a title as it stands inside a sentence: an abbreviation, such as TLS, stays one."""
    return title if title[1].isupper() else f"{title[0].lower()}{title[1:]}"


def figures(verdict: Verdict) -> Iterator[tuple[str, str, str]]:
    """Yield four figures as (name, figure, explanation)."""
    of = verdict.figures
    failed = of.unanswered + of.refused
    share = f" ({failed / of.requests:.1%})" if of.requests and failed else ""
    again = f" ({of.retried:,} for clients to send again)" if of.retried else ""
    none = "none was refused" if of.lost or of.left_out else "all were answered, none refused"
    parts = f"{of.unanswered:,} unanswered, {of.refused:,} refused{again}" if failed else none
    parts += f"; the capture lacks {_count(of.lost, 'answer')}" if of.lost else ""
    parts += (
        f"; {of.everyday:,} {'answer' if of.everyday == 1 else 'answers'} with errors of rebalances and elections apart"
        if of.everyday
        else ""
    )
    yield "failed", f"{failed:,} of {_count(of.requests, 'request')}{share}", parts
    still = "nobody" if of.longest_ns is None else units.duration(of.longest_ns)
    yield "stood still", still, printable(of.longest_where or "")
    p99 = "unknown" if of.p99_ns is None else units.duration(of.p99_ns)
    without = f"; {_count(of.left_out, 'request')} without an answer not included" if of.left_out else ""
    yield "p99", p99, f"of {_count(of.answered, 'answer')}, without long polls{without}"
    behind = _count(of.behind_records, "record") if of.behind_records else "nobody"
    whose = f"group {of.behind_group}" if of.behind_records else "no lag of committed offsets was seen"
    if of.behind_fetched:
        whose += f"; {of.behind_fetched_records or 0:,} more in {_count(of.behind_fetched, 'partition')}"
        whose += " without a commit, by its last fetches"
    if left := of.behind_uncommitted - of.behind_fetched:
        whose += f"; {_count(left, 'partition')} without a commit{' or fetch' if of.behind_fetched else ''} not counted"
    yield "behind", behind, printable(whose)


def timeline(verdict: Verdict) -> list[tuple[str, str]]:
    """Return what happened as (time in UTC, event), the first first."""
    return [
        (units.time(one.since_ns or 0, decimals=1), printable(_event(one))) for one in verdict.timeline(EVENTS_SAID)
    ]


def more_events(verdict: Verdict) -> int:
    """Return the number of findings that `timeline` leaves out."""
    return max(0, len(verdict.felt) - EVENTS_SAID)


def _event(one: Finding) -> str:
    return _CLAUSES[one.kind](one) if one.kind in _CLAUSES else f"{findings.where(one)}: {_title(one)}"


def not_found(verdict: Verdict, apis: Collection[str]) -> str:
    """Return the kinds of findings that were looked for in vain, in a sentence; "" if there are none."""
    kinds = verdict.not_found(apis)
    if not kinds:
        return ""
    lost = " No offset was acknowledged for two different batches, as after a loss." if "records_lost" in kinds else ""
    return f"Checked, nothing found: {', '.join(_inside(KINDS[kind].title) for kind in kinds)}.{lost}"


def counted(verdict: Verdict, shown: int) -> str:
    """Return the number of findings, of their consequences, and of those shown, as text."""
    of = _count(verdict.total, "finding")
    follows = f"; {_count(verdict.explained, 'more')} follow from them" if verdict.explained else ""
    return f"{of}{follows}" + (f"; {shown} shown" if shown < verdict.total else "")


def as_dict(verdict: Verdict) -> dict[str, Any]:
    return {"sentence": sentence(verdict), **verdict.as_dict()}


def _rigid(verdict: Verdict) -> str:
    """Return the sentence about topics whose writes fail whenever one broker restarts; "" if there are none."""
    found = [one for one in verdict.findings if one.kind == "no_broker_may_stop"]
    if not found:
        return ""
    named = [str(dict(one.place)["topic"]) for one in found][:CAUSES_SAID]
    more = sum(1 + one.more for one in found) - len(named)
    names = ", ".join(named) + (f" and {more:,} more" if more else "")
    topics = f"{_plural('topic', len(named))} {names}"
    return printable(f" While a broker with a replica is away, writes with acks=all fail to {topics}.")


def _clause(one: Finding, has_cluster: bool) -> str:
    if one.kind not in _CLAUSES:
        return f"{findings.where(one, has_cluster)}: {findings.sentence(one)}"
    own, followed = _CLAUSES[one.kind](one), ", ".join(_followed(one))
    return f"{own}: {followed}" if followed else own


def _followed(one: Finding) -> Iterator[str]:
    """Yield the consequences of a cause that users notice."""
    of: dict[str, list[Finding]] = {}
    for each in one.consequences:
        of.setdefault(each.kind, []).append(each)
    for each in of.get("producers_standing_still", ()):
        yield _still(each)
    if lost := sum(dict(each.evidence)["records"] for each in of.get("records_lost", ())):
        yield f"{lost:,} acknowledged {_plural('record', lost)} {'is' if lost == 1 else 'are'} lost"
    given_up = [dict(each.evidence) for each in of.get("records_given_up", ())]
    if given_up:
        yield f"producers {_given_up(given_up)}"
    if groups := of.get("coordinator_lost"):
        times = _range([dict(each.evidence)["outage_ns"] for each in groups])
        verb = "stood still"
        yield f"{_number(len({each.where for each in groups}))} {_plural('group', len(groups))} {verb} for {times}"
    if failed := _failed(one):
        yield f"{failed:,} {_plural('request', failed)} failed"
    if offline := of.get("offline_partitions"):
        count = sum(dict(each.evidence)["partitions"] for each in offline)
        times = _range([dict(each.evidence)["longest_ns"] for each in offline])
        yield f"{_number(count)} {_plural('partition', count)} had no leader for {times} from the first report of it"
    if stuck := of.get("stuck_stable_offset"):
        behind = sum(dict(each.evidence)["behind_records"] for each in stuck)
        topics = sorted({str(dict(each.place).get("topic")) for each in stuck})
        yield f"readers of committed data of {', '.join(topics[:3])} are {_count(behind, 'record')} behind"
    doubled = [
        dict(each.evidence) for name in ("resent_not_idempotent", "doubtful_records") for each in of.get(name, ())
    ]
    for name, outcome in _DOUBLED.items():
        if records := sum(each.get(name) or 0 for each in doubled):
            yield f"{records:,} {_plural('record', records)} {outcome}"


def _given_up(several: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of records that producers gave up; if it is a minimum, with the time that may have more."""
    records = sum(each["given_up_records"] for each in several)
    about = sum(each.get("about_records") or 0 for each in several)
    open_ns = sum(each["unsent_ns"] for each in several if each.get("at_least_records"))
    unsent = f" and on about {units.number(about)} more before sending them" if about else ""
    more = f", possibly far more: {units.duration(open_ns)} without records" if open_ns else ""
    least = "at least " if open_ns else ""
    return f"gave up on {least}{records:,} {_plural('record', records)}{unsent}{more}"


def _larger_loss(shown: Sequence[Finding], others: Sequence[Finding]) -> Iterator[str]:
    """Yield the records that a producer gave up on for a cause not shown, if they weigh more than those shown."""

    def losses(causes: Sequence[Finding]) -> list[Finding]:
        return [one for cause in causes for one in (cause, *cause.consequences) if one.kind == "records_given_up"]

    heaviest = max(losses(others), key=lambda one: one.weight, default=None)
    if heaviest is not None and heaviest.weight > max((one.weight for one in losses(shown)), default=0):
        yield printable(f"{heaviest.where} {_given_up([dict(heaviest.evidence)])}")


def _failed(one: Finding) -> int:
    """Return the number of failed requests; unanswered requests count once, though broker and clients report them."""
    number = dict(one.place).get("broker_id")
    own = dict(one.evidence).get("failed") or 0
    its = others = 0
    for each in one.consequences:
        failed = (dict(each.evidence).get("failed") or 0) if each.kind in FAILURES else 0
        if each.kind in ("unanswered", "client_timeouts") and dict(each.place).get("broker_id") == number:
            its += failed
        else:
            others += failed
    return max(own, its) + others


def _still(one: Finding) -> str:
    """Return the number of producers that stood still, and the duration, as text."""
    of = dict(one.evidence)
    who = f"{_number(of['clients'])} of {_number(of['producers'])} producers"
    if of["clients"] == of["producers"]:
        who = "the only producer" if of["clients"] == 1 else f"all {_number(of['clients'])} producers"
    return f"{who} stood still for {_range([of.get('shortest_ns', of['longest_ns']), of['longest_ns']])}"


def _broker(one: Finding) -> str:
    number = dict(one.place).get("broker_id")
    return one.where if number is None else f"broker {number}"


def _paused(one: Finding) -> str:
    """Return how long a broker paused, or how often and how long brokers did."""
    times = dict(one.evidence).get("times")
    often = "" if times is None or "broker" not in dict(one.place) else f" {_number(times)} times"
    return f"{_broker(one)} paused{often} for {'' if times is None else 'up to '}{_time(one, 'paused_ns')}"


def _waited(one: Finding) -> str:
    """Return the place and the duration of writes that waited together, and the follower if it is known."""
    of = dict(one.evidence)
    number, times = dict(one.place).get("broker_id"), of.get("times")
    follower = "" if number is None else f" for broker {number}, their follower"
    how_long = f"{_number(times)} times for up to " if times else "for "
    writes = f"writes with acks=all at {of['leaders']} waited together{follower}"
    return f"{writes}, {how_long}{_time(one, 'longest_ns')}"


def _gone(one: Finding) -> str:
    time = _time(one, "silent_ns")
    if "away_ns" in dict(one.evidence):
        time = f"{_time(one, 'away_ns')} to {time}"
    return time if dict(one.evidence).get("is_back") else f"{time}, up to the end"


def _absent(one: Finding) -> str:
    time = _time(one, "absent_ns")
    is_back = dict(one.evidence).get("is_back")
    if "away_ns" in dict(one.evidence):
        return f"for {_time(one, 'away_ns')} to {time}{'' if is_back else ', up to its end'}"
    return f"for {time}" if is_back else f"up to its end {time} later"


def _range(times_ns: Sequence[int]) -> str:
    least, most = units.duration(min(times_ns)), units.duration(max(times_ns))
    return most if least == most else f"{least} to {most}"


def _number(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _count(count: int, noun: str) -> str:
    return f"{count:,} more" if noun == "more" else wording.counted(count, noun)
