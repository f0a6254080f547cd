"""The registry of a run of old Kafka beside ZooKeeper's transaction log and the consumers' own logs."""

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kproxy.analysis import jobs
from kproxy.analysis.duck import Tables
from kproxy.convert.processes import convert
from kproxy.insight.membership.registry_groups import ConsumerGroups
from kproxy.insight.registry import Ends, rows
from kproxy.insight.rows import GroupEvent, Rebalance, RegistryRow
from kproxy.zookeeper.session import Session
from tests.knowledge.judge import Difference
from tests.knowledge.old import GROUP
from tests.streams import Stream, streams

CHANGES = ("create", "delete", "setData")
# What a deed is called as the cause of a rebalance, and how long after it the registry says so at most.
CAUSES = {
    "join": ("member_joined", 30),
    "leave": ("member_left", 5),
    "kill": ("session_expired", 15),
    "freeze": ("session_expired", 15),
    "thaw": ("member_joined", 15),
}

EXPLAINED = {
    "an expiry that ended a session": (
        "ZooKeeper logs the end of a dead consumer's session (closeSession) and tells nobody on the wire: its nodes "
        "are gone from the next list of the folder."
    ),
}


class OldRun:
    """A folder of `old.py`, or what `recorded.py` keeps of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _text(self, name: str) -> str:
        packed = self.folder / f"{name}.gz"
        return gzip.decompress(packed.read_bytes()).decode() if packed.exists() else (self.folder / name).read_text()

    @cached_property
    def ports(self) -> dict[str, int]:
        return {line["server"]: line["port"] for line in map(json.loads, self._text("ports.jsonl").splitlines())}

    @cached_property
    def deeds(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._text("events.jsonl").splitlines()]

    @cached_property
    def capture(self) -> Path:
        packed = self.folder / "traffic.pcap.zst"
        return packed if packed.exists() else self.folder / "traffic.pcap"

    @cached_property
    def connections(self) -> list[Stream]:
        """Those to ZooKeeper."""
        return streams(self.capture, self.ports["zookeeper"].__eq__)

    @cached_property
    def transactions(self) -> list[tuple[str, str, int]]:
        """(session, operation, zxid) of ZooKeeper's log."""
        lines = re.finditer(
            r"session 0x([0-9a-f]+) cxid 0x[0-9a-f]+ zxid 0x([0-9a-f]+) (\w+)", self._text("txnlog.txt")
        )
        return [(f"0x{line[1]}", line[3], int(line[2], 16)) for line in lines]

    def consumers(self, pattern: str) -> list[tuple[int, str, re.Match[str]]]:
        """(time in ns, consumer, what was found) of the lines of the consumers' logs that have a pattern."""
        lines = re.finditer(rf"^(c\d) (\S+ \S+) \w+ .*?(?:{pattern}).*", self._text("consumers.log"), re.MULTILINE)
        return sorted(((_time_ns(line[2]), f"{GROUP}_{line[1]}", line) for line in lines), key=lambda found: found[:2])

    @cached_property
    def rows(self) -> list[RegistryRow]:
        found: list[RegistryRow] = []
        for number, talk in enumerate(self.connections):
            session = Session()
            for side, data, now in talk.parts:
                session.receive(side, data, now)
            session.close()
            for event in session.events:
                found += rows(event, "old", Ends("127.0.0.1", number))
        return sorted(found, key=lambda row: row.time_ns)

    @cached_property
    def told(self) -> list[Any]:
        """The rows of groups."""
        groups = ConsumerGroups("old")
        return [each for row in self.rows for each in groups.feed(row)] + list(groups.finish())

    @cached_property
    def rebalances(self) -> list[Rebalance]:
        return [each for each in self.told if isinstance(each, Rebalance)]

    def happened(self, event: str) -> list[GroupEvent]:
        return [each for each in self.told if isinstance(each, GroupEvent) and each.event == event]


def differences(run: OldRun) -> Iterator[Difference]:
    """Where the registry's rows and those of groups are not what ZooKeeper and the consumers logged."""
    yield from _changes(run)
    yield from _rebalances(run)
    yield from _races(run)
    yield from _two_owners(run)


