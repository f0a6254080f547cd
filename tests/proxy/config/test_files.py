"""What cannot be read at once is refused, and nothing waits for it."""

import os
from pathlib import Path

import pytest

from kproxy.proxy.access.sasl import users
from kproxy.proxy.config.files import open_regular


def test_a_pipe_or_a_device_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")  # as in a Secret that Kubernetes mounts
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
