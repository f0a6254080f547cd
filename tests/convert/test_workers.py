"""Progress that worker processes report."""

from kproxy.convert.workers import Workers


def test_progress_adds_up_and_never_exceeds_the_size_of_the_capture():
    """Processes that read parts of a capture read some packets twice."""
    steps = []
    with Workers(1) as workers:
        workers.watch("a.pcap", 10, lambda *step: steps.append(step))
        for sizes in ((3, 4), (), (5,)):
            for size in sizes:
                workers._read.put(size)
            workers._report()
        workers.watch("b.pcap", 9, lambda *step: steps.append(step))
        workers._read.put(2)
        workers._report()
    assert steps == [("a.pcap", 7, 10), ("a.pcap", 10, 10), ("b.pcap", 2, 9)]
