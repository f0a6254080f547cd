"""The two text formats, read by prometheus_client's parsers and by a real Prometheus."""

import asyncio
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kproxy.admin.server import Admin
from kproxy.metrics.scrape.collector import registry_of
from kproxy.metrics.scrape.exposition import render
from tests.metrics.test_metrics import busy_metrics

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def samples(families):
    """{(name, labels): value}, without what moves between two scrapes."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.startswith("process_")
    }


def test_both_text_formats_hold_the_same_samples():
    metrics = busy_metrics()
    text, content_type = render(registry_of(metrics), OPENMETRICS)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    classic, content_type = render(registry_of(metrics), "text/html")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(openmetrics.text_string_to_metric_families(text.decode()))
    assert found == samples(text_string_to_metric_families(classic.decode()))
    assert len(found) > 200


@contextmanager
def prometheus(target, directory):
    """A Prometheus that scrapes `target` every second, as ask(path, **query) -> the data of its answer."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    scrape = {"job_name": "kproxy", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    (directory / "prometheus.yml").write_text(json.dumps({"scrape_configs": [scrape]}))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(path, **query):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def scraped(ask):
    """The series of the target, once it was scraped: on a busy machine the first scrapes may take too long."""
    end = time.monotonic() + 60
    targets = []
    while time.monotonic() < end:
        try:
            targets = ask("targets", state="active")["activeTargets"]
            series = ask("query", query='{job="kproxy", __name__=~"kproxy_.*"}')["result"]
        except (urllib.error.URLError, ConnectionError):
            series = []
        if series:
            return series
        time.sleep(0.1)
    raise AssertionError(f"Prometheus did not scrape within a minute: {[each['lastError'] for each in targets]}")


def test_prometheus_takes_every_sample(tmp_path):
    metrics = busy_metrics()
    asked = []

    def scrape(accept):
        asked.append(accept)
        return render(registry_of(metrics), accept)

    def watch(target):
        with prometheus(target, tmp_path) as ask:
            found = {}
            for series in scraped(ask):
                labels = {name: text for name, text in series["metric"].items() if name not in ("job", "instance")}
                found[labels.pop("__name__"), tuple(sorted(labels.items()))] = float(series["value"][1])
            return found

    async def main():
        admin = Admin("127.0.0.1", 0, scrape=scrape, not_ready=tuple, api={})
        await admin.start()
        try:
            return await asyncio.to_thread(watch, "{}:{}".format(*admin.address))
        finally:
            await admin.stop()

    found = asyncio.run(main())
    assert found == samples(text_string_to_metric_families(render(registry_of(metrics))[0].decode()))
    assert asked[0].startswith("application/openmetrics-text")
