"""The configuration in the pages is right: kproxy loads each of it."""

import re
from pathlib import Path

import pytest

from kproxy.proxy.config.load import load

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(text, id=f"{page}-{number}")
    for page in ("admin.md", "flight.md", "gateway.md", "limits.md", "logs.md", "sasl.md", "tls.md", "zookeeper.md")
    for number, text in enumerate(
        re.findall(r"^```toml\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_configuration_of_the_pages_is_right(text, tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text(text)
    assert load(file).clusters
