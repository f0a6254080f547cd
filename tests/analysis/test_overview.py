"""An overview against the rows that it is of, one by one."""

import statistics
from collections import Counter, defaultdict

import pytest

import kproxy
from kproxy.analysis import overview as module
from kproxy.analysis.overview import Overview, overview
from kproxy.convert.processes import convert
from kproxy.tables import writer
from tests import captures

NAMES = ("k41_quota", "k41_librdkafka", "k41_gaps")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ROW_GROUP", 100)  # several of them in a file
        convert([captures.capture(name) for name in NAMES], folder, processes=1)
    return folder


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_it_counts_what_the_rows_say(dataset, names):
    paths = [captures.capture(name) for name in names]
    found = overview(dataset, [path.name for path in paths])
    rows = [row for path in paths for row in kproxy.exchanges(path)]
    assert found.exchanges == len(rows)
    assert {name: api.exchanges for name, api in found.apis.items()} == Counter(row["api"] for row in rows)
    failed = [row for row in rows if row["error_code"]]
    assert found.errors == Counter((row["error"], row["api"]) for row in failed)
    assert sum(api.errors for api in found.apis.values()) == len(failed)
    assert found.clients == Counter(row["client_id"] or "" for row in rows)
    asked = [row for row in rows if row["number"] is not None]
    assert found.brokers == Counter(
        (f"{row['broker_address']}:{row['broker_port']}", row["broker_id"]) for row in asked
    )
    starts = [row["request_start_ns"] for row in rows if row["request_start_ns"] is not None]
    assert found.first_ns == min(starts)
    assert found.last_ns == max(row["response_end_ns"] or row["request_start_ns"] or 0 for row in rows)
    latencies = defaultdict(list)
    for row in rows:
        if row["latency_ns"] is not None:
            latencies[row["api"]].append(row["latency_ns"])
    for name, values in latencies.items():
        api = found.apis[name]
        assert api.max_ns == max(values)
        assert api.quantile_ns(0.5) == pytest.approx(statistics.median_low(values), rel=0.05)
        assert api.quantile_ns(1.0) == pytest.approx(max(values), rel=0.05)
    waits = {"Fetch": 1_000_000, "ShareFetch": 1_000_000}
    beyond = sorted(
        row["total_ns"] - (row["max_wait_ms"] or 0) * waits.get(row["api"], 0)
        for row in rows
        if row["total_ns"] is not None and row["number"] is not None and row["api"] not in ("JoinGroup", "SyncGroup")
    )
    assert [slow.beyond_ns for slow in found.slowest] == beyond[:-4:-1]


def test_of_nothing_it_says_nothing(dataset, tmp_path):
    empty = Overview()
    assert overview(tmp_path, ["x"]) == overview(dataset, []) == overview(dataset, ["another.pcap"]) == empty
    assert empty.exchanges == 0 and module.Api().quantile_ns(0.5) is None
