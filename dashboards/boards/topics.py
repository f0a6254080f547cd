"""Topics and consumers: who writes and reads how much, and who is behind."""

from dashboards.boards.model import CLUSTER, board, largest, of, rate, row, series, table

TOPIC = (*CLUSTER, "topic")
ONLY = 'detail = "topics"'


def _bytes(direction: str) -> str:
    where = f'direction="{direction}"'
    total = of("kproxy_topic_bytes_total", *TOPIC, where=where)
    ranking = f"sum by (cluster, topic) (increase({total}[$__range] @ end()))"
    return largest(
        rate("kproxy_topic_bytes_total", *TOPIC, by="cluster, topic", where=where), "cluster, topic", ranking
    )


def _lag(metric: str, consumer: str) -> str:
    lag = of(metric, *TOPIC, where=f'{consumer}!=""')
    by = f"cluster, {consumer}, topic"
    ranking = f"max by ({by}) (max_over_time({lag}[$__range] @ end()))"
    return largest(f"max by ({by}) ({lag})", by, ranking)


RECORDS = rate("kproxy_topic_records_total", *TOPIC, by="topic, direction")
BATCHES = rate("kproxy_topic_batches_total", *TOPIC, by="topic, direction")
PRODUCED = rate("kproxy_topic_bytes_total", *TOPIC, by="cluster, topic", where='direction="request"')
FETCHED = rate("kproxy_topic_bytes_total", *TOPIC, by="cluster, topic", where='direction="response"')
UNKNOWN = of("kproxy_group_lag_unknown_partitions", *TOPIC)
REFUSED = 'outcome!="answered"'
OF_GROUPS = of("kproxy_consumer_lag_records", *TOPIC, where='group!=""')
JOINED = of("cluster_group_topic:kproxy_group_lag_records:sum", "cluster", "topic")  # where Prometheus has the rules
BEHIND = f"({JOINED} or max by (cluster, group, topic) ({OF_GROUPS}))"
BY_PARTITION = (
    f"max by (cluster, topic, partition) ({of('kproxy_log_end_offset', *TOPIC)})"
    " - on (cluster, topic, partition) group_right () "
    f"max by (cluster, group, topic, partition) ({of('kproxy_group_committed_offset', *TOPIC)})"
)
MOST = f"max by (cluster, group, topic) (max_over_time({OF_GROUPS}[$__range] @ end()))"

