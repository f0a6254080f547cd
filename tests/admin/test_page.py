"""The page in a real browser: with the demo's cluster, hostile names, a restart, and a token."""

import http.server
import json
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kproxy.admin.page import load_page
from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, LIST_OFFSETS, PRODUCE
from kproxy.protocol.records import Record, write_batch
from tests import chromium
from tests.broker.cluster import wait_for
from tests.broker.kproxy import Kproxy
from tests.certificates import Authority
from tests.cli.test_ctl import KPROXY, frame, running
from tests.demo.running import traffic
from tests.proxy.live import request, response

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
HEADING_OF_APIS = "return document.querySelector('#apis').parentNode.textContent"
SIDEWAYS = """return [...document.querySelectorAll(".card:not(.wide):not(.all) .table")]
    .filter(each => each.scrollWidth > each.clientWidth).map(each => each.id)"""
HEADING_OF_FINDINGS = "return [...document.querySelectorAll('#findings b')].map(each => each.textContent)"


def hostile_client(bootstrap: str, count: int) -> list[socket.socket]:
    """Open many clients that have markup as client ids and topic names."""
    host, port = bootstrap.split(":")
    clients = []
    batch = write_batch([Record(0, 1_700_000_000_000, None, b"v" * 100)])
    for number in range(count):
        client = socket.create_connection((host, int(port)), timeout=10)
        software = {"clientSoftwareName": "evil", "clientSoftwareVersion": "1.0"}
        client.sendall(request(API_VERSIONS, 3, 1, software, client=f"{HOSTILE}{number}"))
        client.recv(4096)
        partition = {"index": 0, "records": batch}
        topics = [{"name": f"{HOSTILE}{number}-{n}", "partitionData": [partition]} for n in range(20)]
        client.sendall(request(PRODUCE, 7, 2, {"acks": -1, "timeoutMs": 1000, "topicData": topics}, client=HOSTILE))
        clients.append(client)
    return clients


