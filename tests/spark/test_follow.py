"""A folder of rotating captures: each capture is in the tables once, even if the process dies."""

import shutil
from dataclasses import replace
from itertools import pairwise

import pytest

from kproxy.capture.formats import splits
from kproxy.capture.formats.storage import Storage
from kproxy.convert.job import Settings
from kproxy.convert.processes import convert
from kproxy.errors import KproxyError
from kproxy.spark import follow as follower
from kproxy.spark import pipeline
from kproxy.spark.follow import follow
from kproxy.tables import schema
from tests.captures import capture
from tests.spark.test_pipeline import assert_same_rows, known, rows
from tests.storages import Bucket


def cut(path, folder, places):
    """Split a capture into rotated files."""
    data = path.read_bytes()
    walker = splits._Records(data)
    cuts = [24, *(walker.boundary(place, len(data)) for place in places), len(data)]
    files = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        files.append(folder / f"part{number}.pcap")
        files[-1].write_bytes(data[:24] + data[start:stop])
    return files


def test_each_capture_once_from_a_checkpoint(spark, tmp_path):
    folder, out, later = tmp_path / "in", tmp_path / "tables", tmp_path / "later"
    folder.mkdir()
    later.mkdir()
    summaries = []

    def run(rotated=True):
        settings = Settings(rotated=rotated)
        query = follow(spark, str(folder), str(out), settings, summaries.append, interval_s=0.1, quiet_s=0)
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    files = cut(capture("k41_BASE"), folder, (150_000, 400_000))
    (folder / "none.pcap").write_text("no capture")
    run()
    convert(files, tmp_path / "converted", Settings(rotated=True), processes=1)
    assert_same_rows(out, tmp_path / "converted")  # exchanges across the three files are complete
    assert [fault.name for summary in summaries for fault in summary.failed] == [str(folder / "none.pcap")]
    shutil.copy(capture("k41_quota"), folder / "more.pcap")
    real = pipeline.ingest

    def dies(*given, **more):
        real(*given, **more)
        raise KeyError("killed after the tables were published, before the checkpoint knew of it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "ingest", dies)
        with pytest.raises(Exception, match="killed"):
            run()
    assert known(out) == {"part0.pcap", "more.pcap"}
    count = len(rows(out, schema.EXCHANGES))
    run()
    assert len(rows(out, schema.EXCHANGES)) == count
    assert not summaries[-1].quality  # all packets were there
    (folder / "more.pcap").unlink()
    run()  # the folder no longer contains it
    shutil.copy(capture("k41_sasl_plain"), folder / "more.pcap")
    shutil.copy(capture("k41_midstream"), folder / "last.pcap")
    run(rotated=False)  # a reused name does not stop the others either
    assert [fault.name for fault in summaries[-1].failed] == [str(folder / "more.pcap")]
    assert set(summaries[-1].quality) == {"last.pcap"}
    with pytest.raises(KproxyError, match="follow adds"):
        follow(spark, str(folder), str(out), Settings(overwrite=True), summaries.append)


@pytest.mark.parametrize("rotated", (False, True))
@pytest.mark.parametrize("last", ("why_unread", "look", "decode.whole"))
def test_a_storage_that_fails_for_a_while_loses_no_capture(spark, tmp_path, monkeypatch, rotated, last):
    """last: the step before which the storage fails; it works again at the next attempt, or only after a restart."""
    out, summaries = tmp_path / "tables", []
    names = ["k41_midstream", "k41_quota"]
    bucket = Bucket(monkeypatch)
    for name in names:
        bucket.put(f"in/{name}.pcap", capture(name).read_bytes())
    options = [*bucket.storage.options, ("config_kwargs.retries.max_attempts", "0")]
    settings = Settings(rotated=rotated, storage=Storage(tuple(options)))
    monkeypatch.setattr(follower, "RETRY_PAUSES_S", (0.01,))
    lasting = [last == "look"]  # how many more times it fails

    def run():
        query = follow(spark, "s3://captures/in", str(out), settings, summaries.append, interval_s=0.1, quiet_s=0)
        try:
            query.processAllAvailable()
        finally:
            query.stop()

    module = pipeline.decode if last == "decode.whole" else pipeline
    name = last.rpartition(".")[2]
    real = getattr(module, name)
    if last == "decode.whole":  # the server of a worker cannot be stopped: the worker gets another address
        wrong = replace(settings.storage, options=(("endpoint_url", "http://127.0.0.1:9"), *options[1:]))
        tries = tmp_path / "tries"
        tries.mkdir()

        def going(unit):
            (tries / str(len(list(tries.iterdir())))).touch()
            first = len(list(tries.iterdir())) == 1
            yield from real([(number, replace(job, storage=wrong) if first else job) for number, job in unit])
    else:

        def going(*given):
            bucket.goes()
            try:
                return real(*given)
            finally:
                bucket.comes()
                if lasting.pop():
                    lasting.append(False)
                else:
                    monkeypatch.setattr(module, name, real)

    monkeypatch.setattr(module, name, going)
    if last == "look":  # a longer failure
        with pytest.raises(Exception, match="no table has it yet: start again when the storage is well"):
            run()
        assert not list(out.glob("exchanges"))
    run()
    bucket.goes()
    convert([capture(name) for name in names], tmp_path / "converted", Settings(rotated=rotated), processes=1)
    for table in (schema.EXCHANGES, schema.CONNECTIONS, schema.PARTITIONS):
        assert (
            rows(out, table)
            .drop_columns("connection")
            .equals(rows(tmp_path / "converted", table).drop_columns("connection"))
        )
    assert not [fault for summary in summaries for fault in summary.failed]
