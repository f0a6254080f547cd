"""`./dev`: of several at once, one sets up and the others wait."""

import fcntl
import os
import shutil
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
        assert done.returncode == 0 and done.stderr.startswith("./dev demo | test | lint | land")


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
