"""Rows of insight become files while traffic continues; a failing disk loses rows, which are counted."""

import json
import shutil

import pyarrow.parquet as pq

from kproxy.insight import rows
from kproxy.insight.rows import GroupEvent, Leadership
from kproxy.tables import schema
from kproxy.tables.live import knowledge_recorder
from kproxy.tables.live.knowledge_recorder import KnowledgeRecorder
from kproxy.tables.live.recorder import Recorder

EVENT = GroupEvent(5_000_000, "c", "g", "classic", "join", connection=3, number=4)
LED = Leadership(7_000_000, "c", "Metadata", None, None, "t", 0, 2, 5, (1, 2), None, "elected")


def add(recorder, *given):
    for row in given:
        recorder.add(rows.TABLES[type(row)], "live:a", row)


def read(place, table):
    return [
        row for file in sorted((place / table).glob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()
    ]


def test_rows_become_files_next_to_those_of_the_recorder(tmp_path, monkeypatch):
    beside = Recorder(tmp_path, {"detail": "topics"})
    beside.start()
    recorder = KnowledgeRecorder(tmp_path, {"detail": "topics"})
    add(recorder, EVENT._replace(time_ns=9_000_000), EVENT, LED)
    recorder.tick()
    assert not read(tmp_path, "group_events")
    monkeypatch.setattr(knowledge_recorder, "ROLL_S", 0)
    recorder.tick()
    assert [row["time_ns"] for row in read(tmp_path, "group_events")] == [5_000_000, 9_000_000]
    assert [row["isr"] for row in read(tmp_path, "leadership")] == [[1, 2]]
    add(recorder, EVENT)
    recorder.close()
    beside.close()
    found = read(tmp_path, "group_events")
    assert [(row["source"], row["connection"]) for row in found] == [("live:a", 3)] * 3
    assert len(list((tmp_path / "group_events").glob("*-knowledge-*.parquet"))) == 2
    assert not list(tmp_path.glob(".unfinished*"))
    manifest = json.loads((tmp_path / "_kproxy.json").read_text())
    assert manifest["sources"] == {"live:a": []} and manifest["schema_version"] == schema.VERSION


def test_many_rows_become_files_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(knowledge_recorder, "ROLL_ROWS", 10)
    monkeypatch.setattr(knowledge_recorder, "TOGETHER", 4)
    recorder = KnowledgeRecorder(tmp_path, {})
    add(recorder, *[EVENT] * 25)
    assert len(read(tmp_path, "group_events")) == 20
    recorder.close()
    assert len(read(tmp_path, "group_events")) == 25


def test_rows_lost_by_a_failing_disk_are_counted(tmp_path, caplog):
    folder = tmp_path / "tables"
    recorder = KnowledgeRecorder(folder, {})
    (tmp_path / "tables").write_text("no folder")
    add(recorder, EVENT, LED)
    recorder.close()
    assert recorder.dropped == 2
    assert "2 rows of insight are lost" in caplog.text
    folder.unlink()
    add(recorder, EVENT)
    recorder.close()
    assert len(read(folder, "group_events")) == 1 and recorder.dropped == 2
    shutil.rmtree(folder)
