"""Transactional ids from InitProducerId and DescribeTransactions, in real and synthetic exchanges."""

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.knowledge import Knowledge
from kproxy.insight.rows import Transaction


def rows(*exchanges):
    known = Knowledge("c")
    return [row for each in exchanges for row in known.feed(each) if isinstance(row, Transaction)]


def begun(name, error=0):
    asked = {"transactionalId": name, "transactionTimeoutMs": 600_000}
    return DecodedExchange(22, 4, asked, {"errorCode": error, "producerId": 5, "producerEpoch": 1}, 1, 2, number=3)


def test_a_producers_transaction_timeout_is_recorded():
    (row,) = rows(begun("tx"), begun(None), begun("refused", 53))
    assert (row.transactional_id, row.state, row.timeout_ms, row.producer_id) == ("tx", "Empty", 600_000, 5)
    assert (row.time_ns, row.number, row.log_offset) == (2, 3, None)


def test_a_described_transaction_is_recorded():
    each = {
        "errorCode": 0,
        "transactionalId": "tx",
        "transactionState": "Ongoing",
        "transactionTimeoutMs": 60_000,
        "transactionStartTimeMs": 7,
        "producerId": 5,
        "producerEpoch": 1,
        "topics": [{"topic": "t", "partitions": [1, 0]}],
    }
    missing = each | {"errorCode": 105, "transactionalId": "none"}
    (row,) = rows(DecodedExchange(65, 0, {}, {"errorCode": 0, "transactionStates": [each, missing]}, 1, 2))
    assert (row.state, row.timeout_ms, row.started_ns) == ("Ongoing", 60_000, 7_000_000)
    assert (row.partitions, row.partition_count) == ("t-0, t-1", 2)
    assert not rows(DecodedExchange(65, 0, {}, None, 1, 2))
