"""`kproxy users`: passwords are read from standard input and never printed."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy.cli.users import users
from kproxy.proxy.sasl.users import is_password, read

PASSWORD = "correct horse"


def test_users_are_added_changed_listed_and_removed(tmp_path: Path) -> None:
    file = str(tmp_path / "users")

    def run(*arguments: str, password: str = "", status: int = 0) -> str:
        done = CliRunner().invoke(users, arguments, input=password)
        assert done.exit_code == status, done.output
        assert PASSWORD not in done.output
        return done.output

    assert run("add", file, "alice", password=f"{PASSWORD}\nmore\n") == "alice: added\n"
    assert "password changed" in run("add", file, "alice", password="another horse\n")
    assert run("add", file, "bob", password=PASSWORD) == "bob: added\n"
    assert is_password("SCRAM-SHA-256", "another horse", read(Path(file))["alice"]["SCRAM-SHA-256"])
    assert run("list", file).splitlines() == [
        "alice  PLAIN SCRAM-SHA-256 SCRAM-SHA-512",
        "bob  PLAIN SCRAM-SHA-256 SCRAM-SHA-512",
    ]
    assert "removed" in run("remove", file, "alice")
    assert "no user alice" in run("remove", file, "alice", status=1)
    assert "cannot be read" in run("list", file + "x", status=1)
    for bad in ("short", "", "with\ttab and more", "ﬁve and more words"):
        run("add", file, "carol", password=bad, status=2)
    assert list(read(Path(file))) == ["bob"]


@pytest.mark.parametrize("content", ["alice:secret\n", "x" * 100])
def test_a_file_with_other_content_is_left_unchanged(tmp_path: Path, content: str) -> None:
    file = tmp_path / "users"
    file.write_text(content)
    done = CliRunner().invoke(users, ["add", str(file), "bob"], input=PASSWORD)
    assert done.exit_code == 1 and "line 1" in done.output and "secret" not in done.output
    assert file.read_text() == content


def test_names_that_no_login_could_use_are_refused_with_a_remedy(tmp_path: Path) -> None:
    def add(file: Path, name: str) -> tuple[int, str]:
        done = CliRunner().invoke(users, ["add", str(file), name], input=PASSWORD)
        return done.exit_code, done.output

    file = tmp_path / "users"
    status, output = add(file, "User:alice")
    assert status == 2 and "alice, not User:alice" in output
    status, output = add(tmp_path / "none" / "users", "alice")
    assert status == 1 and f"there is no folder {tmp_path / 'none'}" in output
    assert not file.exists()
