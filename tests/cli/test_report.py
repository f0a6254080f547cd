"""`kproxy report` from captures and from tables: its output for each audience, and its errors."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy.cli import cli, report
from kproxy.errors import KproxyError, install_command
from tests.captures import capture


def run(*arguments):
    return CliRunner().invoke(report.report, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.ring2
def test_the_commands_of_the_docs_run(tables, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    monkeypatch.chdir(tmp_path)
    for name in ("tables", "tables-before"):
        shutil.copytree(tables, name)
    shutil.copy(capture("k41_snap400"), "incident.pcap")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:  # each replaces the previous report
        done = CliRunner().invoke(cli, shlex.split(line)[1:], catch_exceptions=False)
        assert done.exit_code == 0 and done.stdout == "report.html\n", done.output
        text = Path("report.html").read_text()
        assert ("packets were cut by the snap length" in text) == ("incident" in line)
        assert ('id="compared"' in text) == ("--compare" in line)
        assert text.endswith("</html>\n") and 'id="latency"' in text
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["incident.pcap", "report.html"]
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(compile(program, "docs/report.md", "exec"), {})
    assert Path("latency.html").stat().st_size > 1000


def test_mistakes_are_reported_with_a_remedy(tables, tmp_path):
    (tmp_path / "mine.html").write_text("<p>not a report</p>")
    (tmp_path / "notes.txt").write_text("no capture")
    out = tmp_path / "report.html"
    for arguments, message in (
        ((tables, "--out", tmp_path / "mine.html"), "is there already and is no report of kproxy: name another file"),
        ((tables, "--out", tmp_path), "is a folder: name a file in it"),
        ((tables, "--out", tmp_path / "none" / "report.html"), "there is no folder"),
        ((tmp_path / "gone", "--out", out), "there is no such"),
        ((tmp_path / "notes.txt", "--out", out), "notes.txt"),
        ((tables, "--out", out, "--from", "noon"), "--from 'noon' is no time"),
        ((tables, "--out", out, "--compare", tmp_path / "gone"), "there is no such"),
        ((tables, "--out", out, "--from", "2031-01-01"), "no exchange to report on"),
        ((capture("k41_tls13_keys"), "--out", out), "give their keys with --key-log FILE"),
    ):
        with pytest.raises(KproxyError, match=re.escape(message)):
            run(*arguments)
        assert not out.exists() and (tmp_path / "mine.html").read_text() == "<p>not a report</p>"


def test_missing_packages_are_reported_with_the_command_that_installs_them(tables, tmp_path):
    code = "import sys; sys.modules['altair'] = None; from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, "report", str(tables), "--out", str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("kproxy: this needs altair, which is not installed: ")
    assert install_command("report") in done.stderr
