"""The text of findings, and that their page agrees with the code."""

import io
import json
from pathlib import Path

import click

from kproxy.analysis.duck import Tables
from kproxy.analysis.findings import KINDS, findings
from kproxy.analysis.findings.finding import found
from kproxy.analysis.findings.kinds import outcome
from kproxy.views import findings as view
from tests.analysis.findings import made

PAGE = Path(__file__).parents[2] / "docs/findings.md"
MARK = "<!-- below: made by tools/make_findings.py -->\n"


def test_the_page_is_made_from_the_code():
    assert PAGE.read_text().partition(MARK)[2] == view.document(), "python tools/make_findings.py"


def test_findings_fit_into_eighty_columns_and_json_has_all_fields(tmp_path):
    with Tables(made.dataset(tmp_path / "tables")) as tables:
        found = findings(tables)
    file = io.StringIO()
    view.show(found, "table", file)
    text = click.unstyle(file.getvalue())
    assert max(map(len, text.splitlines())) <= 80
    assert all(KINDS[one.kind].title in text for one in found)
    assert "Change:   Raise linger.ms" not in text and "fetch.max.wait.ms" in text
    file = io.StringIO()
    view.show(found, "json", file, limit=3)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert len(rows) == 3
    assert rows[0]["says"] == view.sentence(found[0]) and rows[0]["evidence"] == dict(found[0].evidence)
    file = io.StringIO()
    view.show([], "table", file)
    assert file.getvalue() == f"{view.NOTHING}\n"


def test_consequences_have_their_time(tmp_path):
    with Tables(made.dataset(tmp_path / "tables")) as tables:
        one = findings(tables, kinds=["empty_fetches"])[0]
    times = [(made.START_NS + first * 10**9, made.START_NS + last * 10**9) for first, last in ((5, 9), (2, 7), (1, 1))]
    first, second, third = (one._replace(since_ns=since, until_ns=until) for since, until in times)
    cause = one._replace(consequences=(first, second, third._replace(kind="tiny_fetches")))
    early, late = view.followed(cause)
    at_once = view.followed(cause._replace(since_ns=made.START_NS + 2_500_000_000))
    assert [text[:20] for text in at_once] == [early[:20].replace("01", "02", 1), late[:20]]  # other observers
    assert early.startswith("00:00:01, Tiny fetches: ") and late.startswith("00:00:02 to 00:00:09, Empty fetches: ")


def test_consequences_of_one_kind_are_counted_together():
    place, kind = {"group_id": "g"}, "members_gone"
    evidence = {"waited_ns": 7 * 10**9, "longest_ns": 7 * 10**9, "rebalances": 1, "members": 1, "clients": "b"}
    other = {"waited_ns": 12 * 10**9, "longest_ns": 8 * 10**9, "rebalances": 2, "members": 3, "clients": "a, b"}
    one, two = (found(kind, "warning", 0.1, "default", "group g", place, (1, 2), each) for each in (evidence, other))
    (text,) = view.followed(one._replace(consequences=(one, two)))
    assert text.endswith(
        "in 3 rebalances the members waited 19.0 s for 4 that did not come back, 8.00 s at most; these were of a, b"
    )


def test_each_place_of_a_consequence_has_its_own_numbers_the_largest_first():
    """Duplicates of one client are not attributed to another; counts of all, such as failed requests, are summed."""
    made_up = (
        ("pay-writer", {"reordered_records": 96}),
        ("strict", {"doubled_records": 100, "reordered_records": 1602}),
        ("strict", {"doubled_records": 23}),
        ("one", {"doubled_records": 1}),
        ("two", {"doubled_records": 2}),
    )
    several = [
        found(
            *("resent_not_idempotent", "warning", 0.1, "default", f"client {client}", {"client": client}, (1, 2)),
            {"outcome": outcome(records), "resent": 1} | records,
        )
        for client, records in made_up
    ]
    refused = [
        found("no_leader", "warning", 0.1, "default", name, {}, (1, 2), {"failed": failed, "errors": "E", "api": name})
        for name, failed in (("Produce", 1), ("Fetch", 2))
    ]
    resent, failed = view.followed(several[0]._replace(consequences=(*several, *refused)))
    assert resent == (
        "00:00:00, Retries without idempotence: "
        "client strict: 123 records are in the log twice, 1,602 records are out of order in the log; "
        "client pay-writer: 96 records are out of order in the log; "
        "client two: 2 records are in the log twice; and 1 more"
    )
    assert failed.endswith("Produce, Fetch; 3 Fetch, Produce requests were refused: E")


def test_words_agree_with_their_numbers():
    """One request `was` refused; one of three, too."""
    for evidence, said in (
        ({"failed": 1}, "1 Produce request was refused: E"),
        ({"failed": 1, "asked": 3}, "1 of 3 Produce requests was refused: E"),
        ({"failed": 2, "asked": 3}, "2 of 3 Produce requests were refused: E"),
    ):
        one = found("no_leader", "note", 0.1, None, "", {}, (1, 2), evidence | {"api": "Produce", "errors": "E"})
        assert view.sentence(one) == said
    lost = {"outage_ns": 5 * 10**9, "refusals": 1}
    assert view.sentence(found("coordinator_lost", "note", 0.1, None, "", {}, (1, 2), lost)).endswith("refused 1 time")


def test_text_from_the_wire_moves_no_cursor(tmp_path):
    with Tables(made.dataset(tmp_path / "tables")) as tables:
        one = findings(tables, kinds=["empty_fetches"])[0]
    evil = one._replace(where="client \x1b[2Jx", evidence=(*one.evidence, ("client", "\x1b[2J")))
    assert "\x1b" not in click.unstyle("\n".join(view.lines([evil], 80)))
