"""Which captures the given paths name; no capture replaces the tables of another one."""

import json

import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.convert.job import FINGERPRINT_BYTES, Settings, captures_of, fingerprint
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from tests.captures import capture


def exchanges(folder, source):
    return pq.read_table(folder / "exchanges" / f"{source}.parquet").num_rows


def convert_command(*arguments):
    return CliRunner().invoke(cli, ["convert", *map(str, arguments)])


def test_another_capture_of_the_same_name_replaces_nothing(tmp_path):
    one, other = (tmp_path / name / "incident.pcap" for name in "ab")
    for path, name in ((one, "k41_BASE"), (other, "k41_midstream")):
        path.parent.mkdir()
        path.write_bytes(capture(name).read_bytes())
    out = tmp_path / "tables"
    convert([one], out)
    before = exchanges(out, one.name)
    with pytest.raises(KproxyError, match=r"has tables of another capture that is called incident\.pcap.*--overwrite"):
        convert([other], out)
    assert exchanges(out, one.name) == before and not list(out.glob(".unfinished*"))
    convert([other], out, Settings(overwrite=True))
    assert exchanges(out, one.name) < before
    with pytest.raises(KproxyError, match="another capture"):  # the fingerprint is that of the existing tables
        convert([one], out)


def test_a_grown_capture_replaces_its_own_tables(tmp_path):
    data = capture("k41_BASE").read_bytes()
    path, out = tmp_path / "grows.pcap", tmp_path / "tables"
    seen = []
    for size in (5000, 100_000, len(data)):  # below and above the number of bytes that the fingerprint covers
        path.write_bytes(data[:size])
        convert([path], out)
        seen.append(exchanges(out, path.name))
        stored = json.loads((out / "_kproxy.json").read_text())["fingerprints"][path.name]
        assert stored.partition(":")[0] == str(min(size, FINGERPRINT_BYTES))
        assert fingerprint(str(path), min(size, FINGERPRINT_BYTES)) == stored
    assert seen[0] < seen[1] < seen[2]


def test_any_file_name_gives_tables_that_readers_find(tmp_path):
    names = ("_incident.pcap", ".hidden.pcap", "2026-11-22T10:00:00.pcap", "t[1].pcap", f"{'x' * 245}.pcap")
    for name in names:
        (tmp_path / name).write_bytes(capture("k41_midstream").read_bytes())
        convert([tmp_path / name], tmp_path / "tables", Settings(append=True))
    assert sorted(set(pq.read_table(tmp_path / "tables/exchanges")["source"].to_pylist())) == sorted(names)


def test_rotated_files_are_the_same_capture_as_long_as_files_are_only_added(tmp_path):
    first, second = tmp_path / "r.pcap1", tmp_path / "r.pcap2"
    first.write_bytes(capture("k41_BASE").read_bytes())
    second.write_bytes(capture("k41_midstream").read_bytes())
    rotated = Settings(rotated=True)
    convert([first], tmp_path / "tables", rotated)
    convert([first, second], tmp_path / "tables", rotated)
    with pytest.raises(KproxyError, match="tables of another capture"):
        convert([first], tmp_path / "tables")


def test_invalid_settings_are_refused(tmp_path):
    for wrong in ({"ports": (99999,)}, {"ports": (0,)}, {"cluster": ""}, {"key_log": tmp_path / "nowhere.keys"}):
        with pytest.raises(KproxyError):
            Settings(**wrong)


def test_standard_input_is_always_a_new_capture(tmp_path):
    data = capture("k41_midstream").read_bytes()
    for status in (0, 1):
        done = CliRunner().invoke(cli, ["convert", "-", "--out", str(tmp_path / "tables")], input=data)
        assert done.exit_code == status
    assert "called stdin" in str(done.exception)
    assert fingerprint("-") is None and fingerprint(str(tmp_path / "gone")) is None


def test_settings_that_exclude_each_other():
    with pytest.raises(KproxyError, match="detail topics does not look at"):
        Settings(detail="topics", checksums=True)
    (job,) = captures_of(["a/b.pcap"], Settings(ports=(9093, 9092, 9093), cluster="east"))
    assert (job.source, job.paths, job.ports, job.cluster) == ("b.pcap", ("a/b.pcap",), (9092, 9093), "east")


@pytest.mark.parametrize(
    "command",
    [
        "convert x.pcap --out s3://bucket/tables",
        "convert s3://bucket/x.pcap --out tables",
        "spark ingest s3://bucket/x.pcap --out tables",
    ],
)
def test_urls_are_refused_before_a_folder_is_made(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, command.split())
    assert isinstance(done.exception, KproxyError) and "s3://bucket" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_the_topics_of_the_capture_are_listed_if_none_was_chosen(tmp_path):
    path = capture("k41_librdkafka")
    done = convert_command(path, "--out", tmp_path / "some", "--records", "nosuchtopic")
    assert done.exit_code == 0
    (line,) = (line for line in done.output.splitlines() if line.startswith("No records of nosuchtopic"))
    assert "There are batches of " in line and " rdk" in line and " rdk2" in line
    done = convert_command(path, "--out", tmp_path / "all", "--records", "rdk2")
    assert "No records of" not in done.output


def test_a_key_log_without_keys_of_the_capture_is_reported(tmp_path):
    other = tmp_path / "other.keys"
    other.write_text(f"CLIENT_RANDOM {'ab' * 32} {'cd' * 48}\n")
    mixed = (capture("k41_tls_nokeys_kcat"), "--out", tmp_path / "mixed")
    only = (capture("k41_tls13_keys"), "--out", tmp_path / "only")
    for given, words in ((("--key-log", other), "keys that the key log lacks"), ((), "some connections are encrypted")):
        assert words in " ".join(convert_command(*mixed, *given).output.split())
    for given, words in (
        (("--key-log", other), f"{other} has the keys of none of its TLS"),
        ((), "with --key-log FILE"),
    ):
        assert words in " ".join(convert_command(*only, *given).output.split())


@pytest.mark.parametrize("folders", ("", "date=2026-01-31/hour=05"))
def test_the_sql_of_the_help_text_reads_tables_in_one_folder_and_by_hour(tmp_path, monkeypatch, folders):
    """`kproxy convert` writes into one folder, `kproxy spark ingest` by date and hour: the same line reads both."""
    convert_command(capture("k41_quota"), "--out", tmp_path / "tables")
    (file,) = (tmp_path / "tables" / "exchanges").iterdir()
    apis = set(pq.read_table(file)["api"].to_pylist())
    (file.parent / folders).mkdir(parents=True, exist_ok=True)
    file.rename(file.parent / folders / file.name)
    monkeypatch.chdir(tmp_path)  # the examples of the help name the folder `tables`
    help_text = CliRunner().invoke(cli, ["convert", "--help"], terminal_width=200).output
    (sql,) = (line for line in help_text.splitlines() if line.lstrip().startswith("select "))
    assert {api for api, _ in duckdb.sql(sql).fetchall()} == apis
