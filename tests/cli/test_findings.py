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


def test_nothing_to_judge_is_not_taken_for_nothing_wrong(tmp_path):
    place = made.dataset(tmp_path / "tables")
    assert "nothing to judge" not in asked("findings", place).output
    told = asked("findings", place, "--from", "2001-01-01", "--to", "2001-01-02")
    assert "There is nothing to judge. The table exchanges has" in told.output
    assert "none is chosen by --from and --to" in told.output
