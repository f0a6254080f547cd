"""Every `pip install` of the documentation finds what it names, in a checkout as the pages say."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.project import ROOT, files

PAGES = [path for path in files() if path.suffix in (".md", ".ipynb") and path.name != "CHANGELOG.md"]
INSTALL = re.compile(r"pip install ((?:'[^']*'|[^\s`'\"&;#])+(?: [a-z][\w-]*)*)")

NEEDS_CARGO = "./native"  # the compiled core, which `./dev core` builds from the same sources


def installs() -> set[str]:
    """What the pages have pip install, each with its arguments as written."""
    return {found[1].strip() for path in PAGES for found in INSTALL.finditer((ROOT / path).read_text())}


def test_all_are_of_a_checkout_and_of_extras_that_exist() -> None:
    """Until the distribution is published, its name alone installs nothing."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    assert len(installs()) > 5
    assert NEEDS_CARGO in installs() and (ROOT / NEEDS_CARGO / "pyproject.toml").is_file()
    for what in installs() - {NEEDS_CARGO}:
        found = re.fullmatch(r"\.|'\.\[([\w,-]+)\]'(?: venv-pack)?", what)
        assert found, what
        assert set((found[1] or "").split(",")) - {""} <= extras, what


@pytest.mark.ring2
@pytest.mark.parametrize("what", sorted(installs() - {NEEDS_CARGO}))
def test_it_can_be_installed(what: str, tmp_path: Path) -> None:
    """By uv, which reads names as pip does, up to the download."""
    words = [word.strip("'") for word in what.split(" ")]
    uv = [str(Path(sys.executable).with_name("uv")), "--no-config", "pip", "install", "--dry-run"]
    uv += ["--cache-dir", str(tmp_path), "--python", sys.executable]
    environment = {**os.environ, "UV_SYSTEM_CERTS": "1"}  # as in ./dev
    subprocess.run([*uv, *words], cwd=ROOT, env=environment, check=True, timeout=250)