def loaded(url: str, **headers: str) -> tuple[int, dict[str, str], str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, dict(refused.headers), refused.read().decode()


def rows(browser: chromium.Browser, table: str) -> list[list[str]]:
    script = (
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    found: list[list[str]] = browser.asked(script, table)
    return found


def state_of(browser: chromium.Browser) -> str:
    return str(browser.asked("return document.querySelector('#state').textContent"))


def tile(browser: chromium.Browser, name: str) -> str:
    script = (
        "return [...document.querySelectorAll('.tile')]"
        ".find(t => t.querySelector('span').textContent === arguments[0])?.querySelector('b').textContent"
    )
    return str(browser.asked(script, name))


def test_the_page_shows_traffic_updates_filters_and_survives_a_restart(tmp_path: Path) -> None:
    with traffic() as demo, Kproxy(demo.bootstrap, tmp_path, "--detail", "topics", "--workers", "2") as kproxy:
        demo.admit(kproxy.bootstrap)
        page = f"http://{kproxy.admin}/"
        hostile = hostile_client(kproxy.bootstrap, 15)
        with chromium.opened(page, 1440) as browser:
            wait_for("requests", lambda: tile(browser, "requests/s") not in ("None", "0", "–"), 60)
            wait_for(
                "charts",
                lambda: browser.asked("return document.querySelectorAll('#requests path.area').length") > 2,
                90,
            )
            assert {"Produce", "Fetch"} <= {row[0] for row in rows(browser, "apis")}
            assert len(rows(browser, "brokers")) >= 4
            wait_for("topics", lambda: len(rows(browser, "topics")) >= 5, 60)
            wait_for("clients", lambda: len(rows(browser, "clients")) >= 5, 60)
            wait_for("connections", lambda: len(rows(browser, "connections")) >= 5, 60)
            assert len(rows(browser, "topics")) <= 10  # of hundreds; a click shows the rest

            # It is accessible, in the dark theme too.
            browser.asked("document.documentElement.dataset.theme = 'dark'")
            assert browser.barriers("color-contrast") == []
            browser.asked("document.documentElement.dataset.theme = 'light'")
            assert browser.barriers() == []

            # It updates: figures follow the counters of /metrics.
            seen = browser.asked("return document.querySelector('#apis').textContent")
            wait_for(
                "new figures", lambda: browser.asked("return document.querySelector('#apis').textContent") != seen, 60
            )

            # Names of peers are text.
            find = browser.chrome.find_element("css selector", "input[name=find]")
            find.send_keys("onerror")
            wait_for("hostile names", lambda: any(HOSTILE in row[0] for row in rows(browser, "topics")), 60)
            wait_for("hostile clients", lambda: any(HOSTILE in row[0] for row in rows(browser, "clients")), 60)
            assert browser.asked("return document.title") == "kproxy"
            assert browser.asked("return document.querySelectorAll('img, main script').length") == 0
            assert "find=onerror" in browser.chrome.current_url
            find.send_keys("-in-no-name")  # a name without a match may be among the rows left out
            text_of_topics = "return document.querySelector('#topics').textContent"
            wait_for(
                "the hint", lambda: browser.asked(text_of_topics) == "none of the 100 largest has this in its name", 60
            )
            assert "the 100 largest" in browser.asked("return document.querySelector('#topics').parentNode.textContent")
            find.clear()
            find.send_keys("\ue003")  # an input event for the emptied field

            # The URL contains the filters and restores them.
            browser.chrome.get(f"{page}?broker=2&api=Produce&range=300&theme=dark")
            wait_for("a filter", lambda: [row[0] for row in rows(browser, "brokers")] == ["2"], 60)
            assert [row[0] for row in rows(browser, "apis")] == ["Produce"]
            assert browser.asked("return document.querySelector('[name=broker]').value") == "2"
            assert browser.asked("return getComputedStyle(document.body).backgroundColor") == "rgb(14, 20, 25)"
            browser.asked("document.querySelector('#brokers td a').click()")
            wait_for("no filter", lambda: len(rows(browser, "brokers")) >= 4, 60)
            assert "broker=" not in browser.chrome.current_url

            # Nothing scrolls sideways on a phone.
            browser.width(390)
            wait_for("a narrow page", lambda: browser.asked("return document.documentElement.scrollWidth") <= 390, 30)
            browser.width(1440)

            assert browser.complaints() == []
            for client in hostile:
                client.close()
            kproxy.stop(kill=True)
            wait_for("the news", lambda: "does not answer" in state_of(browser), 60)
            kproxy.start()
            wait_for("the page to recover", lambda: state_of(browser) == "ready", 60)
            wait_for("figures again", lambda: tile(browser, "requests/s") not in ("None", "0", "–"), 90)
            assert all("net::ERR" in line for line in browser.complaints())  # from the seconds without a kproxy
            strangers = {url for url in browser.requests() if not url.startswith((page, "data:"))}
            assert not strangers


def test_the_page_asks_for_a_token_once_and_sends_it_with_every_request(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-word\n")
    with traffic() as demo, Kproxy(demo.bootstrap, tmp_path, "--admin-token-file", str(token)) as kproxy:
        demo.admit(kproxy.bootstrap)
        page = f"http://{kproxy.admin}/"
        assert loaded(f"{page}api/live")[0] == 401
        with chromium.opened(page) as browser:
            is_open = "return document.querySelector('#login').open"
            wait_for("the form", lambda: browser.asked(is_open), 30)
            field = browser.chrome.find_element("css selector", "#login input")
            field.send_keys("wrong\n")
            wait_for(
                "a refusal",
                lambda: "not its token" in browser.asked("return document.querySelector('#login-fault').textContent"),
                30,
            )
            assert browser.barriers() == []
            field.send_keys("s3cret-word\n")
            wait_for("figures", lambda: tile(browser, "requests/s") not in ("None", "0", "–"), 60)
            assert not browser.asked(is_open)
            browser.chrome.refresh()  # the tab remembers
            wait_for("figures", lambda: tile(browser, "requests/s") not in ("None", "0", "–"), 60)
            assert all("401" in line for line in browser.complaints())
            assert not any("s3cret-word" in url for url in browser.requests())


def test_page_top_metrics_and_tables_agree(tmp_path: Path) -> None:
    """On known traffic: 12 heartbeats, 8 of them refused, and 3 requests in a deprecated version."""
    tables = tmp_path / "tables"
    with running(tmp_path, f'record = "{tables}"') as (broker, port, admin):
        url = f"http://127.0.0.1:{admin}/"
        wait_for("/ready", lambda: loaded(f"{url}ready")[0] == 200, 60)
        with socket.create_connection(("127.0.0.1", port)) as client:
            sent = got = 0
            end: socket.socket | None = None
            for number in range(15):
                key, version = (HEARTBEAT, 4) if number < 12 else (LIST_OFFSETS, 0)
                error = {"errorCode": 27 if number % 3 else 0} if number < 12 else {}
                question = request(key, version, number, client="orders-7")
                client.sendall(question)
                end = end or broker.accept()[0]
                frame(end)
                answer = response(key, version, number, error)
                end.sendall(answer)
                frame(client)
                sent, got = sent + len(question), got + len(answer)
            assert end is not None
            with chromium.opened(url, 1440) as browser:
                wait_for("the connection", lambda: rows(browser, "connections") != [], 60)
                (connection,) = rows(browser, "connections")
                errors = rows(browser, "errors")
                # A name that is too long for its table is truncated, and the figures after it stay visible.
                browser.asked("document.querySelector('#errors td').textContent = 'REBALANCE_IN_PROGRESS_'.repeat(9)")
                assert browser.asked(SIDEWAYS) == []
                wait_for("findings", lambda: browser.asked(HEADING_OF_FINDINGS) != [], 60)
                findings = browser.asked(HEADING_OF_FINDINGS)
                severities = browser.asked(HEADING_OF_FINDINGS.replace("findings b", "findings small"))
                evidence = browser.asked("return document.querySelector('#findings').textContent")
                browser.width(2560)
                assert browser.asked("return document.documentElement.scrollWidth") <= 2560
                assert browser.complaints() == []
            listed = json.loads(asked_top(f"127.0.0.1:{admin}"))
            counted: Counter[str] = Counter()
            for family in text_string_to_metric_families(loaded(f"{url}metrics")[2]):
                for sample in family.samples:
                    if sample.labels.get("api") in ("Heartbeat", "ListOffsets"):
                        counted[sample.name] += int(sample.value)
            end.close()
    recorded = pq.read_table(tables / "exchanges").to_pylist()
    of_apis = [row for row in listed["apis"] if row["api"] in ("Heartbeat", "ListOffsets")]
    # requests
    assert 15 == len(recorded) == counted["kproxy_requests_total"] == sum(row["requests"] for row in of_apis)
    assert connection[6] == "15"
    # refusals
    assert 8 == sum(row["error"] == "REBALANCE_IN_PROGRESS" for row in recorded) == counted["kproxy_errors_total"]
    assert [row["answers"] for row in listed["errors"]] == [8]
    assert [[row[0], row[1], row[4]] for row in errors] == [["REBALANCE_IN_PROGRESS", "Heartbeat", "8"]]
    # bytes
    assert sent == sum(row["request_bytes"] for row in recorded) == counted["kproxy_request_bytes_total"]
    assert sent == sum(row["request_bytes"] for row in of_apis) == listed["connections"][0]["bytes_in"]
    assert got == sum(row["response_bytes"] for row in recorded) == counted["kproxy_response_bytes_total"]
    assert connection[7:9] == [f"{sent} B", f"{got} B"]
    # findings
    assert findings == [f"{row['title']}: {row['where']}" for row in listed["findings"]]
    assert severities == [row["severity"] for row in listed["findings"]]  # as text, not by colour alone
    refused = next(row["evidence"] for row in listed["findings"] if row["kind"] == "old_versions")
    assert f"requests {refused['requests']}," in evidence  # counts are integers
    assert any(found.startswith("Protocol versions") for found in findings)  # a busy machine adds another finding


def asked_top(admin: str) -> str:
    command = (*KPROXY, "top", admin, "--json", "--interval", "0.2")
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


class Scripted:
    """Serves the page and the given answers in order, repeating the last; the first waits for `may_answer`."""

    def __init__(self, answers: list[dict[str, object]]) -> None:
        self.may_answer = threading.Event()
        self.asked: list[dict[str, list[str]]] = []
        self.at_once = self.most_at_once = 0
        scripted, page, lock = self, load_page(), threading.Lock()
        assert page is not None

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                if path == "/api/live":
                    with lock:
                        scripted.at_once += 1
                        scripted.most_at_once = max(scripted.most_at_once, scripted.at_once)
                        scripted.asked.append(urllib.parse.parse_qs(query))
                        body = json.dumps(answers[min(len(scripted.asked), len(answers)) - 1]).encode()
                    scripted.may_answer.wait(60)
                    with lock:
                        scripted.at_once -= 1
                elif path == "/api":
                    body = b"{}"
                else:
                    body = page[path.removeprefix("/page/").strip("/") or "index.html"].body
                self.send_response(200)
                kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}.get(path[-3:].strip("."))
                self.send_header("Content-Type", kind or "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(ConnectionError):
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def __enter__(self) -> "Scripted":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_answer.set()
        self.server.shutdown()
        self.server.server_close()


def answer(second: int, **more: object) -> dict[str, object]:
    """Return an answer of /api/live, of a kproxy with one cluster."""
    state = {"version": "1", "now_ms": 10**12 + 1000 * second, "started_ms": 10**12, "ready": True, "connections": 7}
    state |= {"not_ready": [], "draining": False, "workers": 1, "cpu_s": second, "detail": {"c": "topics"}}
    rows: dict[str, object] = {
        name: [] for name in ("totals", "brokers", "errors", "topics", "clients", "groups", "lags")
    }
    of_history = {"series": [["other"] * 3], "group_names": [["other"] * 2], "first_series": 0, "first_group": 0}
    columns = ["at_us", "connection", "number", "api", "cluster", "broker", "broker_s", "client_id"]
    fixed = {"samples": [], "current": None, "interval_s": 0.2, "bounds_s": [0.001, 0.002], "slow_columns": columns}
    return {"state": state, **rows, **of_history, **fixed, "slow": [], **more}


def total(broker: str, api: str, requests: int) -> list[object]:
    return ["c", broker, api, requests, requests, 0, 0, 0, 0, [1, requests]]


def slow(at_s: float, connection: str) -> list[object]:
    return [int(at_s * 1e6), connection, 1, "Produce", "c", "1", 0.5, f"client-{connection}"]


def test_each_figure_counts_once_with_several_tabs_and_truncated_answers() -> None:
    brokers = [["c", "1", 1, 0, 0]]
    topic = ["c", "new", 400, 4, 0, 0]
    same = {"brokers": [*brokers, ["d", "1", 1, 0, 0]], "topics": [topic, ["d", "new", 4, 1, 0, 0]]}
    cut = {
        "totals": [total(str(number), "Fetch", 5) for number in range(200)],
        "apis": [total("", "Fetch", 5000), total("", "Produce", 200), total("", "OffsetCommit", 800)],
        "of_brokers": [total("1", "", 600)],
    }
    late = answer(2, totals=[total("1", "Produce", 100)], topics=[topic], brokers=brokers, slow=[slow(100, "1")])
    answers = [
        answer(0, brokers=brokers),
        late,
        answer(4, **cut, **same, slow=[slow(99, "2"), slow(100, "1")]),
    ]
    with Scripted(answers) as kproxy, chromium.opened(kproxy.url, 1440) as browser:
        wait_for("the first question", lambda: len(kproxy.asked) == 1, 60)
        for _ in range(3):  # the user switches tabs while no answer arrives
            browser.asked("document.dispatchEvent(new Event('visibilitychange'))")
        browser.chrome.execute_async_script("fetch('/api').then(() => arguments[0]())")  # all earlier requests are sent
        asked_for = "const made = window.fetch; window.seen = []; new MutationObserver(() => window.seen.push("
        asked_for += "[...document.querySelectorAll('.tile b')].map((tile) => tile.textContent))).observe("
        browser.asked(asked_for + "document.querySelector('#tiles'), { childList: true })")
        kproxy.may_answer.set()
        wait_for("the last answer", lambda: len(kproxy.asked) > 5, 60)
        assert kproxy.most_at_once == 1
        # A row that is new since two seconds began at 0; sums cover all rows, although an answer has only the largest.
        wait_for("all requests", lambda: tile(browser, "requests/s") == "1,500", 60)
        assert "50" in {seen[0] for seen in browser.asked("return window.seen") if seen}
        assert tile(browser, "connections") == "7"
        assert [row[:2] for row in rows(browser, "apis")] == [
            ["Fetch", "1,250"],
            ["OffsetCommit", "200"],
            ["Produce", "50"],
        ]
        assert [row[0:5:4] for row in rows(browser, "brokers")] == [["1", "150"], ["1", "0"]]
        assert [row[:2] for row in rows(browser, "topics")] == [["new", "c"], ["new", "d"]]  # from two clusters now
        # A slow exchange that ended after one that began later.
        assert [row[4] for row in rows(browser, "slow")] == ["client-1", "client-2"]
        assert kproxy.asked[2]["slow_after"] == ["70000000"]
        browser.chrome.get(f"{kproxy.url}?broker=1")
        wait_for("the note", lambda: "of the 200 largest" in browser.asked(HEADING_OF_APIS), 60)
        assert browser.complaints() == []


ALONE = """const tops = [...document.querySelectorAll(".tile")].map(each => each.getBoundingClientRect().top);
    return tops.filter(top => tops.filter(other => other === top).length === 1)"""


@pytest.mark.parametrize("width", [1280, 1366, 1440, 1920, 2560])
def test_figures_stay_visible_next_to_long_names_of_several_clusters(width: int) -> None:
    names = ["orders-of-the-european-region", "payments-of-the-european-region"]
    long = "-".join(["consumer-of-orders"] * 4)
    filled = answer(
        1,
        brokers=[[name, "1", 1, 0, 0] for name in names],
        errors=[[name, "bootstrap", "OffsetCommit", "UNKNOWN_TOPIC_OR_PARTITION", 123_456] for name in names],
        lags=[[name, "client_id", long, long, 123_456_789, 86_400.0] for name in names],
        topics=[[name, long, 10**9, 10**6, 10**9, 10**6] for name in names],
        clients=[[name, long, "apache-kafka-java", "4.1.0", 1000] for name in names],
    )
    with Scripted([filled]) as kproxy, chromium.opened(kproxy.url, width) as browser:
        browser.width(width)
        kproxy.may_answer.set()
        wait_for("the tables", lambda: all(rows(browser, name) for name in ("errors", "lags", "topics", "clients")), 60)
        assert browser.asked(SIDEWAYS) == []
        assert browser.asked(ALONE) == []  # no tile is alone in its row


def test_a_lag_that_is_a_minimum_is_marked_and_one_without_data_is_shown_as_unknown() -> None:
    lags = (("end", 0, 0), ("none", None, 2), ("behind", 7500, 3), ("part", 0, 1), ("known", 8, 0))
    listed = [["c", "group", name, "orders", records, None, unknown] for name, records, unknown in lags]
    with Scripted([answer(1, lags=listed)]) as kproxy, chromium.opened(kproxy.url, 1366) as browser:
        kproxy.may_answer.set()
        wait_for("the lags", lambda: bool(rows(browser, "lags")), 60)
        shown = [(name, records, unknown) for name, _, _, records, _, unknown in rows(browser, "lags")]
        assert [shown[0], shown[1], shown[4]] == [("behind", "≥ 7,500", "3"), ("known", "8", "0"), ("end", "0", "0")]
        assert sorted(shown[2:4]) == [("none", "unknown", "2"), ("part", "≥ 0", "1")]


def test_over_tls_with_a_token(tmp_path: Path) -> None:
    """One browser trusts the test's CA, the other does not."""
    authority = Authority(tmp_path / "ca")
    certificate = authority.server()
    token = tmp_path / "token"
    token.write_text("s3cret-word\n")
    settings = tmp_path / "admin.toml"
    files = "".join(f'{name} = "{value}"\n' for name, value in certificate.settings().items())
    settings.write_text(f'admin_token_file = "{token}"\n[admin_tls]\n{files}')
    context = ssl.create_default_context(cafile=str(certificate.ca))
    with traffic() as demo:
        kproxy = Kproxy(demo.bootstrap, tmp_path, "--config", str(settings))
        page = f"https://{kproxy.admin}/"

        def is_ready() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"{page}ready", timeout=5, context=context) as answer:
                return bool(answer.status == 200)
            return False

        kproxy.start(waits_until_ready=False)
        try:
            wait_for("/ready over TLS", is_ready, 60)
            demo.admit(kproxy.bootstrap)
            with chromium.opened(page, home=chromium.trusting(tmp_path / "home", authority.bundle)) as browser:
                wait_for("the form", lambda: browser.asked("return document.querySelector('#login').open"), 30)
                browser.chrome.find_element("css selector", "#login input").send_keys("s3cret-word\n")
                wait_for("figures", lambda: tile(browser, "requests/s") not in ("None", "0", "–"), 60)
                assert browser.asked("return isSecureContext && location.protocol") == "https:"
                assert all("401" in line for line in browser.complaints())
                asked = [url for url in browser.requests() if not url.startswith("data:")]
                assert asked and all(url.startswith(page) and "s3cret-word" not in url for url in asked)
            with chromium.opened(page) as browser:
                assert browser.asked("return document.title") == "Privacy error"
        finally:
            kproxy.stop()


@pytest.mark.parametrize("page", [True, False])
def test_page_files_need_no_token_and_have_security_headers(tmp_path: Path, page: bool) -> None:
    token = tmp_path / "token"
    token.write_text("word")
    with traffic() as demo:
        more = () if page else ("--no-page",)
        with Kproxy(demo.bootstrap, tmp_path, "--admin-token-file", str(token), *more) as kproxy:
            for name in ("", "page/page.js", "page/page.css", "page/d3.js", "page/icon.svg"):
                status, headers, text = loaded(f"http://{kproxy.admin}/{name}")
                assert status == (200 if page else 401)
                if page:
                    policy = headers["Content-Security-Policy"]
                    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
                    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
            authorized = {"Authorization": "Bearer word"}
            status, _, text = loaded(f"http://{kproxy.admin}/", **authorized)
            assert status == 200 and ("page.js" in text) is page
            status, _, text = loaded(f"http://{kproxy.admin}/api/live", **authorized)
            assert status == 200 and ("samples" in json.loads(text)) is page
            assert loaded(f"http://{kproxy.admin}/page/%2e%2e/page.js", **authorized)[0] == 404
            assert loaded(f"http://{kproxy.admin}/page/live.py", **authorized)[0] == 404
            assert (f"/ready, a page for browsers at http://{kproxy.admin}/" in kproxy.log_tail()) is page


def test_files_are_small_enough_to_be_kept_in_memory() -> None:
    files = load_page()
    assert files is not None and set(files) == {"index.html", "page.css", "page.js", "icon.svg", "d3.js"}
    assert sum(len(file.body) for file in files.values()) < 450_000
