"""The limits of a capture's reader are those in the docs."""

from kproxy.capture.columns import mapped
from kproxy.capture.connections import flows
from kproxy.capture.dissection import keys
from kproxy.capture.formats import records, splits, storage
from tests.documented import missing, size


def test_the_limits_of_a_reader_equal_the_docs():
    assert not missing(
        "inside/bounds.md",
        f"as for captures: {flows.MAX_FLOWS * keys.SHARDS} flows;",
        f"1 MiB of a frame, {size(flows.ZOOKEEPER_BYTES)} of all large ones per shard |",
        f"| two ranges of {size(storage.RANGE_BYTES)} of each open file; a million files of one folder or pattern |",
        f"| plain pcap: {mapped.RECORDS}, in {size(mapped.BUFFER_BYTES)} or, if large, in place in the file;"
        f" else {size(records.WINDOW)}; {size(mapped.KEPT_BYTES)} of packets of the last millisecond",
    )
    assert storage.MOST_FILES == 1_000_000
    assert not missing(
        "scale.md",
        f"by requests of {size(storage.RANGE_BYTES)};",
        f"One task reads a whole capture of up to {size(splits.SPLIT_BYTES)}, once.",
    )
