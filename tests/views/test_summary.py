"""What is said of captures: names as they are, whatever is in them, and no praise for what was not read."""

import pytest

from kproxy.capture.quality import Quality
from kproxy.convert.job import Summary
from kproxy.errors import CaptureError
from kproxy.views.summary import tell, verdict


def quality(*kinds):
    told = Quality()
    for kind in kinds:
        told.note(kind, 1)
    return told


def test_names_are_no_markup_and_cannot_move_the_cursor(tmp_path, capsys):
    name = "a[/b] :boom: \x1b[31m\udcff.pcap"
    tell(Summary(tmp_path / "[red]" / "[/x]", {"exchanges": 3}, {name: quality("packets")}, [CaptureError(name, "no")]))
    output = capsys.readouterr()
    shown = "a[/b] :boom: \\x1b[31m\\udcff.pcap"
    assert output.out.startswith(shown)
    assert "[red]/[/x]/exchanges" in output.out
    assert output.err == f"kproxy: {shown}: no\n"


@pytest.mark.parametrize(
    "kinds, words",
    [
        ((), "no packet"),
        (("cut_file",), "no packet"),
        (("packets",), "No Kafka in it"),
        (("packets", "tls"), "need a key log"),
        (("packets", "kafka", "retransmissions", "duplicate_packets", "open", "not_tcp"), "Complete"),
        (("packets", "kafka", "gap", "tls"), "Not complete: there are holes, some connections are encrypted"),
        (("packets", "kafka", "unknown_link"), "Not complete"),
        (("packets", "kafka", "malformed"), "Not complete"),
        (("packets", "kafka", "idle"), "Not complete"),
        (("packets", "kafka", "midstream"), "Not complete: connections were open before the capture began"),
        (("packets", "kafka", "stream 0 a", "stream 0 b"), "captured twice are counted twice"),
        (("packets", "kafka", "resync"), "Not complete: bytes were skipped"),
        (("packets", "kafka", "strays"), "Not complete: segments fit no window"),
        (("packets", "kafka", "fault"), "Not complete: connections break the protocol"),
    ],
)
def test_how_far_tables_can_be_trusted(kinds, words):
    assert words in verdict(quality(*kinds))
