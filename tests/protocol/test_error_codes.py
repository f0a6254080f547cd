from kproxy.protocol.error_codes import ERRORS, ErrorCode, error_name


def test_codes_are_all_there_in_order():
    assert list(ERRORS) == list(range(-1, len(ERRORS) - 1))
    assert len(ERRORS) >= 138  # Kafka 4.4; it only ever adds
    assert all(code == error.code for code, error in ERRORS.items())


def test_names_and_flags_that_clients_rely_on():
    assert ERRORS[0] == ErrorCode(0, "NONE", False, None)
    assert error_name(6) == "NOT_LEADER_OR_FOLLOWER"
    assert error_name(-1) == "UNKNOWN_SERVER_ERROR"
    assert error_name(35) == "UNSUPPORTED_VERSION"
    assert ERRORS[6].retriable and ERRORS[3].retriable
    assert not ERRORS[17].retriable and not ERRORS[35].retriable
    assert "leader" in (ERRORS[5].message or "")


def test_codes_of_the_future_have_a_name_too():
    assert error_name(9999) == "unknown_9999"
