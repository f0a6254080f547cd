"""A small capture in which everything happens: all its rows, whatever way they are read, and wherever that begins anew.

`story.txt` holds the rows, times in microseconds since the first packet.
"""

from dataclasses import astuple
from pathlib import Path

import pytest

from kproxy.capture import pcap, pcapng
from kproxy.capture.columns import mapped, pairs
from kproxy.capture.flow import Handlers
from kproxy.capture.flows import Flows
from kproxy.capture.packets import ETHERNET
from kproxy.capture.quality import Quality
from kproxy.capture.records import Window
from kproxy.wire.events import Exchange, Unanswered
from tests.capture import packet, story
from tests.capture.columns.test_inorder import NEVER, told
from tests.capture.test_flows import exact

EXPECTED = Path(__file__).with_name("story.txt")
USUAL = {None, 0, "answered", "full", "plain"}  # and so not written
OF_EXCHANGE = ("request_start_ns", "request_end_ns", "response_start_ns", "response_end_ns")
SIZES = ("request_bytes", "response_bytes")
SAME = {  # of every row, or what others of its values say
    *("source", "cluster", "time", "connection", "client_address", "client_port", "broker_address", "broker_port"),
    *("client_id", "api", "api_key", "api_version", "error", "number", "latency_ns", "total_ns", "broker_ns"),
}


def since(time_ns):
    """Microseconds since the first packet."""
    return "-" if time_ns is None else str((time_ns - story.BEGIN_NS) // 1000)


def values(row, names=()):
    found = []
    for name, value in row.items():
        if value not in USUAL and name not in SAME and name not in names:
            found.append(f"{name}={since(value) if name == 'late_answer_since_ns' else value}")
    return found


def written(path, fewest):
    """The rows of a capture as lines of text, and how many exchanges went by column."""
    rows, quality, taken = told(path, fewest)
    lines = []
    for row in sorted(rows["connections"], key=lambda row: (row["client_port"], row["start_ns"])):
        times = since(row["start_ns"]), since(row["end_ns"])
        lines.append(" ".join(("connection", str(row["client_port"]), *times, *values(row, ("start_ns", "end_ns")))))
    for row in sorted(
        rows["exchanges"], key=lambda row: (row["client_port"], row["request_end_ns"] or row["response_end_ns"])
    ):
        asked = [since(row[name]) for name in OF_EXCHANGE] + [str(row[name]) for name in SIZES]
        lines.append(" ".join(("exchange", str(row["client_port"]), *asked, *values(row, (*OF_EXCHANGE, *SIZES)))))
    for kind, count, size, first_ns, last_ns, _ in quality:
        lines.append(f"quality {kind} {count} {size} {since(first_ns)} {since(last_ns)}")
    assert not rows["partitions"] and not rows["batches"]
    return lines, taken


def classic(packets, **how):
    return packet.pcap(packets, **how)


def blocks(packets):
    """pcapng, by two interfaces in turn."""
    parts = [packet.section(), packet.interface(), packet.interface(options=packet.option(9, b"\x09"))]
    for number, (time_ns, data, length) in enumerate(packets):
        ticks = time_ns if number % 2 else time_ns // 1000
        parts.append(packet.enhanced(data, ticks, name=number % 2, original=length))
    return b"".join(parts)


@pytest.mark.parametrize("fewest", (1, NEVER), ids=("by column", "one by one"))
@pytest.mark.parametrize("window", (1, 150, 400, 1000, 1 << 20))
@pytest.mark.parametrize(
    "spell",
    (classic, blocks, lambda packets: classic(packets, order=">", nano=True)),
    ids=("pcap", "pcapng", "pcap of another machine"),
)
def test_the_rows_are_those_written_down(tmp_path, monkeypatch, spell, window, fewest):
    for module in (pcap, pcapng):
        monkeypatch.setattr(module, "WINDOW", window)
    monkeypatch.setattr(pairs, "WORTH", 0)
    monkeypatch.setattr(mapped, "FIRST_RECORDS", max(1, window // 100))
    monkeypatch.setattr(mapped, "RECORDS", max(1, window // 50))
    path = tmp_path / "story"
    path.write_bytes(spell(story.told()))
    lines, taken = written(path, fewest)
    assert lines == EXPECTED.read_text().splitlines()
    assert not taken or fewest == 1


class Read:
    """A reader of packets one by one, and what its connections told."""

    def __init__(self):
        self.heard = {}  # of each connection: what each event told, and when
        self.clock = -1  # the number of the packet in hand
        self.flows = Flows("test", Quality(), Handlers(self._decided, None, lambda flow: None))

    def _decided(self, flow):
        heard = self.heard.setdefault(flow, [])

        def listen(events):
            for event in events:
                event = event.exchange if type(event) is Unanswered else event
                if type(event) is Exchange:
                    place = exact(event)[1:]
                    heard.append((self.clock, *place, flow.sent_again(event), flow.stalled(event)))
                else:
                    heard.append((self.clock, type(event).__name__))

        return listen

    def take(self, number, packet):
        self.clock = number
        time_ns, data, length = packet
        self.flows.window(Window(data, 0, [(time_ns, ETHERNET, 0, len(data), length)]))

    @property
    def flow(self):
        (flow,) = self.heard
        return flow


def tally(flow):
    """All that is counted of a connection."""
    quality = Quality()
    flow.count(quality)
    return flow.columns(), [astuple(row) for row in quality]


LIVES = {  # and at how many packets at least both have the same
    "lossy": (lambda made: story.lossy(made, 40001, (0xFFFF_FFC0, 7)), 16),
    "waits": (lambda made: story.waits(made, 40002).ask(7, 8).close(), 12),
    "holes": (lambda made: story.holes(made, 40003), 11),
    "twice": (lambda made: story.twice(made, 40004), 9),
}


@pytest.mark.parametrize("begin", (0, 3, 4, 5))
@pytest.mark.parametrize("life", LIVES)
def test_what_goes_on_from_the_same_snapshot_goes_on_alike(life, begin):
    """A reader that came later takes over at every packet where both have the same snapshot; together they count all.

    begin: its first packet; 4 is the broker's, so the sides are the other way round.
    """
    make, least = LIVES[life]
    packets = made(make)
    whole, ahead, late, borders = Read(), Read(), Read(), []
    for number, each in enumerate(packets):
        whole.take(number, each)
        if number < begin:
            continue
        late.take(number, each)
        if late.heard and whole.heard and late.flow.close == whole.flow.close == "open":
            snapshot = whole.flow.snapshot
            if snapshot is not None and snapshot == late.flow.snapshot:
                borders.append(number)
    whole.flows.finish()
    assert len(borders) >= least
    taken = 0
    for border in borders:
        late = Read()
        for number in range(begin, border + 1):
            late.take(number, packets[number])
        while taken <= border:
            ahead.take(taken, packets[taken])
            taken += 1
        flow = late.flow
        flow.count_anew()
        for number in range(border + 1, len(packets)):
            late.take(number, packets[number])
        late.flows.finish()
        assert [each for each in late.heard[flow] if each[0] > border] == [
            each for each in whole.heard[whole.flow] if each[0] > border
        ]
        flow.join(ahead.flow)
        assert tally(flow) == tally(whole.flow), border


def made(make):
    written = story.Story()
    make(written)
    return written.packets
