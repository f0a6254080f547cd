"""The frames of an exchange are found again by its row in the tables."""

import pytest

import kproxy
from kproxy.convert.frames import frames_of
from kproxy.convert.job import Settings
from kproxy.errors import KproxyError
from kproxy.protocol.shown import decode
from tests import captures


def some(rows, count=12):
    """Rows spread over the table, including the last."""
    rows = [row for row in rows if row["number"] is not None]
    return rows[:: max(1, len(rows) // count)] + rows[-1:]


@pytest.mark.parametrize("name", ["k41_BASE", "k41_quota", "k41_midstream"])
def test_the_frames_match_the_row(name):
    """Whether read by column or one by one, in order, and after a start in the middle."""
    capture = captures.capture(name)
    held = 0
    for row in some(list(kproxy.exchanges(capture))):
        found = frames_of([capture], row["connection"], row["number"])
        assert (found.api_key, found.api_version, found.outcome) == (row["api_key"], row["api_version"], row["outcome"])
        for frame, size in ((found.request, row["request_bytes"]), (found.response, row["response_bytes"])):
            assert frame is None or len(frame) + 4 == size
        if found.request is not None:
            header, _ = kproxy.decode_request(found.request)
            assert (header["correlationId"], header["clientId"]) == (row["correlation_id"], row["client_id"])
        if found.response is not None and row["decoded"] == "full":
            assert (
                decode.response(found.response, found.api_key, found.api_version).header["correlationId"]
                == (row["correlation_id"])
            )
            held += found.request is not None
    assert held >= 10


def test_frames_of_a_decrypted_connection_are_found(tmp_path):
    capture = captures.capture("k41_tls13_keys")
    keys = capture.with_suffix(".keys")
    key_log = str(keys) if keys.exists() else None
    rows = list(kproxy.exchanges(capture, key_log=key_log))
    assert rows
    row = rows[-1]
    found = frames_of([capture], row["connection"], row["number"], Settings(key_log=key_log))
    assert found.request is not None and len(found.request) + 4 == row["request_bytes"]


def test_a_missing_exchange_is_an_error():
    capture = captures.capture("k41_BASE")
    row = next(kproxy.exchanges(capture))
    with pytest.raises(KproxyError, match=r"no connection 7 in .*: name the capture that the tables were made of"):
        frames_of([capture], 7, 0)
    assert frames_of([capture], row["connection"], row["number"], Settings(cluster="other")).request
    with pytest.raises(KproxyError, match="no request with the number 99999"):
        frames_of([capture], row["connection"], 99999)
