"""A reader that continues a connection from a snapshot emits and counts what the first reader would have."""

import random
from dataclasses import astuple

import pytest

from kproxy.capture.connections.content import KAFKA
from kproxy.capture.connections.flow import Handlers
from kproxy.capture.connections.flows import Flows
from kproxy.capture.dissection.packets import ETHERNET
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import Quality
from kproxy.wire.events import Exchange, Unanswered
from tests.capture import story
from tests.capture.connections.test_flows import identity


class Read:
    """A reader of single packets, and the events of its connections."""

    def __init__(self):
        self.events_of = {}  # flow -> (packet number, values of the event)
        self.clock = -1  # the number of the current packet
        self.quality = Quality()
        self.flows = Flows("test", self.quality, Handlers(self._decided, None, lambda flow: None))

    def _decided(self, flow):
        events_of = self.events_of.setdefault(flow, [])

        def listen(events):
            for event in events:
                event = event.exchange if type(event) is Unanswered else event
                if type(event) is Exchange:
                    place = identity(event)[1:]
                    events_of.append((self.clock, *place, flow.sent_again(event), flow.stalled(event)))
                else:
                    events_of.append((self.clock, type(event).__name__))

        return listen

    def take(self, number, packet):
        self.clock = number
        time_ns, data, length = packet
        self.flows.window(Window(data, 0, [(time_ns, ETHERNET, 0, len(data), length)]))

    @property
    def flow(self):
        (flow,) = self.events_of
        return flow


def tally(flow):
    """All counters of a connection."""
    quality = Quality()
    flow.count(quality)
    return flow.columns(), [astuple(row) for row in quality]


LIVES = {  # and the minimum number of packets at which both readers have the same snapshot
    "lossy": (lambda made: story.lossy(made, 40001, (0xFFFF_FFC0, 7)), 16),
    "waits": (lambda made: story.waits(made, 40002).ask(7, 8).close(), 10),
    "holes": (lambda made: story.holes(made, 40003), 11),
    "twice": (lambda made: story.twice(made, 40004), 9),
}


def made(make):
    written = story.Story()
    make(written)
    return written.packets


def equal_snapshots(packets, begin):
    """The number of packets after which a reader that started at `begin` has the snapshot of one that started earlier.

    There the late reader takes over: it emits what the other would have emitted, and together they count everything.
    """
    whole, ahead, late, borders = Read(), Read(), Read(), []
    for number, each in enumerate(packets):
        whole.take(number, each)
        if number < begin:
            continue
        late.take(number, each)
        if late.events_of and whole.events_of and late.flow.close == whole.flow.close == "open":
            snapshot = whole.flow.snapshot
            if snapshot is not None and snapshot == late.flow.snapshot:
                borders.append(number)
    whole.flows.finish()
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
        late.quality.forget()
        for number in range(border + 1, len(packets)):
            late.take(number, packets[number])
        late.flows.finish()
        assert not late.quality.count("kafka")  # it is counted once, where the readers are joined
        assert [each for each in late.events_of[flow] if each[0] > border] == [
            each for each in whole.events_of[whole.flow] if each[0] > border
        ]
        flow.join(ahead.flow)
        assert tally(flow) == tally(whole.flow), border
        assert not flow.continues
    return len(borders)


@pytest.mark.parametrize("begin", (0, 3, 4, 5))
@pytest.mark.parametrize("life", LIVES)
def test_readers_with_equal_snapshots_continue_alike(life, begin):
    """begin: packet 4 is the broker's, so a reader that starts there has the sides swapped."""
    make, least = LIVES[life]
    assert equal_snapshots(made(make), begin) >= least


def test_wrapped_sequence_numbers_are_equal_for_a_late_reader():
    def wrapping(script):
        story.Line(script, 40001, (0xFFFF_FFF0, 0xFFFF_FFF8)).shake().ask(*range(20)).close()

    assert equal_snapshots(made(wrapping), 9) > 25


def test_connections_that_are_not_clearly_kafka_have_no_snapshot():
    flows = Flows("test", Quality(), Handlers(lambda flow: lambda events: None, None, lambda flow: None))
    kinds = set()
    for time_ns, data, length in story.packets_of_story():
        flows.window(Window(data, 0, [(time_ns, ETHERNET, 0, len(data), length)]))
        for flow in (*flows.open, *flows.ended):
            if flow.snapshot is not None:
                assert flow.speaks == KAFKA and flow.close == "open" and flow.client >= 0
            else:
                kinds.add(flow.speaks)
    assert {None, KAFKA, "tls", "http"} <= kinds


def test_logins_seen_by_both_readers_are_counted_together():
    packets = made(lambda script: story.Line(script, 40001).shake().ask(1, 2))
    readers = Read(), Read()
    for read, tokens in zip(readers, (2, 3), strict=True):
        for number, each in enumerate(packets):
            read.take(number, each)
        read.flow.sasl_tokens = tokens
    first, second = (read.flow for read in readers)
    first.path_mtu = 1400
    second.count_anew()
    second.join(first)
    assert (second.sasl_tokens, second.path_mtu, second.payload_bytes) == (5, 1400, first.payload_bytes)


def random_life(dice):
    """A connection with segments that are lost, retransmitted, late and split at random, and with closed windows."""
    script = story.Story()
    line = story.Line(script, 40001).shake().ask(1)
    asked, sent = 2, []
    waiting = []  # responses that have not been sent yet
    for _ in range(30):
        script.wait(dice.choice((0, 0, -story.TICK_NS, 2 * story.MS, 40 * story.MS)))  # some at the same time
        what = dice.random()
        if what < 0.15 and sent:
            side, at, data = dice.choice(sent[-4:])
            cut = dice.choice((0, 0, 3))
            line.send(side, data[cut:], at=at + cut)
        elif what < 0.25:
            line.send(dice.randrange(2), window=dice.choice((0, 500)), ack=None)
        else:
            if waiting and dice.random() < 0.5:
                side, data = 1, story.answer(waiting.pop(0))
            else:
                side, data = 0, story.request(asked)
                waiting.append(asked)
                asked += 1
            middle = dice.choice((0, 0, 5, len(data) - 1))
            for part in (data[:middle], data[middle:]):
                if part:
                    sent.append((side, line.next[side], part))
                    (line.lose if dice.random() < 0.1 else line.send)(side, part)
    return script.packets


@pytest.mark.parametrize("seed", range(12))
def test_random_connections_continue_alike(seed):
    equal_snapshots(random_life(random.Random(seed)), 4 + seed % 2)
