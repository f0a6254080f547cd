"""Files that cannot be read at once, such as pipes, are refused without waiting."""

import os
from pathlib import Path

import pytest

from kproxy.proxy.config.files import named, open_regular
from kproxy.proxy.sasl import users


def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")  # as in a mounted Secret of Kubernetes
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"text"
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("pipe", "no regular file"), (".", "directory"), ("none", "No such file")):
        with pytest.raises(OSError, match=says):
            open_regular(tmp_path / name)
    with pytest.raises(OSError, match="no regular file"):
        open_regular(Path("/dev/zero"))
    with pytest.raises(users.UsersError, match=r"pipe cannot be read: it is no regular file"):
        users.read(tmp_path / "pipe")


def test_a_secret_in_place_of_its_file_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "password").touch()
    for name in ("password", "/run/secrets/password", "secrets/none"):
        assert named(Path(name)) == name
    for secret in ("hunter2", "-----BEGIN PRIVATE KEY-----\nAb/c\n", "aa/bb\ncc"):
        assert named(Path(secret)).startswith("the file (its name is not repeated")
