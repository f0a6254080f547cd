"""The command line: what cannot be is refused before any work is done, in one line."""

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from tests import captures


@pytest.mark.parametrize("command", (["convert"], ["spark", "ingest"]), ids=("convert", "ingest"))
@pytest.mark.parametrize(
    "wrong", (["--port", "65536"], ["--port", "0"], ["--key-log", "no-such-file"], ["--key-log", "."])
)
def test_an_option_that_cannot_be_is_refused(tmp_path, command, wrong):
    capture = str(captures.capture("k41_tls13_keys"))
    result = CliRunner().invoke(cli, [*command, capture, "--out", str(tmp_path / "out"), *wrong])
    assert result.exit_code == 2
    assert f"Invalid value for '{wrong[0]}'" in result.stderr
    assert not (tmp_path / "out").exists()
