"""Every limit of the detection of copies, at the limit and one beyond, by column and one by one."""

import pytest

from kproxy.capture.columns import inorder
from kproxy.capture.columns.inorder import AT_ONCE_NS
from kproxy.capture.dissection import copies
from kproxy.capture.dissection.copies import Recent
from kproxy.capture.dissection.packets import ETHERNET, SAME_PACKET_NS, Dissector
from kproxy.capture.formats.records import Window
from kproxy.capture.quality import Quality
from tests.capture import packet

BEGIN_NS = 1_700_000_000_000_000_000
BY_COLUMN = pytest.mark.parametrize("fewest", (1, 1 << 40), ids=("by column", "one by one"))


def frame(seq=1, payload=b"some", *, identity=7, stamp=None):
    options = b"" if stamp is None else b"\1\1\x08\x0a" + stamp.to_bytes(4) + bytes(4)
    return packet.ethernet(packet.ipv4(packet.tcp(payload, seq=seq, options=options), identity=identity))


class CopySearch:
    """Searches packets for copies, each packet in a window of its own or all in one."""

    def __init__(self, monkeypatch, fewest, together=False):
        monkeypatch.setattr(inorder, "FEWEST", fewest)
        monkeypatch.setattr(copies, "MIN_PRUNED", 0)  # packets that are too old are forgotten at once
        self.recent, self.dissect, self.together = Recent(), Dissector(Quality()).segment, together

    def of(self, packets):
        """(whether it is a copy, whether its bytes were there, whether that is certain) for each packet (time_ns,
        bytes)."""
        found = []
        for some in [packets] if self.together else [[each] for each in packets]:
            data, records = b"", []
            for time_ns, each in some:
                records.append((time_ns, ETHERNET, len(data), len(data) + len(each), len(each)))
                data += each
            self.recent.add(Window(data, 0, records))
            for index, (time_ns, link, start, end, _) in enumerate(records):
                segment = self.dissect(link, data, start, end, time_ns)
                if not self.recent.plain[index]:
                    self.recent.note(index, segment)
                recent = self.recent
                found.append((recent.has(index, segment), recent.has_bytes(index, segment), recent.is_sure(index)))
            self.recent.let_go()
        return found


@BY_COLUMN
@pytest.mark.parametrize("together", (False, True))
@pytest.mark.parametrize("beyond", (0, 1))
@pytest.mark.parametrize("begin_ns", (0, BEGIN_NS))
@pytest.mark.parametrize("between", ("early", "late"))
@pytest.mark.parametrize("distinguished_by", ("stamp", "identity", "nothing"))
def test_a_copy_comes_within_a_second_or_at_once_if_packets_are_indistinguishable(
    monkeypatch, distinguished_by, between, begin_ns, beyond, together, fewest
):
    looks = CopySearch(monkeypatch, fewest, together)
    stamp = 5 if distinguished_by == "stamp" else None
    other = frame(99, identity=8 if distinguished_by == "identity" else 7, stamp=stamp)
    late_ns = AT_ONCE_NS if distinguished_by == "nothing" else SAME_PACKET_NS
    one = frame(stamp=stamp)
    last_ns = begin_ns + late_ns + beyond
    times = begin_ns, begin_ns + 1 if between == "early" else last_ns, last_ns
    (first, _, _), (second, _, _), (third, bytes_too, _) = looks.of(list(zip(times, (one, other, one), strict=True)))
    assert not first and not second
    assert third == bytes_too == (not beyond)


@BY_COLUMN
@pytest.mark.parametrize("together", (False, True))
@pytest.mark.parametrize("between", (2, 3))
def test_a_copy_is_found_while_its_packet_is_remembered(monkeypatch, between, together, fewest):
    monkeypatch.setattr(copies, "MAX_PACKETS", 3)
    looks = CopySearch(monkeypatch, fewest, together)
    others = [(BEGIN_NS + 1 + number, frame(100 + number, stamp=5)) for number in range(between)]
    found = looks.of([(BEGIN_NS, frame(stamp=5)), *others, (BEGIN_NS + 9, frame(stamp=5))])
    assert found[-1][0] == (between == 2)
    assert [sure for _, _, sure in found] == [number > 3 for number in range(between + 2)]


@BY_COLUMN
@pytest.mark.parametrize("passed_ns", (SAME_PACKET_NS, SAME_PACKET_NS + 1))
def test_after_a_second_no_packet_is_waited_for(monkeypatch, passed_ns, fewest):
    found = CopySearch(monkeypatch, fewest).of([(BEGIN_NS, frame()), (BEGIN_NS + passed_ns, frame(5))])
    assert [sure for _, _, sure in found] == [False, passed_ns > SAME_PACKET_NS]


