"""The how-tos for gateways and for captures: their commands run as they stand, but for addresses and names of files."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from tests.captures import capture
from tests.docs.test_start import commands_of
from tests.ports import free_ports
from tests.project import ROOT


def run(words: list[str]) -> str:
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, (words, done.output)
    return done.output


def test_gateways_and_sidecars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/gateway.md").read_text()
    monkeypatch.chdir(tmp_path)
    port = free_ports(8)
    names = re.findall(r"`(\w+\.toml)`:", page)
    for name, text in zip(names, re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL), strict=True):
        for old, new in ((":9600", f":{port}"), (':9092"\n', f':{port + 1}"\n'), (":19092", f":{port + 2}")):
            text = text.replace(old, new)
        Path(name).write_text(text)
    asked = commands_of(page)
    assert ["kproxy", "check", names[0]] in asked and ["kproxy", "run", "--config", names[0]] in asked
    assert "9093" in run(["check", names[0]]) or str(port + 2) in run(["check", names[0]])
    run(["check", names[1]])
    for program, *words in asked:
        if program == "kproxy" and words[0] == "ctl":
            command = cli.get_command(click.Context(cli), "ctl")
            assert isinstance(command, click.Group) and words[1] in command.list_commands(click.Context(command))


def test_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/capture.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("captures").mkdir()
    for name in ("incident.pcap", "kafka-0.pcap", "captures/20260101T000000.pcap"):
        shutil.copy(capture("k41_librdkafka"), name)
    shown = None
    for program, *words in commands_of(page):
        if program == "kproxy" and "--key-log" in words:  # decrypted in the tests of captures
            continue
        if program == "kproxy":
            if words[0] == "convert":
                shutil.rmtree("tables", ignore_errors=True)
            if words[0] == "show":
                assert words[2] == "--connection" and words[-1] == "--wireshark"
                words = [*shlex.split(shown or "")[1:], "--wireshark"]
            said = run(words)
            shown = next(
                (line[line.index("kproxy show ") :] for line in said.splitlines() if "kproxy show " in line), shown
            )
        elif program == "tshark":
            done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
    assert shown is not None
