"""The three starts in five minutes: their commands and programs run as they stand, but for addresses and seconds."""

import re
import shlex
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from tests.demo.running import traffic
from tests.ports import free_ports
from tests.project import ROOT

KPROXY = (sys.executable, "-m", "kproxy")


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs/start" / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    return commands_of((ROOT / "docs/start" / f"{page}.md").read_text())


def commands_of(text: str) -> list[list[str]]:
    """The commands of a page, as words; comments left out, lines that go on joined."""
    found = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in found for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the first command of analysts and engineers has run, for a few seconds."""
    (first,) = {tuple(commands(page)[0]) for page in ("analyst", "engineer")}
    assert first[:2] == ("kproxy", "demo")
    folder = tmp_path_factory.mktemp("start")
    arguments = ["3" if word == "20" else word for word in first[1:]]
    subprocess.run([*KPROXY, *arguments], cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.ring2
def test_analysts(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recorded)
    asked = commands("analyst")[1:]
    assert len(asked) == 9
    for program, *words in asked:
        assert program == "kproxy"
        if words[0] == "report":  # made in the tests of its own page; here only its options are read
            command = cli.get_command(click.Context(cli), "report")
            assert command is not None and command.make_context("report", words[1:]).params["places"] == ("tables",)
            continue
        done = CliRunner().invoke(cli, words, catch_exceptions=False)
        assert done.exit_code == 0, (words, done.output)
        if words[1] in ("overview", "latency"):
            assert "No rows" not in done.output, words


def test_data_engineers(recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(recorded)
    programs = blocks("engineer", "python")
    assert len(programs) == 3
    for program in programs:
        exec(compile(program, "docs/start/engineer.md", "exec"), {})
        printed = capsys.readouterr().out
        assert any(name in printed for name in ("checkout", "web-frontend", "sensors", "Produce")), printed


def test_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_ports(8)
    asked = commands("operator")
    assert asked.pop(0) == ["kproxy", "demo"]
    (text,) = blocks("operator", "toml")
    with traffic() as world:
        for old, new in {
            "127.0.0.1:9600": f"127.0.0.1:{port}",
            "127.0.0.1:9092": f"127.0.0.1:{port + 1}",
            "kafka-1:9092": world.bootstrap.split(",")[0],
        }.items():
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "kproxy.toml").write_text(text)
        for program, *words in (asked.pop(0), asked.pop(0)):
            done = CliRunner().invoke(cli, words, catch_exceptions=False)
            assert program == "kproxy" and done.exit_code == 0, done.output
        program, *words = asked.pop(0)
        assert words[0] == "run"
        with subprocess.Popen([*KPROXY, *words], cwd=tmp_path, stderr=subprocess.DEVNULL) as running:
            try:
                wait_for(f"http://127.0.0.1:{port}/ready", b"")
                world.admit(f"127.0.0.1:{port + 1}")
                metrics = f"http://127.0.0.1:{port}/metrics"
                wait_for(metrics, rb'kproxy_requests_total{.*api="Produce".*} [1-9]')
                said = {}
                for program, *words in asked:
                    if program == "curl":
                        said[words[-1]] = urllib.request.urlopen(
                            f"http://{words[-1].replace('9600', str(port))}"
                        ).read()
                        continue
                    done = CliRunner().invoke(cli, ["ctl", "--admin", f"127.0.0.1:{port}", *words[1:]])
                    assert done.exit_code == 0, done.output
                    said[words[1]] = done.output.encode()
            finally:
                running.terminate()
    assert [name for name, text in said.items() if not text] == [] and len(said) == 7
    assert b"kproxy-demo" in said["connections"] and b"kproxy_requests_total{" in said["localhost:9600/metrics"]


def wait_for(url: str, text: bytes) -> None:
    """Until the URL answers with such a text in it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
            if re.search(text, answer.read()):
                return
        time.sleep(0.05)
    raise AssertionError(f"{url} did not answer with {text!r}")