@BY_COLUMN
@pytest.mark.parametrize("together", (False, True))
@pytest.mark.parametrize("back_ns", (1, SAME_PACKET_NS, SAME_PACKET_NS + 1))
def test_a_copy_may_be_up_to_a_second_earlier(monkeypatch, back_ns, together, fewest):
    """A larger step back in time is the beginning of another capture."""
    looks = CopySearch(monkeypatch, fewest, together)
    found = looks.of([(BEGIN_NS, frame(stamp=5)), (BEGIN_NS - back_ns, frame(stamp=5))])
    assert found[1][0] == (back_ns <= SAME_PACKET_NS)
    assert looks.recent.goes_back == (back_ns > SAME_PACKET_NS)
    assert found[1][2] == (back_ns > SAME_PACKET_NS)


def test_after_another_capture_began_nothing_is_remembered(monkeypatch):
    looks = CopySearch(monkeypatch, 1 << 40)
    assert looks.of([(BEGIN_NS, frame(stamp=5))] * 2)[1][0]
    looks.recent.clear()
    assert not looks.of([(BEGIN_NS + 1, frame(stamp=5))])[0][0]


# --- segments that offload split or merged ----------------------------------------------------------------------------


def bytes_found(looks, *segments, stamp):
    """Whether the bytes of the last segment were there, given segments (position, length, identification) 1 us
    apart."""
    packets = [
        (BEGIN_NS + 1000 * number, frame(1 + at, bytes(length), identity=identity, stamp=stamp))
        for number, (at, length, identity) in enumerate(segments)
    ]
    _, found, _ = looks.of(packets)[-1]
    return found


@BY_COLUMN
@pytest.mark.parametrize("stamp", (None, 5))
@pytest.mark.parametrize(
    "size, is_run, is_joined",  # without timestamps: whether pieces of several segments are recognised too
    (
        (243, False, False),
        (244, True, False),
        (1199, True, False),
        (1200, True, True),
        (1460, True, True),
        (1461, True, False),
        (9216, True, False),
        (9217, False, False),
    ),
)
def test_segments_of_a_run_have_usual_sizes(monkeypatch, size, is_run, is_joined, stamp, fewest):
    whole = 0, 3 * size, 7
    looks = lambda: CopySearch(monkeypatch, fewest)  # noqa: E731
    assert bytes_found(looks(), whole, (0, size, 7), stamp=stamp)
    assert bytes_found(looks(), whole, (size, size, 8), stamp=stamp) == is_run
    assert bytes_found(looks(), whole, (2 * size, size, 9), stamp=stamp) == is_run
    assert bytes_found(looks(), whole, (size, 2 * size, 8), stamp=stamp) == (is_run if stamp else is_joined)
    pieces = [(number * size, size, 7 + number) for number in range(3)]
    assert bytes_found(looks(), *pieces, whole, stamp=stamp) == is_run
    assert not bytes_found(looks(), *pieces[:2], whole, stamp=stamp)
    assert not bytes_found(looks(), *pieces[1:], whole, stamp=stamp)


@BY_COLUMN
@pytest.mark.parametrize(
    "piece, found, with_stamps",
    (
        ((1000, 1000, 8), True, True),
        ((1000, 999, 8), True, True),
        ((1000, 1001, 8), False, True),  # a segment has 1000 bytes; a card may have merged two
        ((1000, 1000, 9), False, True),  # of 500
        ((999, 1000, 8), False, True),  # of 999
        ((1001, 1000, 9), False, False),  # no multiple
        ((1000, 1000, 6), False, False),
        ((2000, 1001, 9), False, False),  # one byte more than there was
        ((3000, 1, 10), False, False),  # after its end
        ((3000, 0, 10), False, False),
    ),
)
def test_identities_count_the_segments_of_a_run(monkeypatch, piece, found, with_stamps, fewest):
    for stamp, expected in ((None, found), (5, with_stamps)):
        assert bytes_found(CopySearch(monkeypatch, fewest), (0, 3000, 7), piece, stamp=stamp) == expected


@BY_COLUMN
@pytest.mark.parametrize("identities", ((7, 7), (0, 0), (0, 7), (7, 0)))
@pytest.mark.parametrize("at", (0, 1000))
@pytest.mark.parametrize("stamp", (None, 5))
def test_with_timestamps_constant_identifications_are_accepted(monkeypatch, identities, at, stamp, fewest):
    segments = (0, 3000, identities[0]), (at, 1000, identities[1])
    found = bytes_found(CopySearch(monkeypatch, fewest), *segments, stamp=stamp)
    alone = at == 0 and identities == (7, 7)
    assert found == (stamp is not None or alone)


@pytest.mark.parametrize("between", (2, 3))
def test_a_limited_number_of_headers_is_searched_one_by_one(monkeypatch, between):
    monkeypatch.setattr(copies, "MAX_OF_RUN", 4)
    others = [(5000 + 1000 * number, 1000, 100 + number) for number in range(between)]
    found = bytes_found(CopySearch(monkeypatch, 1 << 40), (0, 3000, 7), *others, (1000, 1000, 8), stamp=5)
    assert found == (between == 2)
