"""The two ends of a connection, and its id in tables."""

from dataclasses import fields, replace

from kproxy.wire.connection import ConnectionInfo

ENDS = ("client_address", "client_port", "broker_address", "broker_port", "opened_ns")
INFO = ConnectionInfo("east", "live:main", "10.0.0.1", 40000, "10.0.0.2", 9092, 3, 1_700_000_000_000_000_000)


def test_the_id_of_a_connection_never_changes_between_releases_and_fits_int64() -> None:
    """Old tables contain it, and other machines derive it again."""
    assert INFO.id == INFO.id == 7822667838884305199
    captured = ConnectionInfo("default", "a.pcap", "10.0.0.1", 40000, "10.0.0.2", 9092, None, 1)
    assert captured.id == 4083341021542229837
    ids = {replace(INFO, client_port=port).id for port in range(1000)}
    assert len(ids) == 1000 and max(ids) < 1 << 63


def test_the_id_depends_only_on_both_ends_and_the_opening_time() -> None:
    """A capture may be renamed and the broker's id learned later; only a live kproxy knows if it terminates TLS."""
    fresh = replace(INFO)
    assert fresh.id == INFO.id and fresh == INFO == replace(INFO)  # a cached id makes no difference
    assert hash(fresh) == hash(replace(INFO)) and " _id=" not in repr(INFO) and not INFO.ends_tls
    for field in fields(INFO):
        if field.init:
            value = getattr(INFO, field.name)
            other = replace(INFO, **{field.name: f"{value}x" if isinstance(value, str) else value + 1})
            assert (other.id == INFO.id) == (field.name not in ENDS), field.name
            assert other != INFO
