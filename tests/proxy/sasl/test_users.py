"""The file of users: written, read, changed under a running kproxy, and wrong."""

from pathlib import Path

import pytest
from scramp import ScramMechanism

from kproxy.proxy.sasl import users
from kproxy.proxy.sasl.users import UsersError, UsersFile, change, credential, is_password, lines, parse

SHA_256, SHA_512 = "SCRAM-SHA-256", "SCRAM-SHA-512"


def test_a_file_has_as_many_bytes_as_the_limit_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "users"
    change(file, "alice", "pass")
    size = file.stat().st_size
    monkeypatch.setattr(users, "MAX_FILE_BYTES", size)
    assert list(users.read(file)) == ["alice"]
    file.write_text(file.read_text() + "\n")
    with pytest.raises(UsersError, match=f"users is larger than {size} bytes"):
        users.read(file)


@pytest.mark.parametrize("mechanism", [SHA_256, SHA_512])
def test_credentials_are_those_of_scram_and_check_passwords(mechanism: str) -> None:
    known = credential(mechanism, "hunter2", 4096, b"salt of twelve")
    oracle = ScramMechanism(mechanism).make_auth_info("hunter2", 4096, b"salt of twelve")
    assert (known.salt, known.stored_key, known.server_key, known.iterations) == oracle
    assert is_password(mechanism, "hunter2", known)
    assert not is_password(mechanism, "hunter3", known)
    assert repr(known) == "Credential(***)"


def test_a_file_is_written_read_and_changed(tmp_path: Path) -> None:
    file = tmp_path / "users"
    assert not change(file, "alice", "pass-one")
    file.write_text("# by hand\n" + file.read_text())
    assert not change(file, "bob: builder#€", "pass-two")
    assert change(file, "alice", "pass-three")
    found = users.read(file)
    assert list(found) == ["bob: builder#€", "alice"]
    assert all(is_password(mechanism, "pass-three", found["alice"][mechanism]) for mechanism in (SHA_256, SHA_512))
    assert parse("\n".join(lines(found))) == found
    assert change(file, "bob: builder#€", None)
    assert list(users.read(file)) == ["alice"]
    assert "# by hand" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "pass-" not in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["users"]


GOOD = next(iter(lines({"alice": {SHA_256: credential(SHA_256, "hunter2")}})))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alice:hunter2", "line 1: 2 fields"),
        (f"{GOOD}\n{GOOD}", "line 2: the user has SCRAM-SHA-256 twice"),
        (GOOD.replace("SHA-256", "SHA-1"), "line 1: a name"),
        (GOOD.replace("8192", "12"), "iterations"),
        (GOOD.replace("8192", "9" * 5000), "iterations"),
        (GOOD + "!", "base64"),
        (GOOD.replace("SHA-256", "SHA-512"), "have 64"),
        ("%ff" + GOOD.removeprefix("alice"), "percent"),
    ],
)
def test_an_error_has_the_number_of_its_line_and_not_the_content(text: str, said: str) -> None:
    with pytest.raises(UsersError, match=said) as fault:
        parse(text)
    assert "hunter2" not in str(fault.value) and GOOD.split(":")[4] not in str(fault.value)


def test_a_changed_file_is_read_again_and_an_invalid_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "users"
    change(path, "alice", "one")
    file = UsersFile(path)
    assert not file.refresh()
    change(path, "bob", "two")
    assert file.refresh() and set(file.users) == {"alice", "bob"}
    path.write_text("nonsense")
    assert file.refresh() and "line 1" in file.fault
    assert set(file.users) == {"alice", "bob"}
    path.unlink()
    assert file.refresh() and "cannot be read" in file.fault
    assert set(file.users) == {"alice", "bob"}
    change(path, "carol", "three")
    assert file.refresh() and not file.fault and set(file.users) == {"carol"}
    with pytest.raises(UsersError, match=r"cannot be read: .*; write one by `kproxy users add .*none NAME`"):
        UsersFile(tmp_path / "none")


def test_an_unknown_user_gets_the_same_challenge_as_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "users"
    change(path, "alice", "one")
    file = UsersFile(path)
    alice, exists = file.find("alice", SHA_512)
    decoy, is_there = file.find("mallory", SHA_512)
    assert exists and not is_there
    assert len(decoy.salt) == len(alice.salt) and decoy.iterations == alice.iterations
    assert file.find("mallory", SHA_512)[0].salt == decoy.salt != file.find("trudy", SHA_512)[0].salt
    assert file.plain("alice")[0] == file.plain("mallory")[0] == SHA_512
    assert not is_password(SHA_512, "one", decoy)
