"""What brokers, Kafka's own tools and members said of a run, each as it can be compared with what the wire says."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

METADATA_LOG = "__cluster_metadata"  # whose leader is the active controller
_TIME = r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})"
_LINE = re.compile(_TIME + r" (?P<level>[A-Z]+) (?P<text>.*)")
_PREPARED = re.compile(
    r"Preparing to rebalance group (\S+) in state (\w+) with old generation (\d+) \(reason: (.*)\)\. "
)
_STABILISED = re.compile(r"Stabilized group (\S+) generation (\d+) with (\d+) members")
_ASSIGNED = re.compile(r"Assignment received from leader (\S+) for group (\S+) for generation (\d+)")
# Of a streams group that a session expired in, only the second is logged.
_EPOCH = re.compile(
    r"\[GroupId (\S+)\].* (?:Bumped (?:streams )?group epoch to|Computed a new target assignment for epoch) (\d+) with"
)
# What sets an epoch off, each with the member that did.
_CAUSES = (
    (re.compile(r"\[GroupId (\S+)\] (?:Static )?[Mm]ember (\S+) .*?\bjoins the"), "member_joined"),
    (re.compile(r"\[GroupId (\S+?)\]\[MemberId (\S+)\] Member joins the"), "member_joined"),
    (re.compile(r"\[GroupId (\S+)\] (?:Static )?[Mm]ember (\S+) .*?left the"), "member_left"),
    (re.compile(r"\[GroupId (\S+?)\]\[MemberId (\S+)\] Member \S+ left the"), "member_left"),
    (
        re.compile(r"\[GroupId (\S+)\] (?:Streams m|M)ember (\S+) fenced from the group because the member session"),
        "session_expired",
    ),
    (re.compile(r"\[GroupId (\S+)\] Member (\S+) updated its subscribed topics"), "subscription_changed"),
)
_LED = re.compile(r"\] Leader (\S+)-(\d+) with topic id .* starts at leader epoch (\d+) ")
_CONTROLS = re.compile(r"In the new epoch (\d+), the leader is (\d+)\.")
_FOLLOWED = re.compile(r"\] Follower (\S+)-(\d+) starts at leader epoch (\d+) .*Current leader is (\d+)\.")


class Said(NamedTuple):
    """A line of a broker's log."""

    time_ns: int
    broker: int
    text: str


class Generation(NamedTuple):
    """A generation of a classic group as its coordinator logged it."""

    prepared_ns: int | None  # None: nothing was prepared, as when a static member takes a leader's place
    reason: str
    stabilised_ns: int
    members: int
    assigned_ns: int | None  # None: the leader's assignment never came
    leader: str | None
    coordinator: int


@dataclass
class Described:
    """What the tools said of all groups and topics at one time. Times are of the first and the last question."""

    from_ns: int
    to_ns: int
    states: dict[str, tuple[str, int, int, str]] = field(
        default_factory=dict
    )  # (state, members, coordinator, strategy)
    owned: dict[str, dict[str, frozenset[tuple[str, int]]]] = field(default_factory=dict)  # by group and member
    epochs: dict[str, dict[str, int]] = field(default_factory=dict)  # of members, in the newer protocols
    offsets: dict[tuple[str, str, int], tuple[int | None, int]] = field(default_factory=dict)  # (committed, log end)
    partitions: dict[tuple[str, int], tuple[int, frozenset[int], tuple[int, ...]]] = field(default_factory=dict)
    controller: tuple[int, int] = (-1, -1)  # (node, epoch)
    lags: dict[tuple[str, str], int] = field(
        default_factory=dict
    )  # that kproxy_consumer_lag_records said: group, topic
    workers: dict[str, frozenset[tuple[str, int]]] | None = None  # of Connect, by address: connectors (-1) and tasks
    live: dict[str, dict[str, Any]] = field(default_factory=dict)  # what a kproxy between said in /api/groups, by group


