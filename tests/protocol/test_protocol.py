"""The bounds of what is remembered of answers are those that the docs state."""

from kproxy.protocol import shapes
from tests.documented import missing


def test_the_bounds_of_remembered_shapes_are_those_of_the_docs() -> None:
    assert not missing(
        "inside/bounds.md", f"| {shapes.LENGTHS} lengths per API and version, {shapes.FIELDS} fields each |"
    )
