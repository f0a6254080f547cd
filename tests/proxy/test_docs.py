"""The configuration in the pages is right: kproxy loads each of it."""

import re
from pathlib import Path

import pytest

from kproxy.proxy.config.load import load

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("admin", "flight", "gateway", "limits", "logs", "otlp", "sasl", "telemetry", "tls", "zookeeper")
EXAMPLES = [
    pytest.param(text, id=f"{page}-{number}")
    for page in PAGES
    for number, text in enumerate(
        re.findall(r"^```toml\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_configuration_of_the_pages_is_right(text, tmp_path):
    file = tmp_path / "kproxy.toml"
    file.write_text(text)
    assert load(file).clusters
