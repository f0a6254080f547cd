"""The limits of remembered response shapes match the docs."""

from kproxy.protocol import shapes
from tests.documented import missing


def test_the_limits_of_remembered_shapes_match_the_docs() -> None:
    assert not missing(
        "inside/bounds.md", f"| {shapes.LENGTHS} lengths per API and version, {shapes.FIELDS} fields each |"
    )
