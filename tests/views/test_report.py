"""A report as its readers have it: in a browser, light and dark, on a telephone and on paper; and hostile names."""

import json
import re
import shlex
from html.parser import HTMLParser

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.convert.processes import convert
from kproxy.views import report as view
from tests import chromium
from tests.captures import capture

HOSTILE = (
    "</script><script>document.title='taken'</script>",
    '"><img src=x onerror="document.title=1">',
    "'; drop table exchanges; --",
    "שלום \u202eevil\u202c",
    "a\\b'c\"d`e{f}\n\x1b[2J",
    "x" * 10_000,
    "others",
    "{{7*7}} ${7} datum.value",
)


def report(*arguments):
    done = CliRunner().invoke(cli, ["report", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of tables, and their report: quotas, errors, retransmissions, groups, leaders, lag."""
    place = tmp_path_factory.mktemp("report")
    convert([capture(name) for name in ("k41_quota", "k41_java_cluster")], place / "tables")
    convert([capture("k41_librdkafka")], place / "other")
    page = place / "report.html"
    done = report(place / "tables", "--compare", place / "other", "--out", page)
    assert done.stdout == f"{page}\n"
    return place / "tables", page


class Elements(HTMLParser):
    """Elements with their attributes, and the text inside some."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.open, self.texts = [], [], {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        self.open.append(tag)
        if tag in ("pre", "script", "bdi"):
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        if self.open and self.open[-1] in self.texts:
            self.texts[self.open[-1]][-1] += data


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text())
    return json.loads(text)["figures"]


@pytest.mark.ring2
def test_a_browser_shows_the_report_without_network_requests(made):
    _, page = made
    with chromium.opened(page) as browser:
        assert browser.requests() == [page.absolute().as_uri()] and not browser.complaints()
        drawn = "return [...document.querySelectorAll('figure[data-figure] > svg')].map(e => e.getBoundingClientRect())"
        boxes = browser.asked(drawn)
        assert len(boxes) > 12 and all(box["width"] > 300 and box["height"] > 60 for box in boxes)
        ground = "return getComputedStyle(document.body).backgroundColor"
        line = "return getComputedStyle(document.querySelector('svg [fill=\"#0072b2\"]')).fill"
        light = browser.asked(ground), browser.asked(line)
        assert browser.barriers() == []
        browser.prefers("dark")
        assert browser.barriers("color-contrast") == []
        dark = browser.asked(ground), browser.asked(line)
        assert light[0] != dark[0] and light[1] != dark[1]
        browser.asked("document.getElementById('theme').click()")
        assert (browser.asked(ground), browser.asked(line)) == light
        browser.asked("scrollTo(0, document.body.scrollHeight)")
        assert browser.asked("return document.querySelector('nav').getBoundingClientRect().top") == 0
        browser.width(360)
        assert browser.asked("return document.documentElement.scrollWidth") == 360
        browser.asked(
            "const m = document.querySelector('figure svg rect[aria-label], figure svg path[aria-label]');"
            "m.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 5, clientY: 5}))"
        )
        label = "return document.querySelector('figure svg rect[aria-label], figure svg path[aria-label]').ariaLabel"
        assert browser.asked("return document.getElementById('tip').textContent") == browser.asked(label)
        assert browser.printed().startswith(b"%PDF") and len(browser.printed()) > 20_000
        assert not browser.requests() and not browser.complaints()


def test_the_content_security_policy_allows_only_what_the_report_needs(made):
    _, page = made
    elements = Elements(page.read_text())
    (policy,) = (each["content"] for tag, each in elements.found if each.get("http-equiv"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert not [tag for tag, each in elements.found if each.get("style") or any(name[:2] == "on" for name in each)]
    outside = [value for _, each in elements.found for name, value in each.items() if name in ("src", "href")]
    assert all(value == "data:," or value.startswith("#") for value in outside)
    assert page.stat().st_size < 3_000_000


def test_the_report_begins_with_the_verdict_and_four_figures(made):
    _, page = made
    top, _, rest = page.read_text().partition("<nav>")
    assert rest and re.search(r'<p class="verdict"><bdi>\w[^<]{20,}</bdi></p>', top)
    assert len(re.findall(r"<div><span>[^<]+</span><b>[^<]+</b><small>", top)) == 4


def test_each_figure_equals_the_answer_of_its_command(made):
    """Each plot has its command, which prints the numbers that the plot draws."""
    _, page = made
    commands = {each for each in Elements(page.read_text()).texts["pre"] if each.startswith("kproxy analyze")}
    known = {name: figure for name, figure in data_of(page).items() if figure["rows"]}
    asked = 0
    for command in sorted(commands):
        words = shlex.split(command)
        if "--limit" not in words:  # a command that follows from a finding
            continue
        done = CliRunner().invoke(cli, [*words[1:], "--format", "json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        values = [[plain(value) for value in row.values()] for row in rows]
        columns = list(rows[0]) if rows else []
        assert {"columns": columns, "rows": values} in [
            {"columns": figure["columns"], "rows": [list(map(rounded, row)) for row in figure["rows"]]}
            for figure in known.values()
        ], command
        asked += 1
    assert asked > 15


def plain(value):
    """A value of `--format json` as the file has it."""
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", value):
        from datetime import datetime

        return round(datetime.fromisoformat(value).timestamp() * 1e6)
    return rounded(value)


def rounded(value):
    return round(value, 9) if isinstance(value, float) else value


@pytest.mark.ring2
def test_each_section_shows_both_captures(made):
    """The sections that can be compared have the content of this capture above that of the other one."""
    place, page = made
    text = page.read_text()
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', text))
    heads = {name: re.findall(r"<h3>Beside the other:? ?([^<]*)</h3>", body) for name, body in sections.items()}
    assert {name: len(found) for name, found in heads.items() if found} == {
        "findings": 1,
        "load": 1,
        "errors": 2,
        "topics": 2,
        "groups": 2,
        "network": 1,
        "who": 2,
        "quality": 1,
    }
    _, _, network = sections["network"].partition("<h3>Beside")
    rows = re.findall(r"<tr><td.*?</tr>", network)
    answers = [
        {row["broker"]: row for row in map(json.loads, asked("connections", tables, "--by", "broker"))}
        for tables in (place, place.parent / "other")
    ]
    assert len(rows) == len(answers[0].keys() | answers[1].keys())
    for row in rows:
        broker, *cells = re.findall(r"<td[^>]*>(.*?)</td>", row)
        broker = re.sub("<[^>]*>", "", broker)
        both = [re.split("<[^>]*>+", cell.replace("<br>", "")) for cell in cells]
        for side, answer in enumerate(answers):
            count = f"{answer[broker]['connections']:,}" if broker in answer else "-"
            again = f"{answer[broker]['retransmissions']:,}" if broker in answer else "-"
            assert (both[0][side], both[3][side]) == (count, again)
    *_, table = re.findall(r"<table>.*?</table>", sections["compared"])  # the others are those of plots
    titles = re.findall(r"<th[^>]*>([^<]*)</th>", table)
    assert titles[:6] == ["api", "exchanges", "p50", "p50 change", "p99", "p99 change"] and "b exchanges" not in titles
    counts = {
        api: (one, other)
        for api, one, other in re.findall(
            r"<tr><td[^>]*><bdi>(\w+)</bdi></td><td[^>]*>(.*?)<br><span[^>]*>(.*?)<", table
        )
    }
    assert "above 1, this one is slower" in sections["compared"]
    both = [json.loads(line) for line in asked("compare", place.parent / "other", "--with", place)]
    numbers = [[f"{row[name]:,}" if row[name] else "-" for name in ("b_exchanges", "exchanges")] for row in both]
    comparison = {row["api"]: tuple(each) for row, each in zip(both, numbers, strict=True)}
    assert len(counts) > 5 and counts.items() <= comparison.items()
    _, _, found = sections["findings"].partition("<h3>Beside")
    assert "only here" in found and "15 of 102 answers throttled" in found


def asked(job, *arguments):
    done = CliRunner().invoke(cli, ["analyze", job, *map(str, arguments), "--format", "json", "-q"])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_marks_are_those_of_the_figures(made):
    """There are as many cells, bars and points as rows, and each has its number as a label."""
    _, page = made
    text, figures = page.read_text(), data_of(page)
    drawings = dict(
        re.findall(r'<figure data-figure="(\w+)"><figcaption><b>[^<]*</b></figcaption>(<svg.*?</svg>)', text)
    )
    names = figures["batch_sizes"]["columns"]
    labels = re.findall(r'aria-label="([\d,]+) batches of (\S+) records', drawings["batch_sizes"])
    assert len(labels) == len(figures["batch_sizes"]["rows"])
    assert sorted(int(count.replace(",", "")) for count, _ in labels) == sorted(
        row[names.index("batches")] for row in figures["batch_sizes"]["rows"]
    )
    spread = figures["spread_at_once"]
    cells = re.findall(
        r"UTC: ([\d,]+) of [^\"]*\"", "".join(re.findall(r'data-figure="spread_at_once".*?</svg>', text))
    )
    at = spread["columns"].index("exchanges")
    assert sum(int(cell.replace(",", "")) for cell in cells) == sum(row[at] for row in spread["rows"])
    assert len(cells) == len(spread["rows"])
    names = figures["throttle_over_time"]["columns"]
    bars = drawings["throttle_over_time"].count("UTC: ")
    assert bars == len(figures["throttle_over_time"]["rows"]) > 0


def test_each_plot_can_be_shown_as_a_table(made):
    """The table has the plot's first rows."""
    _, page = made
    text, figures = page.read_text(), data_of(page)
    plots = dict(re.findall(r'<figure data-figure="(\w+)"><figcaption>(.*?)</figure>', text))
    assert len(plots) > 8
    for name, plot in plots.items():
        _, _, rest = plot.partition("<summary>Show as table</summary>")
        lines = rest.partition("</details>")[0].count("<tr>") - 1
        most = min(len(figures[name]["rows"]), view.POINTS)
        assert 0 < lines <= most and (lines == most or name.endswith(("over_time", "at_once", "waiting")))  # one API's


def test_slow_exchanges_are_explained_with_the_command_that_shows_them(made):
    _, page = made
    text = page.read_text()
    assert "muted for 5.56 s after earlier answers that were throttled" in text
    runs = data_of(page)["slow"]["rows"]
    assert "in a row, " in text and text.count('<svg class="parts"') == len(runs)
    (show, *_) = (each for each in Elements(text).texts["pre"] if each.startswith("kproxy show k41_quota.pcap"))
    words = shlex.split(show)
    done = CliRunner().invoke(cli, ["show", str(capture("k41_quota")), *words[3:]], catch_exceptions=False)
    assert done.exit_code == 0 and "muted for 5.56 s" in done.output


@pytest.fixture(scope="module")
def hostile(made, tmp_path_factory):
    """The same tables with hostile names of clients, groups and topics, and thousands of them."""
    tables, _ = made
    place = tmp_path_factory.mktemp("hostile") / "tables"
    place.mkdir()
    (place / "_kproxy.json").write_bytes((tables / "_kproxy.json").read_bytes())
    for folder in tables.iterdir():
        if not folder.is_dir():
            continue
        (place / folder.name).mkdir()
        found = pa.concat_tables(pq.ParquetFile(path).read() for path in sorted(folder.glob("*.parquet")))
        for name in {"client_id", "group_id", "topic", "error", "software_name", "cause"} & set(found.column_names):
            at = found.column_names.index(name)
            names = [
                None if value is None else renamed(name, number) for number, value in enumerate(found[name].to_pylist())
            ]
            found = found.set_column(at, name, pa.array(names, pa.string()))
        pq.write_table(found, place / folder.name / "all.parquet")
    return place


def renamed(name, number):
    if name in ("error", "cause"):
        return HOSTILE[number % 3]
    return HOSTILE[number % len(HOSTILE)] if number % 2 else f"{name}-{number % 5003}-{'y' * (number % 70)}"


@pytest.mark.ring2
def test_hostile_names_are_text_and_bounded(hostile, tmp_path):
    page = tmp_path / "report.html"
    report(hostile, "--out", page)
    text = page.read_text()
    elements = Elements(text)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 2 and "img" not in tags
    assert "x" * view.LONGEST_TEXT not in text and page.stat().st_size < 3_000_000
    assert not {character for character in text if not character.isprintable()} - {"\n"}
    assert any("<script>" in each for each in elements.texts["bdi"])  # shown as it is
    with chromium.opened(page) as browser:
        assert browser.asked("return document.title").startswith("kproxy report")
        assert not browser.complaints() and browser.requests() == [page.absolute().as_uri()]
        browser.width(360)
        assert browser.asked("return document.documentElement.scrollWidth") == 360
