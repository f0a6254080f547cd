"""Invalid questions, with the error that every engine must report."""

import pytest


@pytest.fixture
def mistakes(tables, tmp_path):
    """Pairs of a command's arguments and the expected error."""
    (tmp_path / "there").mkdir()
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "_kproxy.json").write_text('{"schema_version": 99, "kproxy": "9.9"}')
    return (
        (("latency", tables, "--by", "colour"), "exchanges has no column 'colour': there are version, broker, client"),
        (("latency", tables, "--by", "clint"), "has no column 'clint': did you mean client"),
        (("connections", tables, "--by", "version"), "connections has no column 'version': did you mean"),
        (("latency", tables, "--every", "a while"), "--every 'a while' is no span of time: give a number and a unit"),
        (("latency", tables, "--every", "99999999 days"), "is no span of time"),
        (("latency", tables, "--from", "-99999999999d"), "--from '-99999999999d' is no time"),
        (("slow", tables, "--slower-than-ms", "1e300"), "--slower-than-ms 1e+300: give milliseconds, 0 or more"),
        (("slow", tables, "--slower-than-ms", "nan"), "--slower-than-ms nan: give milliseconds"),
        (("latency", tables, "--where", "clientid = 'x'"), "no column 'clientid': did you mean client_id"),
        (("latency", tables, "--where", "api = 'x' or (1=1"), "--where cannot be read near the end"),
        (("latency", tables, "--where", "1=1) or (1=1"), "--where cannot be read near ')'"),
        (("latency", tables, "--where", "true; drop table x"), "--where cannot be read near ';'"),
        (("latency", tables, "--where", "api in (select api from t)"), "`kproxy analyze sql` takes queries"),
        (("latency", tables, "--from", "noon"), "--from 'noon' is no time: give one of UTC like"),
        (("latency", tables, "--to", "-5 parsecs"), "--to '-5 parsecs' is no time"),
        (("latency", tmp_path), "holds no tables: name the folder that `kproxy convert`"),
        (("latency", tmp_path / "gone"), "there is no such folder"),
        (("latency", newer), "written by a newer kproxy (9.9"),
        (("latency", tables / "exchanges"), f"name the folder that holds all of them, {tables}"),
        (("compare", tables, "--with", tmp_path / "gone"), "there is no such folder"),
        (("clients", tables, "--kafka", "0.7"), "Kafka 0.7 is not known here; known are 0.8.0, 0.8.1, 0.8.2"),
        (("latency", tables, "--format", "parquet"), "go together"),
        (("latency", tables, "--format", "parquet", "--out", tmp_path / "there"), "is there already"),
    )
