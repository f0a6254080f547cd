"""The offline bench's captures are real ones, and its figures come from both programs."""

import json

from click.testing import CliRunner

from bench import offline
from kproxy.wire.bodies import BATCHES
from kproxy.wire.events import ANSWERED
from tests.capture.connections.test_flows import Seen
from tests.native import reads_by_core


def test_a_generated_capture_is_whole(tmp_path):
    for kind in (kind for kind in offline.KINDS if not kind.dirty):
        path = tmp_path / kind.name
        with path.open("wb") as file:
            packets = offline.generate(kind, file, 200)
        seen = Seen(path, detail=BATCHES)
        assert seen.quality.count("packets") == packets
        assert [exchange.outcome for _, exchange in seen.exchanges] == [ANSWERED] * 200
        assert {exchange.plan.api for _, exchange in seen.exchanges} == {"Produce", "Fetch"}
        found = [body for _, e in seen.exchanges for body in (e.request_body, e.response_body)]
        assert sum(len(body.batches) for body in found) == 200
        assert set(seen.kinds()) == {"packets", "kafka", "open"}


@reads_by_core
def test_a_dirty_capture_lacks_something_and_goes_by_column(tmp_path):
    (kind,) = (kind for kind in offline.KINDS if kind.dirty)
    path = tmp_path / "dirty.pcap"
    with path.open("wb") as file:
        packets = offline.generate(kind, file, 4000)
    seen = Seen(path, detail=BATCHES)
    assert seen.quality.count("packets") == packets
    assert {"gap", "duplicate_packets", "out_of_order"} <= set(seen.kinds())
    assert len(seen.exchanges) > 3900 and seen.at_once > 0.95 * len(seen.exchanges)


def test_both_programs_are_measured_and_the_verdict_is_the_status():
    result = CliRunner().invoke(offline.main, ["--scale", "0.002", "--rounds", "1", "--json"])
    figures = json.loads(result.stdout)
    assert figures.keys() == {kind.name for kind in offline.KINDS}
    for tshark, *kproxy in figures.values():
        assert tshark["program"] == "tshark" and tshark["ratio"] == 1
        assert len(kproxy) == 2
        assert all(
            cost["cpu_s"] > 0 and cost["startup_s"] > 0 and cost["rss_bytes"] > 1e7 for cost in (tshark, *kproxy)
        )
    kept = all(cost["limit"] is None or cost["ratio"] >= cost["limit"] for costs in figures.values() for cost in costs)
    assert result.exit_code == (0 if kept else 1)
