"""The files of one capture: their order, the progress of reading, and errors about files without packets."""

import bz2
import gzip
import lzma
import os

import pytest

from kproxy.capture.columns import mapped
from kproxy.capture.formats.captures import Capture, in_time
from kproxy.capture.quality import Quality
from kproxy.errors import CaptureError
from tests.capture import packet

SECOND = 1_000_000_000


def capture_of(*times_s, count=1):
    return packet.pcap([(time_s * SECOND, packet.ethernet(bytes(200))) for time_s in times_s for _ in range(count)])


def test_rotated_files_are_sorted_by_their_first_packets(tmp_path):
    contents = {
        "a": capture_of(30, 5),  # a later packet has an earlier time: only the first packet counts
        "b": capture_of(10, 99),
        "c": capture_of(20),
        "d": packet.pcap([]),
        "e": b"no capture",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    paths = [str(tmp_path / name) for name in contents]
    assert [path[-1] for path in in_time(paths)] == ["b", "c", "a", "d", "e"]
    os.mkfifo(tmp_path / "pipe")  # opening it would block for ever, and bytes read from it would be lost
    paths.insert(0, str(tmp_path / "pipe"))
    assert in_time(paths) == paths


def test_progress_counts_the_bytes_of_the_files(tmp_path):
    """For a progress bar: compressed files count by their compressed bytes, and at the end all bytes are counted."""
    plain, packed = tmp_path / "1.pcap", tmp_path / "2.pcap.gz"
    plain.write_bytes(capture_of(*range(2000), count=2))
    packed.write_bytes(gzip.compress(capture_of(*range(2000, 4000), count=2)))
    capture = Capture([plain, "-", packed], Quality())
    assert capture.size == plain.stat().st_size + packed.stat().st_size  # the size of a pipe is unknown
    capture.paths.remove("-")
    assert capture.consumed == 0
    so_far = [capture.consumed for _ in capture.windows()]
    assert so_far == sorted(so_far) and plain.stat().st_size in so_far
    assert capture.consumed == capture.size


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"\x1f\x8b\x08\x00", "no byte of it can be read: the compressed stream ends early"),
        (capture_of(1)[:23], "a pcap file that ends inside its header: there is nothing to read"),
        (b"snoop\0\0\0", "a snoop file, not read yet: convert it with `editcap -F pcapng`"),
        (bz2.compress(b"", 9), "a bzip2 file, not read: unpack it, or pack it with gzip, zstd or lz4"),
        (bz2.compress(b"", 1), "a bzip2 file, not read: unpack it, or pack it with gzip, zstd or lz4"),
        (lzma.compress(b""), "an xz file, not read: unpack it, or pack it with gzip, zstd or lz4"),
        (b"GET ", "no capture file (it begins with 47 45 54 20): pcap or pcapng is needed"),
    ],
)
def test_a_file_that_is_no_capture_is_reported(tmp_path, content, words):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(CaptureError) as raised:
        list(Capture([tmp_path / "file"], Quality()).windows())
    assert words in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "file")) and ("(" in str(raised.value)) == ("(" in words)


@pytest.mark.parametrize("left", (0, 15, 16, 100, 230))
def test_a_truncated_compressed_file_is_counted_once_wherever_it_ends(tmp_path, left):
    """Also between two records, where a reader of records cannot notice it."""
    whole = capture_of(1, 2)
    first = (len(whole) - 24) // 2 + 24
    (tmp_path / "cut.gz").write_bytes(gzip.compress(whole[: first + left]) + gzip.compress(b"more")[:10])
    quality = Quality()
    records = [record for window in Capture([tmp_path / "cut.gz"], quality).windows() for record in window.records]
    assert (len(records), quality.count("cut_file")) == (1 if first + left < len(whole) else 2, 1)
    assert quality.size("cut_file") == left % (first - 24)


@pytest.mark.parametrize("grown", (1, 100, 9000, 100_000))
@pytest.mark.parametrize("kind", ("pcap", "pcapng"))
def test_a_capture_being_written_is_truncated_and_not_damaged(tmp_path, monkeypatch, kind, grown):
    """It is read up to its size at the opening, or a little further, whatever is appended meanwhile."""
    monkeypatch.setattr(mapped, "FIRST_RECORDS", 8)
    times = range(2000)
    whole = capture_of(*times)
    if kind == "pcapng":
        blocks = [packet.enhanced(packet.ethernet(bytes(200)), time_s * 1_000_000) for time_s in times]
        whole = packet.section() + packet.interface() + b"".join(blocks)
    path = tmp_path / "grows"
    path.write_bytes(whole[: len(whole) // 2 + 33])
    quality = Quality()
    count = written = 0
    for window in Capture([path], quality).windows():
        count += len(window.records)
        at = path.stat().st_size
        with path.open("ab") as file:
            written += file.write(whole[at : at + grown])
    kinds = {row.kind for row in quality}
    assert kinds <= {"cut_file"} and 990 < count <= 2000 and written
    assert quality.count("cut_file") or path.stat().st_size == len(whole)
