"""The limits of reading a body match the docs."""

from kproxy.wire.bodies import found, logs
from tests.documented import missing, size


def test_the_limits_of_log_copies_match_the_docs() -> None:
    assert not missing("inside/bounds.md", f"copies of {size(logs.ALL_BYTES)}, {size(logs.BATCH_BYTES)} of one batch |")


def test_the_limits_of_names_in_one_body_match_the_docs() -> None:
    assert not missing(
        "inside/bounds.md",
        f"| topic-partitions and batches of all pending requests, or of one body | {found.MAX_FORGOTTEN}, and",
        f"| names of topics by id | {found.MAX_NAMES} per cluster |",
    )
    assert found.MAX_ERRORS == found.MAX_FORGOTTEN  # there is one for each topic-partition
