"""The bench of memory counts what connections take."""

from bench import memory


def test_idle_connections_are_counted():
    found = memory.run(40)
    assert set(found) == {"start", "scraped", "idle"}
    assert all(0 < sizes["own_mb"] < sizes["rss_mb"] for sizes in found.values())
    assert found["idle"]["connections"] == 40
