"""The command line refuses invalid arguments in one line, before any work."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy import __main__
from kproxy.cli import (
    analyze_group,
    check,
    cli,
    compat,
    convert,
    ctl,
    decode,
    demo,
    doctor,
    report,
    run,
    show,
    spark_group,
    top,
    users,
    watch,
)
from kproxy.errors import install_command
from tests import captures

KPROXY = (sys.executable, "-c", "from kproxy.cli import main; main()")
FRAME = "00120000000000070003666f6f"


def test_the_package_can_be_run_as_a_module():
    command = [sys.executable, "-m", "kproxy", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("kproxy, version ")
    assert Path(__main__.__file__).parent.name == "kproxy"
    wrong = subprocess.run([*command[:-1], "decode", "zz"], capture_output=True, text=True, check=False, timeout=60)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


@pytest.mark.parametrize("command", (["convert"], ["spark", "ingest"]), ids=("convert", "ingest"))
@pytest.mark.parametrize(
    "wrong", (["--port", "65536"], ["--port", "0"], ["--key-log", "no-such-file"], ["--key-log", "."])
)
def test_an_invalid_option_value_is_refused(tmp_path, command, wrong):
    capture = str(captures.capture("k41_tls13_keys"))
    result = CliRunner().invoke(cli, [*command, capture, "--out", str(tmp_path / "out"), *wrong])
    assert result.exit_code == 2
    assert f"Invalid value for '{wrong[0]}'" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", (["convert"], ["spark", "ingest"]), ids=("convert", "ingest"))
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", ""], "--out is empty: name a folder"),
        (["--out", "tables", "--record-values", "all"], "--record-values says what is shown of"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, monkeypatch, command, more, message):
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [*KPROXY, *command, captures.capture("k41_midstream"), *more], capture_output=True, text=True, check=False
    )
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([FRAME, "--file", "-"], "there twice"),
        (["--exchange", "12:3"], "CONNECTION:NUMBER"),
        (["--exchange", "12", "x.pcap"], "CONNECTION:NUMBER"),
        (["--exchange", "12:3", "--records", "x.pcap"], "give one of them"),
        (["--jsonl", FRAME], "--jsonl reads lines"),
        (["--jsonl", "--response", "Metadata:1"], "--jsonl reads lines"),
        (["--records", "--data", "RequestHeader"], "give one of them"),
        (["no-such.pcap"], "not hexadecimal: 'n'"),
        (["no-such.pcap"], "there is no file 'no-such.pcap' either"),
        (["00 00\n00 zz"], "binary frames come by --file or standard input\n"),
        (["--file", str(captures.capture("k41_quota"))], "is a capture, which holds packets: kproxy convert"),
        ([str(captures.capture("k41_quota"))], "is a capture, which holds packets: kproxy convert"),
        ([str(captures.capture("k41_gz"))], "is compressed: decompress it, or if it is a capture: kproxy convert"),
        (["--file", __file__], f"{__file__} is text: give hexadecimal digits alone"),
        ([__file__], "is a file: give it with --file"),
    ],
)
def test_no_argument_is_silently_ignored(arguments, reason):
    done = subprocess.run([*KPROXY, "decode", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, reason in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "given", "status", "message"),
    [
        (["decode", "--records"], b"this is a text and no log at all", 2, "<stdin> is text: give hexadecimal digits"),
        (
            ["decode"],
            b"00000010: 0000 000b 0012 0000 0000 0001 ffff 00  .......\n",
            2,
            "<stdin> is text: give hexadecimal",
        ),
        (["decode", "--sized"], b"\xff", 2, "in input of 1 byte;"),
        (["decode"], f"0000000d{FRAME}0000".encode(), 2, 'ApiVersions request v0  correlation id 7  client "foo"'),
        (["decode"], b"{ 0x00, 0x12, 0x00, 0x00, 0x00, 0x00, 0x00, 0x07, 0xff, 0xff };", 0, "correlation id 7"),
        (["decode", "--jsonl"], b"hello\n", 0, '"error": "not JSON: '),
        (["deocde"], b"", 2, "Did you mean 'decode'?"),
    ],
)
def test_unreadable_input_is_reported(arguments, given, status, message):
    done = subprocess.run([*KPROXY, *arguments], input=given, capture_output=True, check=False)
    assert (done.returncode, message in (done.stdout + done.stderr).decode()) == (status, True), done


def test_a_full_disk_is_reported_in_one_line():
    for arguments in (["decode", FRAME], ["decode", "--json", FRAME], ["--help"]):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run([*KPROXY, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "kproxy: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "missing", "extra"),
    [
        (["convert", "x.pcap", "--out", "tables"], "pyarrow", "offline"),
        (["demo", "--record", "tables"], "pyarrow", "offline"),
        (["spark", "latency", "tables"], "pyspark py4j", "spark"),
        (["spark", "latency", "tables"], "pyspark py4j pandas pyarrow numpy", "spark"),
        (["spark", "ingest", "x.pcap", "--out", "tables"], "pyspark py4j pandas pyarrow numpy", "spark"),
    ],
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(tmp_path, arguments, missing, extra):
    """The command names the running Python, since `pip` may belong to another. The first of several missing packages is
    named; its extra installs all."""
    code = f"import sys; sys.modules |= dict.fromkeys({missing.split()}); from kproxy.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    fix = install_command(extra)
    text = f"kproxy: this needs {missing.split()[0]}, which is not installed: {fix}\n"
    assert (done.returncode, done.stderr.replace("record: needs", "this needs")) == (2, text)


def test_every_command_is_a_file_and_listed_with_its_help():
    listed = CliRunner().invoke(cli, ["--help"]).output
    for name in cli.list_commands(None):
        command = cli.get_command(None, name)
        assert command.name == name
        assert command.get_short_help_str(200)[:40] in listed
        assert "kproxy " in CliRunner().invoke(cli, [name, "--help"]).output, f"{name} --help shows no example"
    for example in ("kproxy demo", "kproxy run --listen ", "kproxy convert ", "kproxy analyze "):
        assert f"    {example}" in listed
    for shell in ("bash", "zsh", "fish"):
        assert f"_KPROXY_COMPLETE={shell}_source" in listed
    files = {
        convert: "convert",
        ctl: "ctl",
        decode: "decode",
        demo: "demo",
        run: "run",
        spark_group: "spark",
        analyze_group: "analyze",
        report: "report",
        show: "show",
        top: "top",
        watch: "watch",
        compat: "compat",
        doctor: "doctor",
        users: "users",
        check: "check",
    }
    assert set(files.values()) == set(cli.list_commands(None))
    assert all(getattr(module, name).name == name for module, name in files.items())


def test_the_help_of_spark_needs_no_pyspark(tmp_path):
    """Nor pyarrow; the other commands report what to install."""
    from kproxy.analysis.jobs import JOBS

    code = "import sys; sys.modules |= dict.fromkeys(('pyspark', 'pyarrow')); from kproxy.cli import main; main()"

    def run(*arguments):
        return subprocess.run([sys.executable, "-c", code, "spark", *arguments], capture_output=True, text=True)

    listed = run("--help")
    assert listed.returncode == 0 and all(f"  {name} " in listed.stdout for name in ("ingest", *JOBS))
    for name in ("ingest", "slow"):
        assert f"kproxy spark {name} " in run(name, "--help").stdout
    done = run("latency", str(tmp_path))
    assert done.returncode == 2 and install_command("spark") in done.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_standard_files_that_were_closed_take_no_socket(closed):
    """uvloop aborts the process when it closes one of these file descriptors."""
    code = f"import os, sys; os.close({closed}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    for arguments, status in (
        (["decode"], 2),  # an empty standard input is no frame
        # an address reserved for documentation (RFC 5737)
        (["run", "--listen", "192.0.2.1:9092", "--bootstrap", "127.0.0.1:1"], 2),
    ):
        command = [sys.executable, "-c", code, *KPROXY[1:], *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=dict(os.environ), check=False)
        assert done.returncode == status, done.stderr.decode()


def test_only_one_capture_can_be_followed(tmp_path):
    """Only Ctrl-C would end the first capture, and the others would wait until then."""
    both = [str(captures.capture(name)) for name in ("k41_BASE", "k41_midstream")]
    result = CliRunner().invoke(cli, ["convert", *both, "--follow", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "--follow is of one capture" in result.stderr


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("analyse x", "analyze"),
        ("ctl statu", "status"),
        ("analyze rebalance x", "rebalances"),
        ("spark latncy x", "latency"),
    ],
)
def test_a_misspelt_command_gets_a_suggestion(words, near):
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2 and f"Did you mean '{near}'?" in done.output


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("analyze no-kafka.pcap rebalances", "analyze rebalances no-kafka.pcap"),
        ("analyze no-kafka.pcap", "analyze overview no-kafka.pcap"),
        ("no-kafka.pcap", "cli analyze overview no-kafka.pcap"),
        ("ctl status -a localhost:9464", "ctl -a ... status"),
        ("ctl status --token-file=x", "ctl --token-file ... status"),
        ("ctl groups http://localhost:9464", "ctl -a http://localhost:9464 groups"),
        ("convert no-kafkas.pcap --out x", "did you mean no-kafka.pcap?"),
        ("analyze slow no-kafkas.pcap", "no such file: did you mean no-kafka.pcap?"),
        ("analyze slow gone/no-kafka.pcap", "no such file, nor a folder gone"),
        ("compat localhost:1", "--bootstrap localhost:1"),
        ("run kproxy.toml", "extra argument (kproxy.toml) A file of settings has an option: --config kproxy.toml"),
        ("top --once -a localhost:9464 localhost:9600", "one address is asked: localhost:9600 or localhost:9464"),
    ],
)
def test_a_misplaced_argument_is_named_with_its_right_place(tmp_path, monkeypatch, words, fix):
    monkeypatch.chdir(tmp_path)
    Path("no-kafka.pcap").touch()
    done = CliRunner().invoke(cli, words.split())
    message = f"{done.output} {done.exception}"
    assert done.exit_code in (1, 2) and fix in " ".join(message.split()), message


def test_an_interrupt_during_the_imports_shows_no_traceback(tmp_path):
    (tmp_path / "click.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    folders = (str(tmp_path), str(Path(__main__.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-m", "kproxy", "decode", FRAME],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
