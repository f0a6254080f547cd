"""The names of files in a dataset."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from kproxy.tables.dataset import file_of


def test_usual_names_are_kept():
    for source in ("incident.pcap", "trace 7.pcapng.gz", "edge-1_eth0.pcap12", "stdin"):
        assert file_of(source) == f"{source}.parquet"


@given(st.lists(st.text(min_size=1, max_size=300), min_size=2, max_size=2, unique=True))
@example(["_incident.pcap", ".incident.pcap"])
@example(["2026-11-22T10:00:00.pcap", "2026-11-22T10~3a00~3a00.pcap"])
@example(["x" * 250, "x" * 251])
def test_every_source_has_a_file_of_its_own_that_all_readers_see(sources):
    names = [file_of(source) for source in sources]
    assert names[0] != names[1]
    for name in names:
        assert len(name.encode()) <= 255 and not re.search(r"^[_.]|[][{}*?:/\\%\x00]", name)