def _changes(run: OldRun) -> Iterator[Difference]:
    """The tree's timeline, and sessions."""
    logged = Counter(each for each in run.transactions if each[1] in CHANGES)
    known = Counter((row.session, row.op, row.zxid) for row in run.rows if row.op in CHANGES and row.error is None)
    for each in (logged - known).elements():
        yield Difference("a change that is in no row", each)
    for each in (known - logged).elements():
        yield Difference("a row that is no change", each)
    opened = {session for session, op, _ in run.transactions if op == "createSession"}
    seen = {row.session for row in run.rows if row.op == "connect" and row.error is None}
    for session in opened ^ seen:
        yield Difference("a session of one side only", session, session in opened, session in seen)
    ended = {session for session, op, _ in run.transactions if op == "closeSession"}
    closed = {row.session for row in run.rows if row.op in ("close", "closeSession") and row.error is None}
    expired = {row.session for row in run.rows if row.error == "SESSIONEXPIRED"}
    for session in ended ^ closed:
        kind = "an expiry that ended a session" if session in ended - closed else "a close that did not happen"
        yield Difference(kind, session, session in ended, (session in closed, session in expired))


def _rebalances(run: OldRun) -> Iterator[Difference]:
    """What set each off, and its herd."""
    deeds = [deed for deed in run.deeds if "consumer" in deed]
    wanted = [(CAUSES[deed["what"]][0], f"{GROUP}_c{deed['consumer']}") for deed in deeds]
    known = [(each.cause, each.cause_member) for each in run.rebalances]
    if wanted != known:
        yield Difference("other rebalances", GROUP, wanted, known)
        return
    for deed, each in zip(deeds, run.rebalances, strict=True):
        late_s = (each.started_ns - deed["time_ns"]) / 1e9
        if not 0 < late_s < CAUSES[deed["what"]][1]:
            yield Difference("a rebalance at another time", each.generation, deed, late_s)
    begun = run.consumers("begin rebalancing consumer \\S+ try #0")
    ends = [each.started_ns for each in run.rebalances[1:]] + [1 << 63]
    for each, end in zip(run.rebalances, ends, strict=True):
        herd = {member for at, member, _ in begun if each.started_ns <= at < end} - {each.cause_member}
        if each.rejoined != len(herd):
            yield Difference("another herd", each.generation, sorted(herd), each.rejoined)


def _races(run: OldRun) -> Iterator[Difference]:
    """Who found an owner node taken; and who claimed what."""
    lost = [(member, int(line[3])) for _, member, line in run.consumers("ownership to be deleted: (\\d+)")]
    known = [
        (each.member_id, int(str(each.reason).split(" ")[0].rpartition("-")[2])) for each in run.happened("claim_lost")
    ]
    if Counter(lost) != Counter(known):
        yield Difference("other races", GROUP, lost, known)
    owned = Counter(
        (member, line[3]) for _, member, line in run.consumers("successfully owned partition (\\d+) for topic")
    )
    claims = Counter((each.member_id, str(each.reason).rpartition("-")[2]) for each in run.happened("assigned"))
    if owned != claims:
        yield Difference("other owners", GROUP, owned - claims, claims - owned)


def _two_owners(run: OldRun) -> Iterator[Difference]:
    """Who was frozen past its session went on with partitions that others had claimed; nobody else did."""
    frozen = {f"{GROUP}_c{deed['consumer']}" for deed in run.deeds if deed["what"] == "freeze"}
    with tempfile.TemporaryDirectory() as place:
        convert([run.capture], Path(place) / "tables")
        with Tables(Path(place) / "tables") as tables:
            rounds, split = (_asked(tables, name) for name in ("consumers", "split-brain"))
    stale = {row["cause_member"] for row in rounds if row["stale_fetches"]}
    if stale != frozen or any(row["cause"] != "session_expired" for row in rounds if row["stale_fetches"]):
        yield Difference("other consumers that went on after their session", GROUP, frozen, stale)
    for row in split:
        if not {f"{GROUP}_{row['one']}", f"{GROUP}_{row['other']}"} & frozen:
            yield Difference("two owners where nobody was frozen", GROUP, frozen, row)
    if not split:
        yield Difference("two owners that were not found", GROUP, frozen)


def _asked(tables: Tables, name: str) -> list[dict[str, Any]]:
    job = jobs.JOBS[name]
    found: list[dict[str, Any]] = job.run(*(tables[table] for table in job.tables)).arrow().to_pylist()
    return found


def _time_ns(text: str) -> int:
    moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000) * 1_000_000
