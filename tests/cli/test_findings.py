"""`kproxy analyze findings` as a user types it."""

from click.testing import CliRunner

from kproxy.cli import cli
from tests.analysis.findings import made


def asked(*arguments):
    return CliRunner().invoke(cli, ["analyze", *map(str, arguments)], catch_exceptions=True)


def test_invalid_questions_are_reported(tmp_path):
    place = made.dataset(tmp_path / "tables")
    for option, message in (
        (("--kind", "slow_brokers"), "did you mean slow_broker"),
        (("--threshold", "slow=1"), "there is no 'slow'"),
        (("--from", "soon"), "is no time"),
    ):
        done = asked("findings", place, *option)
        assert done.exit_code != 0 and message in str(done.exception) + done.output
    assert "commit_rate = 10" in asked("findings", "--list").stdout


def test_an_absence_of_rows_is_not_reported_as_healthy(tmp_path):
    place = made.dataset(tmp_path / "tables")
    assert "nothing to judge" not in asked("findings", place).output
    answer = asked("findings", place, "--from", "2001-01-01", "--to", "2001-01-02")
    assert "There is nothing to judge. The table exchanges has" in answer.output
    assert "none is chosen by --from and --to" in answer.output
