"""Plots of a real capture's answers: gaps stay gaps, nothing is lost, names fit; and the notebook that shows them."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from kproxy.analysis import jobs
from kproxy.analysis.duck import Tables
from kproxy.convert.processes import convert
from kproxy.views import drawing, plots
from tests.captures import capture

NOTEBOOK = Path(__file__).parents[2] / "docs" / "plots.ipynb"
START = datetime(2026, 1, 31, 10, 15, tzinfo=UTC)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("plots")
    convert([capture("k41_quota")], place / "tables")
    return place


def latencies(*seconds, api="Produce"):
    return [
        {"time": START + timedelta(seconds=at), "api": api, "exchanges": 5}
        | {f"{name}_ns": 1_000_000 * (at + 1) for name in ("p50", "p90", "p99", "max")}
        for at in seconds
    ]


def paths(svg):
    """The lines of a drawing: each with its pieces, which gaps divide."""
    lines = re.findall(r'<path d="(M[^"]*)" stroke="(#[0-9a-f]{6})" stroke-width="1.5"/>', svg)
    return {colour: [piece for piece in line.split("M") if "L" in piece] for line, colour in lines}


def test_a_step_without_a_row_is_a_gap_in_the_line():
    whole = paths(drawing.svg(plots.percentiles(latencies(*range(6)), "1 second"), "whole"))
    broken = paths(drawing.svg(plots.percentiles(latencies(0, 1, 2, 5, 6, 7), "1 second"), "broken"))
    assert {len(pieces) for pieces in whole.values()} == {1} and len(whole) == 4
    assert {len(pieces) for pieces in broken.values()} == {2}
    assert all(piece.count("L") == 2 for pieces in broken.values() for piece in pieces)  # three points, no more


def test_a_value_between_gaps_is_a_point():
    svg = drawing.svg(plots.percentiles(latencies(0, 4, 8), "1 second"), "points")
    assert svg.count('aria-label="10:15:04.000 UTC: p99 5.00 ms of 5"') == 1 and not any(paths(svg).values())


def test_all_axes_have_their_span_zone_and_unit():
    first = int(START.timestamp() * 1e6)
    svg = drawing.svg(plots.percentiles(latencies(3), "1 second", (first, first + 60_000_000)), "axes")
    said = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "UTC, 2026-01-31" in said and "latency" in said and "p99" in said
    assert any(text.endswith(" ms") for text in said) and any(text.startswith("10:15:") for text in said)


def test_more_names_than_colours_are_counted_together():
    rows = [{"time": START, "api": f"api{n}", "exchanges": n + 1, "bytes": 10} for n in range(30)]
    svg = drawing.svg(plots.requests(rows, "1 second"), "many")
    labels = re.findall(r'aria-label="10:15:00.000 UTC: (\S+) ([\d.]+)/s"', svg)
    assert len(labels) == plots.SERIES + 1 and dict(labels)["others"] == "300"  # 1 to 24
    assert sum(float(value) for _, value in labels) == 30 * 31 / 2


def test_each_exchange_is_in_one_cell_of_the_heat_map(folder):
    with Tables(folder / "tables") as tables:
        rows = jobs.spread(tables["exchanges"], every="1 second").arrow()
    svg = drawing.svg(plots.heat_map(rows, "1 second"), "heat")
    counts = [int(count.replace(",", "")) for count in re.findall(r'UTC: ([\d,]+) of [^"]+"', svg)]
    assert sum(counts) == sum(rows["exchanges"].to_pylist())
    used = set(re.findall(r'fill="(#[0-9a-f]{6})"', svg))
    assert used & set(plots.HEAT) and "NaN" not in svg


def test_closed_windows_are_bars_the_longest_first():
    """Brokers that closed none, or without data, have no bar."""
    counts = {"10.0.0.1:9092": 3, "10.0.0.2:9092": 40, "10.0.0.3:9092": 0, "10.0.0.4:9092": None}
    rows = [{"broker": name, "zero_windows": count, "connections": 2} for name, count in counts.items()]
    svg = drawing.svg(plots.closed_windows(rows), "windows")
    said = ["10.0.0.2:9092: closed 40 times, 2 connections", "10.0.0.1:9092: closed 3 times, 2 connections"]
    assert re.findall(r'aria-label="([^"]*: closed [^"]*)"', svg) == said
    assert "times that a receiver closed its window" in svg


@pytest.mark.parametrize("name", ["\x1b[2J\u202eevil", "a" * 10_000, "</svg><script>", "שלום", "", None])
def test_names_are_printable_and_fit(name):
    short = plots.short(name)
    assert 0 < len(short) <= plots.LONGEST and short.isprintable()
    rows = [{"time": START, "client": name, "throttle_ms": 5}]
    svg = drawing.svg(plots.throttles(rows, "1 second"), "names")
    assert svg.endswith("</svg>") and svg.count("</svg>") == 1 and "<script" not in svg


def test_plots_accept_the_types_of_notebooks(folder):
    """Arrow, frames, pandas, lists: the same chart."""
    with Tables(folder / "tables") as tables:
        frame = jobs.spread(tables["exchanges"], every="1 second")
        kinds = (frame, frame.arrow(), frame.arrow().to_pandas(), frame.arrow().to_pylist())
        charts = [plots.heat_map(kind, "1 second").to_dict() for kind in kinds]
    for chart in charts:
        for value in chart["data"]["values"]:
            assert value["until"] - value["time"] == 1000
    assert all(chart["data"] == charts[0]["data"] for chart in charts)


@pytest.mark.ring2
def test_the_notebook_runs(folder):
    """In a kernel of its own, beside a folder of tables: every chart is drawn."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without what they print
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}).execute()
    shown = [output.data.get("text/html", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    asked = sum("plots." in cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert sum('"$schema": "https://vega.github.io/schema/vega-lite/' in text for text in shown) == asked > 3
