"""The audit has the failed logins of all clients, and bounds the lines of frequent ones."""

import json
from pathlib import Path

from kproxy.errors import RefusedClient
from kproxy.proxy.admission.failed_logins import MAX_ADDRESSES, MAX_ERROR, RATE, FailedLogins, is_failed_login
from kproxy.proxy.config.addresses import Address
from kproxy.proxy.filters.policy.audit import MAX_NAME, Audit


class Written:
    """The lines of an audit, and a clock that stands still."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "audit.jsonl"
        self._audit = Audit(str(self._file))
        self.now_s = 100.0
        self.logins = FailedLogins("shop", self._audit, lambda: 1_700_000_000_123_000_000, lambda: self.now_s)

    def add(self, host: str, claimed: str = "alice", mechanism: str = "PLAIN", error: str = "wrong") -> None:
        self.logins.add(Address(host, 5), mechanism, claimed, "failed", error, renewal=False)

    def lines(self) -> list[dict[str, object]]:
        self._audit.flush(10)
        return [json.loads(line) for line in self._file.read_bytes().splitlines()]

    def close(self) -> None:
        self._audit.close()


def test_a_line_has_the_user_the_address_the_mechanism_and_the_reason(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.add("10.0.0.1", "al\nice\x1b[31m\u202e", error="x" * 10_000)
    written.now_s += 1
    written.add("10.0.0.1", "a" * 10_000, "m" * 10_000)
    written.now_s += 1
    written.add("10.0.0.1", "", "")
    first, second, third = written.lines()
    assert first == {
        "time": "2023-11-14T22:13:20.123Z",
        "cluster": "shop",
        "client": "10.0.0.1:5",
        "login": "first",
        "mechanism": "PLAIN",
        "claimed": "User:al\nice\x1b[31m\u202e",
        "decision": "deny",
        "reason": "failed",
        "error": "x" * MAX_ERROR,
    }
    assert (tmp_path / "audit.jsonl").read_bytes().isascii()
    assert second["claimed"] == "User:" + "a" * MAX_NAME and second["mechanism"] == "m" * MAX_NAME
    assert third["claimed"] is None and third["mechanism"] is None
    written.close()


def test_a_client_that_guesses_gets_one_line_a_second_and_its_other_failures_are_counted(tmp_path: Path) -> None:
    written = Written(tmp_path)
    for _ in range(1000):
        written.add("10.0.0.1")
    written.add("10.0.0.2", "bob")
    written.now_s += 1
    written.add("10.0.0.1")
    lines = written.lines()
    assert [(line["client"], line.get("left_out")) for line in lines] == [
        ("10.0.0.1:5", None),
        ("10.0.0.2:5", 999),
        ("10.0.0.1:5", None),
    ]
    written.close()


def test_failures_from_many_addresses_share_one_rate_of_lines_and_bounded_memory(tmp_path: Path) -> None:
    written = Written(tmp_path)
    for number in range(100_000):
        written.now_s = 100 + number / 10_000
        written.add(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    lines = written.lines()
    assert len(lines) == 10 * RATE + RATE - 1
    assert sum(line.get("left_out", 0) for line in lines) + len(lines) <= 100_000  # type: ignore[misc]
    assert len(written.logins._last) <= MAX_ADDRESSES
    written.close()


def test_a_failed_login_is_one_of_sasl_or_of_a_certificate_and_nothing_else() -> None:
    assert is_failed_login(RefusedClient("authentication", ""))
    assert all(
        is_failed_login(RefusedClient("tls", "", kind)) for kind in ("certificate", "no_certificate", "principal")
    )
    assert not any(is_failed_login(RefusedClient("tls", "", kind)) for kind in ("closed", "plaintext", "rejected"))
    assert not is_failed_login(RefusedClient("authentication", "", "no_room"))
    assert not is_failed_login(RefusedClient("limit", ""))
