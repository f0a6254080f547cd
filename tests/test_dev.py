"""`./dev`: of several at once, one sets up and the others wait."""

import fcntl
import os
import shutil
import signal
import subprocess

import pytest

from tests.project import ROOT

INPUTS = ("pyproject.toml", "tests/requirements.txt")  # of which the stamp has the checksums

# Stands for the kproxy that the setup would install: says that it runs, then waits for its input to end.
PROGRAM = '#!/bin/sh\necho "started $*"\ncat >/dev/null\n'


@pytest.fixture
def project(tmp_path):
    """A folder whose setup has been done, as the stamps say."""
    (tmp_path / "tests").mkdir()
    for name in (*INPUTS, "dev"):
        shutil.copy(ROOT / name, tmp_path / name)
    program = tmp_path / ".venv/bin/kproxy"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (tmp_path / ".cache").mkdir()
    sums = [
        subprocess.run(["cksum"], stdin=(tmp_path / name).open(), capture_output=True, text=True, check=True).stdout
        for name in INPUTS
    ]
    (tmp_path / ".venv/kproxy-top.stamp").write_text(" ".join((str(tmp_path), *map(str.rstrip, sums))))
    return tmp_path


def start(project):
    pipe = subprocess.PIPE
    command = [project / "dev", "demo", "--seconds", "1"]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_a_command_that_is_none_is_named(project):
    done = subprocess.run([project / "dev", "foo"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(
        "dev: no command 'foo'\n./dev demo | test | lint | land | bench"
    )
    for asked in ("help", "--help"):
        done = subprocess.run([project / "dev", asked], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("./dev demo | test | lint | land")


def test_each_command_explains_itself_and_sets_nothing_up(project):
    """`./dev land --help` landed, which takes half an hour."""
    usage = subprocess.run([project / "dev", "help"], capture_output=True, text=True, check=True).stdout
    commands = usage.partition(":")[0].removeprefix("./dev ").split(" | ")
    assert {"demo", "test", "land"} <= {*commands}
    for command in commands:
        done = subprocess.run([project / "dev", command, "--help"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"  {command}  ") and done.stderr == ""
        assert not any(done.stdout.count(f"\n  {other}  ") for other in commands)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("land", "now"), "land takes no arguments: now"),
        (("screenshots", "--all"), "screenshots takes no arguments: --all"),
        (("lint", "kproxy"), "lint takes --fix alone: kproxy"),
        (("test", "wire"), "there is no test in wire"),
        (("test", "-x", "tests/wire/test_none.py::test_it"), "there is no test in tests/wire/test_none.py"),
        (("test", "all", "--shard", "7/6"), "--shard 7/6: I/N is needed, I from 1 to N"),
        (("test", "all", "--shard=0/2"), "--shard 0/2: I/N is needed, I from 1 to N"),
        (("test", "--shard"), "--shard : I/N is needed, I from 1 to N"),
        (("test", "all", "--shards", "1/6"), "there is no option --shards"),
        (("test", "--ring", "3"), "--ring 3: tests are of ring 1 or 2"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_before_anything_is_done(project, arguments, said):
    done = subprocess.run([project / "dev", *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"dev: {said}\n") and done.stdout == ""


@pytest.mark.parametrize("path", ["wire", "kproxy/wire", "./kproxy/wire/session.py", "wire/test_session.py::test_it"])
def test_the_tests_that_were_meant_are_named(project, path):
    (project / "tests/wire").mkdir()
    (project / "tests/wire/test_session.py").touch()
    done = subprocess.run([project / "dev", "test", path], capture_output=True, text=True)
    meant = "tests/wire/test_session.py" if "session" in path else "tests/wire"
    assert done.returncode == 1 and done.stderr.endswith(f"     did you mean: ./dev test {meant}\n")


def test_what_is_set_up_and_run_for_arguments_of_test(project):
    """What Chromium and HDFS are for is rare: who names other tests does not wait for them."""
    first = "command=${1:-help}\n"
    before, _, after = (project / "dev").read_text().partition(first)
    stubs = "set_up_test() { echo few; }\nset_up_all_tests() { echo all; }\n"
    (project / "dev").write_text(before + stubs + first + after)
    python = project / ".venv/bin/python"
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o755)
    (project / "bench").mkdir()
    (project / "tests/test_wire.py").touch()
    (project / "tests/test_page.py").write_text("from tests import chromium\n")
    for arguments, expected in (
        ("", "few -m pytest -n 3 --ring 1"),
        ("-k bench", "few -m pytest -n 3 --ring 1 -k bench"),
        ("tests/test_wire.py -x", "few -m pytest -n 3 tests/test_wire.py -x"),
        ("tests/test_wire.py::test[a::b]", "few -m pytest tests/test_wire.py::test[a::b]"),
        ("tests/test_page.py", "all -m pytest -n 3 tests/test_page.py"),
        ("tests", "all -m pytest -n 3 tests"),
        ("--ring 2", "all -m pytest -n 3 --ring 1 --ring 2"),
        ("tests/test_wire.py --ring=2", "few -m pytest -n 3 tests/test_wire.py --ring=2"),
        ("tests/test_page.py tests/test_wire.py", "all -m pytest -n 3 tests/test_page.py tests/test_wire.py"),
        ("all", "all -m pytest -n 3"),
        ("all --shard 2/6", "all -m pytest -n 3 --ring 2 --reruns 2 --shard 2/6"),
    ):
        done = subprocess.run([project / "dev", "test", *arguments.split()], capture_output=True, text=True, check=True)
        assert " ".join(done.stdout.split()) == expected


def test_a_second_setup_waits_for_the_first(project):
    with (project / ".cache/dev.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the first does
        second = start(project)
        assert second.stderr.readline() == "dev: waiting for another ./dev that sets up\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert second.stdout.readline() == "started demo --seconds 1\n"
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what runs then holds nobody up
        third = start(project)
        assert third.stderr.readline() == "dev: waiting for another ./dev that sets up\n"
        fcntl.flock(lock, fcntl.LOCK_UN)
        for process in (second, third):
            process.communicate(timeout=30)
            assert process.returncode == 0


def test_a_step_of_the_setup_ends_with_it(project):
    """Spark, which keeps its classes for a minute, went on without the `./dev` that had started it."""
    first = "command=${1:-help}\n"
    before, _, after = (project / "dev").read_text().partition(first)
    (project / "dev").write_text(before + "set_up_demo() { quietly .venv/bin/kproxy; }\n" + first + after)
    os.mkfifo(project / "says")
    (project / ".venv/bin/kproxy").write_text("#!/bin/sh\nexec 3>says\necho started >&3\nexec tail -f /dev/null\n")
    setup = start(project)
    with (project / "says").open() as says:
        assert says.readline() == "started\n"
        setup.terminate()
        assert says.read() == "", "it has ended"
    assert setup.communicate(timeout=60) == ("", "") and setup.returncode == 1


@pytest.mark.parametrize("ends_by", ["SIGINT", "SIGTERM", "a step that fails"])
def test_a_background_step_of_the_setup_ends_with_it(project, ends_by):
    """Installing Python packages went on after SIGTERM, and after Debian's could not be installed."""
    first = "command=${1:-help}\n"
    before, _, after = (project / "dev").read_text().partition(first)
    stubs = 'for each in venv java_17 debian core_if_cargo kafka; do eval "$each() { :; }"; done\n'
    stubs += "python_packages() { quietly .venv/bin/kproxy; }\n"
    stubs += 'kafka_jars() { read -r go; [ "$go" = wait ] || fail "no jars" "none"; }\n'
    (project / "dev").write_text(before + stubs + first + after)
    os.mkfifo(project / "says")
    (project / ".venv/bin/kproxy").write_text("#!/bin/sh\nexec 3>says\necho started >&3\nexec tail -f /dev/null\n")
    pipe = subprocess.PIPE
    setup = subprocess.Popen([project / "dev", "test"], stdin=pipe, stderr=pipe, text=True, start_new_session=True)
    with (project / "says").open() as says:
        assert says.readline() == "started\n"
        setup.stdin.write("fail\n" if ends_by == "a step that fails" else "wait\n")
        setup.stdin.flush()
        if ends_by == "SIGINT":
            os.killpg(setup.pid, signal.SIGINT)
        elif ends_by == "SIGTERM":
            setup.terminate()
        assert says.read() == "", "it has ended"
    assert setup.wait(60) != 0


@pytest.mark.parametrize("passes", [True, False])
def test_land_runs_ci_in_a_clone_without_the_environment_and_keeps_what_was_green(tmp_path, passes):
    """A project of its own, of which .ci/run says what it was given."""
    shutil.copy(ROOT / "dev", tmp_path / "dev")
    run = tmp_path / ".ci/run"
    run.parent.mkdir()
    ends = "" if passes else "echo 'FAILED tests/test_it.py::test_it[a b] - assert 1 - 2'; exit 1\n"
    run.write_text(f"#!/bin/sh\nenv\nls\n{ends}")
    run.chmod(0o755)
    (tmp_path / ".gitignore").write_text("/.cache\n")
    environment = {**os.environ, "SECRET_OF_THE_SHELL": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}

    def git(*arguments):
        made = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments]
        return subprocess.run(made, cwd=tmp_path, check=True, capture_output=True, text=True, env=environment).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "all")
    (tmp_path / "not-committed").touch()
    done = subprocess.run([tmp_path / "dev", "land"], capture_output=True, text=True, env=environment)
    assert "what is not committed is not tried" in done.stderr
    assert "SECRET_OF_THE_SHELL" not in done.stdout and "dev" in done.stdout and "not-committed" not in done.stdout
    green = tmp_path / ".cache/green"
    if passes:
        assert done.returncode == 0 and green.read_text() == git("rev-parse", "HEAD")
    else:
        assert done.returncode == 1 and not green.exists()
        assert "./dev test 'tests/test_it.py::test_it[a b]'\n" in done.stderr
