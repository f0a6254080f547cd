"""One run has the same numbers in four places: /metrics, `kproxy analyze`, Spark and the report."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from confluent_kafka import Producer
from pyspark.sql import SparkSession

import kproxy.spark
from kproxy.analysis import engine, jobs
from kproxy.cli import cli
from tests.broker.cluster import Cluster, wait_for
from tests.broker.kproxy import Kproxy
from tests.broker.test_clients import consume, sample
from tests.broker.test_counts import counted
from tests.broker.tools import create_topic

COUNTS = ("exchanges", "request_bytes", "response_bytes")


def summed(rows: list[dict[str, Any]], *names: str) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {name: Counter() for name in names}
    for row in rows:
        for name in names:
            found[name][row["api"]] += row[name] or 0
    return found


def test_numbers_of_one_run_are_the_same_everywhere(cluster: Cluster, tmp_path: Path, spark: SparkSession) -> None:
    tables = tmp_path / "tables"
    with Kproxy(cluster.bootstrap, tmp_path, "--record", str(tables)) as proxy:
        topic = create_topic(proxy.bootstrap)
        producer = Producer({"bootstrap.servers": proxy.bootstrap, "client.id": "counted"})
        records = sample(300, "numbers")
        for key, value in records:
            producer.produce(topic, key=key, value=value)
        assert producer.flush(60) == 0
        del producer
        assert sorted(consume(proxy.bootstrap, topic, len(records))) == sorted(records)
        # The consumer left with fetches in flight: they are counted when their connections end.
        wait_for("all connections to be counted", lambda: proxy.metric("kproxy_open_connections") == 0)
        requests = counted(proxy, "kproxy_requests_total", "api")
        errors = counted(proxy, "kproxy_errors_total", "api", "error")
    metrics = {api: int(count) for (api,), count in requests.items() if count}

    page = tmp_path / "report.html"
    done = CliRunner().invoke(cli, ["report", str(tables), "--out", str(page)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page.read_text())
    figures = json.loads(text)["figures"]
    drawn = [dict(zip(figures["talkers"]["columns"], row, strict=True)) for row in figures["talkers"]["rows"]]

    asked = ["analyze", "talkers", str(tables), "--by", "api", "--format", "json"]
    done = CliRunner().invoke(cli, asked, catch_exceptions=False)
    told = [json.loads(line) for line in done.stdout.splitlines()]

    frame = jobs.talkers(kproxy.spark.table(spark, str(tables), "exchanges"), by=["api"])
    names = [column.name for column in engine.columns(frame)]
    sparks = [dict(zip(names, row, strict=True)) for row in engine.rows(frame)]

    assert summed(drawn, *COUNTS) == summed(told, *COUNTS) == summed(sparks, *COUNTS)
    assert dict(summed(told, "exchanges")["exchanges"]) == metrics and metrics["Produce"] > 0

    refused = [dict(zip(figures["errors"]["columns"], row, strict=True)) for row in figures["errors"]["rows"]]
    found = Counter({(row["api"], row["error"]): row["codes"] for row in refused if row["codes"]})
    assert found == Counter({key: int(count) for key, count in errors.items() if count})
