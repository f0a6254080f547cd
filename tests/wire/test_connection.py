"""Who is connected with whom, and the id by which tables know that connection."""

from dataclasses import fields, replace

from kproxy.wire.connection import ConnectionInfo

ENDS = ("client_address", "client_port", "broker_address", "broker_port", "opened_ns")
INFO = ConnectionInfo("east", "live:main", "10.0.0.1", 40000, "10.0.0.2", 9092, 3, 1_700_000_000_000_000_000)


def test_the_id_of_a_connection_is_the_same_for_ever_and_fits_a_column_of_int64() -> None:
    """It is in tables that were written long ago, and derived again by other machines."""
    assert INFO.id == INFO.id == 7822667838884305199
    captured = ConnectionInfo("default", "a.pcap", "10.0.0.1", 40000, "10.0.0.2", 9092, None, 1)
    assert captured.id == 4083341021542229837
    ids = {replace(INFO, client_port=port).id for port in range(1000)}
    assert len(ids) == 1000 and max(ids) < 1 << 63


def test_the_id_is_of_both_ends_and_the_first_moment_alone() -> None:
    """A capture may be renamed, the broker's id be learnt later; whether kproxy ends TLS is known live alone."""
    fresh = replace(INFO)
    assert fresh.id == INFO.id and fresh == INFO == replace(INFO)  # an id that was computed is no difference
    assert hash(fresh) == hash(replace(INFO)) and " _id=" not in repr(INFO) and not INFO.ends_tls
    for field in fields(INFO):
        if field.init:
            value = getattr(INFO, field.name)
            other = replace(INFO, **{field.name: f"{value}x" if isinstance(value, str) else value + 1})
            assert (other.id == INFO.id) == (field.name not in ENDS), field.name
            assert other != INFO
