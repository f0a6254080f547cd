"""Of a flood of connections, topics, clients and groups screens get a bounded part, whatever there is."""

import pytest

from bench import screens


def test_what_screens_ask_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "SECONDS", 0.5)
    monkeypatch.setattr(screens, "PAIRS", 1)
    found = screens.run(connections=300, topics=600, clients=300, groups=150, browser=True)
    asked = found["asked"]
    assert asked["/api/live"]["bytes"] < 60_000
    assert asked["/api/connections?limit=200"]["bytes"] < 200 * 500
    rows = found["top"]["rows"]
    assert {name: rows[name] for name in ("topics", "clients", "groups")} == dict.fromkeys(
        ("topics", "clients", "groups"), 100
    )
    assert rows["connections"] == 300 and found["top"]["bytes"] < 500_000
    page = found["page"]
    assert page["complaints"] == []
    assert page["rows"] < 110 and page["nodes"] < 3000  # ten of each table
    opened = page["rows_of_all"]
    assert {opened[name] for name in ("topics", "clients", "groups")} == {100}
    assert opened["connections"] == 200 and sum(opened.values()) < 900 and page["nodes_of_all"] < 20_000
