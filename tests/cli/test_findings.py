"""`kproxy analyze findings` as one types it."""

from click.testing import CliRunner

from kproxy.cli import cli
from tests.analysis.findings import made


def asked(*arguments):
    return CliRunner().invoke(cli, ["analyze", *map(str, arguments)], catch_exceptions=True)


def test_what_cannot_be_asked_is_said(tmp_path):
    place = made.dataset(tmp_path / "tables")
    for option, said in (
        (("--kind", "slow_brokers"), "did you mean slow_broker"),
        (("--threshold", "slow=1"), "there is no 'slow'"),
        (("--from", "soon"), "is no time"),
    ):
        done = asked("findings", place, *option)
        assert done.exit_code != 0 and said in str(done.exception) + done.output
    assert "commit_rate = 10" in asked("findings", "--list").stdout
