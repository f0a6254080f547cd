"""docs/reference/ is what the code says: each page is made again and compared."""

import importlib.util
import re

import pytest

from kproxy.proxy.config.settings import CLUSTER_SETTINGS, Config
from kproxy.proxy.config.tls import UpstreamTls
from tests.project import ROOT

SPEC = importlib.util.spec_from_file_location("make_reference", ROOT / "tools/make_reference.py")
assert SPEC is not None and SPEC.loader is not None
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)
PAGES: dict[str, str] = reference.pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs/reference" / name).read_text() == PAGES[name], "run: python tools/make_reference.py"


def test_there_is_no_other_page() -> None:
    assert {path.name for path in (ROOT / "docs/reference").iterdir()} == set(PAGES)


def test_settings_have_what_a_reader_needs() -> None:
    rows = dict(re.findall(r"^\| (`\w+`) \| (.*) \|$", PAGES["settings.md"], re.MULTILINE))
    assert {f"`{name}`" for name in (*CLUSTER_SETTINGS, *UpstreamTls.model_fields)} <= set(rows)
    assert {
        f"`{name}`"
        for name in Config.model_fields
        if name not in ("clusters", "admin_tls", "flight", "otlp", "zookeeper")
    } <= set(rows)
    assert rows["`accept_backlog`"].startswith("whole number, from 1 to 65,535 | `1024` | Clients that wait")
    assert rows["`route`"].startswith("`ports`, `sidecar`, `sni`, `transparent` | `ports` | One port per broker")
    assert rows["`connect_timeout_s`"].endswith("| variable")
    assert rows["`broker_port_base`"].endswith("| `--broker-port-base`")


def test_a_setting_without_a_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "comment_of", lambda model, field: "")
    with pytest.raises(SystemExit, match="nothing says what it means"):
        reference.settings()


def test_every_command_has_its_section() -> None:
    headings = re.findall(r"^## (kproxy.*)", PAGES["commands.md"] + PAGES["questions.md"], re.MULTILINE)
    assert {"kproxy run", "kproxy users add", "kproxy ctl trace", "kproxy spark ingest"} <= set(headings)
    assert {"kproxy analyze slow", "kproxy analyze findings", "kproxy analyze sql"} <= set(headings)
    assert len(headings) == len(set(headings))