PARTS = (
    row(
        "Topics: the largest have a series, the rest is `other`",
        series(
            "Produced",
            "Bytes of records in requests.",
            "Bps",
            (_bytes("request"), "{{topic}}"),
            stacked=True,
            only=ONLY,
        ),
        series(
            "Fetched",
            "Bytes of records in responses, of every consumer and follower that passes through kproxy.",
            "Bps",
            (_bytes("response"), "{{topic}}"),
            stacked=True,
            only=ONLY,
        ),
        series(
            "Fetched for each byte produced",
            "Number of times that each byte is read. Below 1, no consumer reads all of it; far above, there are many "
            "groups, or consumers start over.",
            "none",
            (f"{FETCHED} / ({PRODUCED} > 0)", "{{topic}}"),
            only=f"{ONLY}, and a topic is written and read",
        ),
        series(
            "Records produced",
            "Records a second in requests, where the format contains their number.",
            "cps",
            (rate("kproxy_topic_records_total", *TOPIC, by="topic", where='direction="request"'), "{{topic}}"),
            stacked=True,
            only=ONLY,
        ),
        series(
            "Records per batch",
            "Small batches waste CPU of brokers and clients: raise linger.ms and batch.size.",
            "none",
            (f"{RECORDS} / ({BATCHES} > 0)", "{{topic}} {{direction}}"),
            only=ONLY,
        ),
        series(
            "Batches by codec",
            "`mixed`: the batches of one body are of several codecs. `none` at a high rate: compression would save "
            "disks and network.",
            "cps",
            (rate("kproxy_topic_batches_total", *TOPIC, by="codec, direction"), "{{codec}} {{direction}}"),
            stacked=True,
            only=ONLY,
        ),
    ),
    row(
        "Consumer groups: what they have committed",
        series(
            "Lag of groups, records",
            "From what a group has committed to the end of the log, over the partitions of which both are known. A "
            "line that only grows means that the group is too slow, or has stopped.",
            "short",
            (largest(BEHIND, "cluster, group, topic", MOST), "{{group}} {{topic}}"),
            only=f"{ONLY}, and groups commit",
        ),
        series(
            "Lag of groups, time",
            "Age of the first record that a group has not committed; an upper bound where its own timestamp is not "
            "known, as kproxy_consumer_lag_seconds_exact says. Compare it with the delay that the application allows.",
            "s",
            (_lag("kproxy_consumer_lag_seconds", "group"), "{{group}} {{topic}}"),
            threshold=600,
            only=f"{ONLY}, and groups commit",
        ),
        table(
            "Groups behind",
            "Groups by their lag in records now.",
            "short",
            f"sort_desc(max by (cluster, group, topic) {BEHIND})",
            ("cluster", "group", "topic"),
            width=8,
            value="Records",
            only=f"{ONLY}, and groups commit",
        ),
        series(
            "Partitions whose lag is not known",
            "Partitions with a committed offset whose log end this kproxy has not seen. Above 0, the group's lag is "
            "a lower bound.",
            "short",
            (f"sum by (cluster, group, topic) ({UNKNOWN}) > 0", "{{group}} {{topic}}"),
            width=8,
            only=f"{ONLY}, and ends of logs are not known",
        ),
        table(
            "Partitions furthest behind",
            "Ends of logs less committed offsets, of all kproxies together, where they have series by partition.",
            "short",
            f"sort_desc(topk(50, {BY_PARTITION} > 0))",
            ("cluster", "group", "topic", "partition"),
            width=12,
            value="Records",
            only=f"{ONLY}, and groups commit",
        ),
        series(
            "Records appended",
            "Growth of the log ends, by all producers. More than is produced through kproxy: other producers bypass "
            "it.",
            "cps",
            (f"sum by (cluster, topic) (deriv({of('kproxy_log_end_offset', *TOPIC)}[5m]) > 0)", "{{topic}}"),
            width=12,
            only=ONLY,
        ),
        series(
            "Ages that are upper bounds",
            "Consumers whose lag in seconds is an upper bound, since the record's own timestamp is not known.",
            "short",
            (f"count by (cluster) ({of('kproxy_consumer_lag_seconds_exact', *TOPIC)} == 0)", "{{cluster}}"),
            width=8,
            only=f"{ONLY}, and ages are not exact",
        ),
        series(
            "Series by partition left out",
            "A cluster with more than partition_series of [cluster.lag] has none; rules take the sums by topic then.",
            "short",
            (
                f"max by (cluster, kind) ({of('kproxy_lag_partition_series_left_out', *CLUSTER)}) > 0",
                "{{cluster}} {{kind}}",
            ),
            width=8,
            only=f"{ONLY}, and there are too many",
        ),
        series(
            "Questions for offsets that brokers refuse or do not answer",
            "kproxy asks brokers for what traffic does not show, at ask_interval_s of [cluster.lag]. `not_authorized`: "
            "its login lacks Describe of a topic or group, whose lag is that of what passes here.",
            "cps",
            (
                f"{rate('kproxy_lag_questions_total', *CLUSTER, by='cluster, api, outcome', where=REFUSED)} > 0",
                "{{cluster}} {{api}} {{outcome}}",
            ),
            width=8,
            only=f"{ONLY}, and brokers refuse",
        ),
        series(
            "Offsets dropped at a bound",
            "Ends of logs, committed offsets and positions beyond the bounds of memory: their lags are missing.",
            "cps",
            (rate("kproxy_lag_evicted_total", *CLUSTER, by="cluster, kind"), "{{cluster}} {{kind}}"),
            width=8,
            only=ONLY,
        ),
    ),
    row(
        "Clients: what they have fetched",
        series(
            "Lag of clients, records",
            "From what a client has fetched to the end of the log. If it is small while the group's lag is large, "
            "the consumer fetches records but processes them for long before it commits.",
            "short",
            (_lag("kproxy_consumer_lag_records", "client_id"), "{{client_id}} {{topic}}"),
            width=12,
            only=f"{ONLY}, and clients fetch",
        ),
        series(
            "Lag of clients, time",
            "Age of the first record that a client has not fetched; an upper bound where its timestamp is not known.",
            "s",
            (_lag("kproxy_consumer_lag_seconds", "client_id"), "{{client_id}} {{topic}}"),
            width=12,
            only=f"{ONLY}, and clients fetch",
        ),
    ),
)

BOARD = board(
    "kproxy-topics",
    "kproxy: topics and consumers",
    "Records that clients write and read, and consumer lag.",
    ("topic",),
    PARTS,
)
