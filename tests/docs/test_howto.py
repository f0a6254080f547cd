"""The how-tos for gateways and for captures: their commands run as they stand, but for addresses and names of files."""

import json
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
        for old, new in (
            (":9600", f":{port}"),
            (':9092"\n', f':{port + 1}"\n'),
            (":19092", f":{port + 2}"),
            ("/var/lib/kproxy/", ""),
        ):
            text = text.replace(old, new)
        Path(name).write_text(text)
    asked = commands_of(page)
    assert ["kproxy", "check", names[0]] in asked and ["kproxy", "run", "--config", names[0]] in asked
    assert "9093" in run(["check", names[0]]) or str(port + 2) in run(["check", names[0]])
    for name in names[1:]:
        run(["check", name])
    for program, *words in asked:
        if program == "kproxy" and words[0] == "ctl":
            command = cli.get_command(click.Context(cli), "ctl")
            assert isinstance(command, click.Group) and words[1] in command.list_commands(click.Context(command))


@pytest.mark.ring2
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
                words = shlex.split(shown or "")[1:]  # with Wireshark's words in the tests of `show`
            said = run(words)
            shown = next(
                (line[line.index("kproxy show ") :] for line in said.splitlines() if "kproxy show " in line), shown
            )
        elif program == "tshark":
            done = subprocess.run([program, *words], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
    assert shown is not None


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENDS = {"|", ">", ">>", "<", "&&", "&", ";"}


def commands_in(page: Path) -> list[list[str]]:
    """What is typed after `kproxy` in the code of a page, as words."""
    found = []
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        if language not in ("", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if not re.match(r"(sudo )?kproxy ", line) or "[OPTIONS]" in line:
                continue
            words = shlex.split(line.removeprefix("sudo "), comments=True)[1:]
            end = next((at for at, word in enumerate(words) if word in ENDS), len(words))
            found.append(words[:end])
    return found


def unknown(words: list[str]) -> list[str]:
    """Of a command: itself, or the options that it does not have."""
    command: click.Command | None = cli
    context = click.Context(cli)
    options: set[str] = {"--help", "--version"}
    at = 0
    while isinstance(command, click.Group):
        options |= {name for each in command.params for name in each.opts}
        takes = {
            name for each in command.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts
        }
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in takes else 1
        if at >= len(words):
            break
        command, at = command.get_command(context, words[at]), at + 1
        if command is None:
            return [words[at - 1]]
        context = click.Context(command, context)
    if command is not None:
        options |= {name for each in command.get_params(context) for name in (*each.opts, *each.secondary_opts)}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_in(page)], ids=lambda page: page.stem)
def test_every_command_of_a_page_is_there_with_its_options(page: Path) -> None:
    wrong = {" ".join(words): faults for words in commands_in(page) if (faults := unknown(words))}
    assert not wrong


def test_a_command_that_is_none_is_found() -> None:
    assert unknown(["analyze", "slowest", "tables"]) == ["slowest"]
    assert unknown(["run", "--listenn", "x"]) == ["--listenn"]
    assert not unknown(["ctl", "-a", ":1", "connections", "--client", "x"])


@pytest.mark.ring2
def test_questions_to_zookeeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds rows of an old cluster, with the names and the times of that one."""
    page = (ROOT / "docs/zookeeper.md").read_text()
    monkeypatch.chdir(tmp_path)
    run(["convert", str(ROOT / "tests/data/zookeeper/k0102_zkgroup_a.pcap.zst"), "--out", "tables", "-q"])
    asked = re.findall(r"^    kproxy (analyze .*)$", page, re.MULTILINE)
    answers = [run([*shlex.split(line.replace("12:05", "01:36")), "--format", "json", "-q"]) for line in asked]
    assert len(answers) == 5 and all(answers)
    owner = [json.loads(answer) for line, answer in zip(asked, answers, strict=True) if "partition = 3" in line]
    assert [row["member_id"] for row in owner] == ["legacy_c3"]