class Run:
    """A run's folder, or such a folder in a file (`.jsonl` packed beside its capture, see `pack.py`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._text(f"{name}.jsonl").splitlines()]

    def _text(self, name: str) -> str:
        packed = self.folder / f"{name}.gz"
        return gzip.decompress(packed.read_bytes()).decode() if packed.exists() else (self.folder / name).read_text()

    @cached_property
    def capture(self) -> Path:
        packed = self.folder / "traffic.pcap.zst"
        return packed if packed.exists() else self.folder / "traffic.pcap"

    @cached_property
    def ports(self) -> dict[int, int]:
        """Every port that was recorded, with the broker that has it."""
        found = {}
        for line in self._lines("ports"):
            found[line["port"]] = line["broker"]
        return found

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return self._lines("events")

    @cached_property
    def members(self) -> list[dict[str, Any]]:
        return self._lines("members")

    @cached_property
    def log(self) -> list[Said]:
        """All brokers' lines, in order of time."""
        found = []
        for broker in (1, 2, 3):
            for line in self._text(f"broker-{broker}/knowledge.log").splitlines():
                match = _LINE.match(line)
                if match:
                    at = datetime.strptime(match["at"], "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC)
                    ms = round(at.timestamp() * 1000)
                    found.append(Said(ms * 1_000_000, broker, match["text"]))
        return sorted(found, key=lambda said: said.time_ns)

    @cached_property
    def generations(self) -> dict[tuple[str, int], Generation]:
        """Every generation that was stabilised, by group and number."""
        prepared: dict[tuple[str, int], tuple[int, str]] = {}
        found: dict[tuple[str, int], Generation] = {}
        for at, broker, text in self.log:
            if match := _PREPARED.search(text):
                prepared.setdefault((match[1], int(match[3]) + 1), (at, match[4]))
            elif match := _STABILISED.search(text):
                key = match[1], int(match[2])
                begun = prepared.get(key, (None, ""))
                found[key] = Generation(*begun, at, int(match[3]), None, None, broker)
            elif match := _ASSIGNED.search(text):
                key = match[2], int(match[3])
                if key in found and found[key].assigned_ns is None:
                    found[key] = found[key]._replace(assigned_ns=at, leader=match[1])
        return found

    @cached_property
    def epochs(self) -> dict[tuple[str, int], int]:
        """When each epoch of the newer protocols' groups began (ns), by group and epoch."""
        found: dict[tuple[str, int], int] = {}
        for at, _, text in self.log:
            if match := _EPOCH.search(text):
                found.setdefault((match[1], int(match[2])), at)
        return found

    @cached_property
    def epoch_causes(self) -> dict[tuple[str, int], set[tuple[str, str | None]]]:
        """What may have set each epoch off, and those before it that follow from the same: (cause, member)."""
        since: dict[str, set[tuple[str, str | None]]] = {}
        found: dict[tuple[str, int], set[tuple[str, str | None]]] = {}
        for _, _, text in self.log:
            for pattern, cause in _CAUSES:
                if match := pattern.search(text):
                    since.setdefault(match[1], set()).add((cause, match[2]))
            match = _EPOCH.search(text)
            if match and (match[1], int(match[2])) not in found:
                found[match[1], int(match[2])] = since.pop(match[1], set()) or {("metadata_changed", None)}
        return found

    @cached_property
    def leaders(self) -> dict[tuple[str, int, int], int]:
        """Who led each partition in each of its epochs, as brokers logged that they lead or follow."""
        found: dict[tuple[str, int, int], int] = {}
        for _, broker, text in self.log:
            if match := _LED.search(text):
                found[match[1], int(match[2]), int(match[3])] = broker
            elif match := _FOLLOWED.search(text):
                found.setdefault((match[1], int(match[2]), int(match[3])), int(match[4]))
            elif match := _CONTROLS.search(text):
                found[METADATA_LOG, 0, int(match[1])] = int(match[2])
        return found

    def matched(self, pattern: str) -> Iterator[tuple[Said, re.Match[str]]]:
        """The lines that a pattern finds something in."""
        regex = re.compile(pattern)
        for line in self.log:
            if match := regex.search(line.text):
                yield line, match

    @cached_property
    def described(self) -> list[Described]:
        """What the tools said, each round of them."""
        found: list[Described] = []
        for line in self._lines("asked"):
            if line["what"] == "state":
                found.append(Described(line["from_ns"], line["to_ns"]))
            if found and line["what"] in _READERS:
                found[-1].to_ns = line["to_ns"]
                _READERS[line["what"]](found[-1], line["text"])
        return found


def _states(described: Described, text: str) -> None:
    """GROUP, COORDINATOR (ID), ASSIGNMENT-STRATEGY, STATE, #MEMBERS; a group without members has no strategy."""
    for line in text.splitlines():
        match = re.match(r"(\S+)\s+\S+\s+\((\d+)\)\s+(?:(\S+)\s+)?(\w+)\s+(\d+)\s*$", line)
        if match:
            described.states[match[1]] = match[4], int(match[5]), int(match[2]), match[3] or ""


def _members(described: Described, text: str) -> None:
    """Tables whose cells may be empty: where a column begins is where its name does."""
    names: list[tuple[str, int]] = []
    for line in text.splitlines():
        if line.startswith("GROUP "):
            names = [(match[0], match.start()) for match in re.finditer(r"\S+", line)]
            continue
        if not names or not line.strip() or line.startswith("Consumer group"):
            continue
        ends = [start for _, start in names[1:]] + [len(line)]
        row = {name: line[start:end].strip() for (name, start), end in zip(names, ends, strict=True)}
        described.owned.setdefault(row["GROUP"], {})[row["CONSUMER-ID"]] = _parts(row["CURRENT-ASSIGNMENT"])
        if row["CURRENT-EPOCH"] != "-":
            described.epochs.setdefault(row["GROUP"], {})[row["CONSUMER-ID"]] = int(row["CURRENT-EPOCH"])


def _streams_states(described: Described, text: str) -> None:
    """GROUP, COORDINATOR (ID), STATE, GROUP-EPOCH, TARGET-ASSIGNMENT-EPOCH, #MEMBERS"""
    for line in text.splitlines():
        match = re.match(r"(\S+)\s+\S+\s+\((\d+)\)\s+(\w+)\s+\d+\s+\d+\s+(\d+)\s*$", line)
        if match:
            described.states[match[1]] = match[3], int(match[4]), int(match[2]), ""


def _streams_members(described: Described, text: str) -> None:
    """... MEMBER, MEMBER-PROTOCOL, MEMBER-EPOCH, ..., ASSIGNMENTS ("ACTIVE: 0:[2,3]; TARGET-ACTIVE: ...")"""
    for line in text.splitlines():
        cells = line.split(None, 8)
        if len(cells) > 7 and cells[0] != "GROUP":
            active = re.search(r"(?:^| )ACTIVE: (.*?);", line)
            tasks = re.findall(r"(\w+):\[([\d,]+)\]", active[1]) if active else ()
            owned = frozenset((name, int(index)) for name, indexes in tasks for index in indexes.split(","))
            described.owned.setdefault(cells[0], {})[cells[3]] = owned
            described.epochs.setdefault(cells[0], {})[cells[3]] = int(cells[5])


def _share_members(described: Described, text: str) -> None:
    """GROUP, CONSUMER-ID, ..., MEMBER-EPOCH, ASSIGNMENT ("clicks:0,1")"""
    names: list[str] = []
    for line in text.splitlines():
        if line.startswith("GROUP "):
            names = line.split()
        elif names and len(cells := line.split()) == len(names):
            row = dict(zip(names, cells, strict=True))
            described.owned.setdefault(row["GROUP"], {})[row["CONSUMER-ID"]] = _parts(row["ASSIGNMENT"])
            described.epochs.setdefault(row["GROUP"], {})[row["CONSUMER-ID"]] = int(row["MEMBER-EPOCH"])


def _workers(described: Described, text: str) -> None:
    described.workers = {}
    for worker, running in json.loads(text).items():
        parts = (each.partition("-") for each in running)
        described.workers[worker] = frozenset((name, int(task) if dash else -1) for name, dash, task in parts)


def _parts(text: str) -> frozenset[tuple[str, int]]:
    """orders:0,1;clicks:2"""
    if text == "-":
        return frozenset()
    return frozenset(
        (topic, int(index))
        for topic, _, indexes in (part.rpartition(":") for part in text.split(";"))
        for index in indexes.split(",")
    )


def _offsets(described: Described, text: str) -> None:
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 9 and cells[0] != "GROUP" and cells[2].isdigit() and cells[4].isdigit():
            committed = None if cells[3] == "-" else int(cells[3])
            described.offsets[cells[0], cells[1], int(cells[2])] = committed, int(cells[4])


def _partitions(described: Described, text: str) -> None:
    for match in re.finditer(r"Topic: (\S+)\tPartition: (\d+)\tLeader: (\S+)\tReplicas: (\S+)\tIsr: (\S*)", text):
        leader = -1 if match[3] == "none" else int(match[3])
        isr = frozenset(map(int, match[5].split(","))) if match[5] else frozenset()
        described.partitions[match[1], int(match[2])] = leader, isr, tuple(map(int, match[4].split(",")))


def _quorum(described: Described, text: str) -> None:
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    described.controller = int(found["LeaderId"]), int(found["LeaderEpoch"])


def _live(described: Described, text: str) -> None:
    described.live = {group["group"]: group for group in json.loads(text)}


def _lags(described: Described, text: str) -> None:
    for line in text.splitlines():
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if labels.get("group"):
            described.lags[labels["group"], labels["topic"]] = int(float(line.rpartition(" ")[2]))


_READERS = {
    "state": _states,
    "members": _members,
    "offsets": _offsets,
    "topics": _partitions,
    "quorum": _quorum,
    "kproxy": _live,
    "lag": _lags,
    "streams--state": _streams_states,
    "streams--members": _streams_members,
    "share--state": _streams_states,
    "share--members": _share_members,
    "connect": _workers,
}
