"""The bounds of the logs that bodies are read for are those that the docs state."""

from kproxy.wire.bodies import logs
from tests.documented import missing, size


def test_the_bounds_of_copies_of_logs_are_those_of_the_docs() -> None:
    assert not missing("inside/bounds.md", f"copies of {size(logs.ALL_BYTES)}, {size(logs.BATCH_BYTES)} of one batch |")
