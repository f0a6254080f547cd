"""Transactional ids in responses: InitProducerId shows the timeout, DescribeTransactions the whole state.

If a client fetches the coordinators' logs, `coordinator_logs` yields rows of the same table. Bound: a row names
MAX_LISTED partitions. Refuses to know producers that are only idempotent.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from kproxy.insight.decoded import DecodedExchange
from kproxy.insight.logs.coordinator_logs import MAX_LISTED, ns_of
from kproxy.insight.membership.embedded import listed
from kproxy.insight.rows import Transaction
from kproxy.insight.topics import Topics
from kproxy.protocol.apis import DESCRIBE_TRANSACTIONS, INIT_PRODUCER_ID


class Transactions:
    """The transactional ids of one cluster."""

    apis = frozenset((INIT_PRODUCER_ID, DESCRIBE_TRANSACTIONS))
    left_out: Mapping[str, int] = Counter()

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster

    def feed(self, exchange: DecodedExchange, topics: Topics) -> Iterator[Transaction]:
        """Yield a row for each transactional id that the coordinator accepted or described."""
        answer = exchange.response
        if answer is None:
            return
        if exchange.api_key == INIT_PRODUCER_ID:
            name = exchange.request["transactionalId"]
            if name is not None and not answer["errorCode"]:
                timeout_ms = exchange.request["transactionTimeoutMs"]
                yield self._row(exchange, name, "Empty", answer["producerId"], answer["producerEpoch"], timeout_ms)
            return
        for each in answer["transactionStates"]:
            if each["errorCode"]:
                continue
            parts = [(topic["topic"], index) for topic in each["topics"] for index in topic["partitions"]]
            row = self._row(
                exchange,
                each["transactionalId"],
                each["transactionState"],
                each["producerId"],
                each["producerEpoch"],
                each["transactionTimeoutMs"],
            )
            yield row._replace(
                started_ns=ns_of(each["transactionStartTimeMs"], None),
                partitions=listed(parts, MAX_LISTED) or None,
                partition_count=len(parts),
            )

    def finish(self) -> Iterator[Transaction]:
        """Yield nothing: no state is pending."""
        return iter(())

    def _row(
        self, exchange: DecodedExchange, name: str, state: str, producer_id: int, producer_epoch: int, timeout_ms: int
    ) -> Transaction:
        return Transaction(
            exchange.response_start,
            self.cluster,
            name,
            state,
            producer_id,
            producer_epoch,
            timeout_ms,
            None,
            None,
            0,
            exchange.broker_id,
            None,
            None,
            exchange.connection,
            exchange.number,
        )
