"""SQL typed in a terminal, with a real prompt on a pipe; and read from standard input."""

import duckdb
import pytest
from click.testing import CliRunner
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kproxy.analysis.duck import Tables
from kproxy.cli import cli
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.views import shell
from tests.captures import capture


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    place = tmp_path_factory.mktemp("shell")
    convert([capture("k41_BASE")], place, processes=1)
    return place


def test_a_session_goes_on_after_mistakes(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Tables(dataset) as tables, create_pipe_input() as keys:
        session = shell.Shell(tables.sql, tables.names(), (duckdb.Error,), str)
        typed = (
            "select nope from exchanges;\r",
            "copy exchanges to 'x';\r",
            ".nonsense\r.columns\r.help\r",
            ".limit 1\r.format json\r",
            "select api, count(*) as n\rfrom exchanges group by all order by n desc;\r",
            ".tables\r.columns quality\r",
            "select interrupted\x03",  # Ctrl-C gives the line up
            "\x04",  # Ctrl-D
        )
        with create_app_session(input=keys, output=DummyOutput()):
            keys.send_text("".join(typed))
            session.loop()
        assert "high_watermark" in set(session.words("select from partitions"))
        assert "high_watermark" not in set(session.words("select from quality "))
    said = capsys.readouterr()
    errors = said.err.splitlines()
    assert errors[0].startswith("Tables: ") and "exchanges" in errors[0]
    assert "there is no column 'nope'" in errors[1] and "one SELECT is asked for" in errors[2]
    assert "there is no command .nonsense" in errors[3] and ".columns takes a table" in errors[4]
    lines = said.out.splitlines()
    assert '{"api": "Fetch", "n": ' in said.out
    assert any(line.split()[:2] == ["sentence", "VARCHAR"] for line in lines)
    assert any(line.split()[0] == "exchanges" and line.split()[1].replace(",", "").isdecimal() for line in lines)
    assert "from exchanges group by all" in (tmp_path / "kproxy" / "sql_history").read_text()


def test_statements_from_standard_input_are_answered_in_turn(dataset):
    def run(text):
        arguments = ["analyze", "sql", str(dataset), "--format", "csv"]
        return CliRunner().invoke(cli, arguments, input=text, catch_exceptions=False)

    assert run("select 1 as one; -- a remark\n select ';' as two;\n").stdout == "one\n1\ntwo\n;\n"
    with pytest.raises(KproxyError, match="one SELECT is asked for"):
        run("select 1 as one; drop view exchanges;")
    with pytest.raises(KproxyError, match="these are no questions"):
        run("x" * (shell.MOST_BYTES + 1))
    with pytest.raises(KproxyError, match="there is no folder or capture 'tablez'"):
        CliRunner().invoke(cli, ["analyze", "sql", "tablez"], catch_exceptions=False)
