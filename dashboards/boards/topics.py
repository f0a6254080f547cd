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
BEHIND = of("kproxy_consumer_lag_records", *TOPIC, where='group!=""')

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
            "How often each byte is read. Below 1: nobody reads all of it. Far above: many groups, or consumers that "
            "start over.",
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
            "Few records per batch cost brokers and clients much for little: see linger.ms and batch.size.",
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
            "line that only grows: the group is too slow, or has stopped.",
            "short",
            (_lag("kproxy_consumer_lag_records", "group"), "{{group}} {{topic}}"),
            only=f"{ONLY}, and groups commit",
        ),
        series(
            "Lag of groups, time",
            "Age of the first record that a group has not committed; an upper bound where its own timestamp is not "
            "known. Compare with what the business may wait for.",
            "s",
            (_lag("kproxy_consumer_lag_seconds", "group"), "{{group}} {{topic}}"),
            threshold=600,
            only=f"{ONLY}, and groups commit",
        ),
        table(
            "Groups behind",
            "Groups by the records that they lack now.",
            "short",
            f"sort_desc(max by (cluster, group, topic) ({BEHIND}))",
            ("cluster", "group", "topic"),
            width=8,
            value="Records",
            only=f"{ONLY}, and groups commit",
        ),
        series(
            "Partitions whose lag is not known",
            "Partitions with a committed offset of which nobody reports the end through this kproxy. Above 0, the lag "
            "of that group is too low.",
            "short",
            (f"sum by (cluster, group, topic) ({UNKNOWN}) > 0", "{{group}} {{topic}}"),
            width=12,
            only=f"{ONLY}, and ends of logs are not known",
        ),
        series(
            "Offsets dropped at a bound",
            "Ends of logs, committed offsets and positions beyond the bounds of memory: their lags are missing.",
            "cps",
            (rate("kproxy_lag_evicted_total", *CLUSTER, by="cluster, kind"), "{{cluster}} {{kind}}"),
            width=12,
            only=ONLY,
        ),
    ),
    row(
        "Clients: what they have fetched",
        series(
            "Lag of clients, records",
            "From what a client has fetched to the end of the log. Small while the group's lag is large: the consumer "
            "reads, and works on records for long before it commits.",
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
    "Who writes and reads how much, and who is behind.",
    ("topic",),
    PARTS,
)
