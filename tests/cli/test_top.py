"""`kproxy top` for scripts: its figures equal those of /api and /metrics, and errors are reported."""

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections import Counter

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from kproxy.cli import top
from kproxy.cli.top import _VIEWS
from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT
from kproxy.views.top.tables import VIEWS
from tests.certificates import Authority
from tests.cli.test_ctl import HOST, KPROXY, frame, running, wait_until
from tests.ports import free_ports
from tests.wire.playbook import request, response


def asked(*arguments, status=0):
    done = subprocess.run([*KPROXY, "top", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_figures_are_those_of_the_api_and_of_metrics(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    certificate = authority.server()
    token = tmp_path / "token"
    token.write_text("s3cret-token\n")
    tls = "\n".join(f'{name} = "{value}"' for name, value in certificate.settings().items())
    with running(tmp_path, f'admin_token_file = "{token}"\n[admin_tls]\n{tls}\n') as (broker, port, admin):
        options = (f"localhost:{admin}", "--token-file", str(token), "--ca", str(certificate.ca))
        context = ssl.create_default_context(cafile=str(certificate.ca))

        def got(path):
            asking = urllib.request.Request(
                f"https://localhost:{admin}{path}", headers={"Authorization": "Bearer s3cret-token"}
            )
            with urllib.request.urlopen(asking, timeout=20, context=context) as answer:
                return answer.read().decode()

        wait_until(lambda: json.loads(got("/api/status"))["ready"])
        with socket.create_connection((HOST, port)) as client:
            client.sendall(request(API_VERSIONS, 3, 1, client="orders-7"))
            end, _ = broker.accept()
            frame(end)
            end.sendall(response(API_VERSIONS, 3, 1))
            frame(client)
            for number in range(12):
                client.sendall(request(HEARTBEAT, 4, number, {"groupId": "g"}, client="orders-7"))
                frame(end)
                end.sendall(response(HEARTBEAT, 4, number, {"errorCode": 27 if number % 3 else 0}))
                frame(client)
            monkeypatch.setattr(
                top, "_TIMEOUT_S", 60.0
            )  # on a busy machine an answer may take longer than a person would wait
            done = CliRunner().invoke(top.top, [*options, "--json", "--interval", "0.2"])
            assert done.exit_code == 0, done.exception
            frame_json, once = json.loads(done.stdout), {}
            for view in ("apis", "errors", "connections", "findings"):
                done = CliRunner().invoke(top.top, [*options, "--once", "--show", view, "--interval", "0.2"])
                assert done.exit_code == 0, done.exception
                once[view] = done.output
            live = json.loads(got("/api/live"))
            metrics = Counter()
            for family in text_string_to_metric_families(
                got("/metrics")
            ):  # one scrape: a later one may have more series
                for sample in family.samples:
                    metrics[sample.name, sample.labels.get("api")] += sample.value
            rows = {row["api"]: row for row in frame_json["apis"]}
            assert rows["Heartbeat"]["requests"] == 12 and rows["Heartbeat"]["errors"] == 8
            for api, row in rows.items():
                of_live = [each[3:] for each in live["totals"] if each[2] == api]
                for at, name in enumerate(("requests", "errors", "request_bytes", "response_bytes", "throttled")):
                    assert row[name] == sum(each[at] for each in of_live)
                assert row["requests"] == metrics["kproxy_requests_total", api]
                assert row["errors"] == metrics["kproxy_errors_total", api]
            assert (
                frame_json["errors"][0]["answers"] == 8 and frame_json["state"]["version"] == live["state"]["version"]
            )
            (connection,), (of_api,) = frame_json["connections"], json.loads(got("/api/connections"))
            assert connection.items() >= of_api.items() and connection["client_id"] == "orders-7"
            assert frame_json["groups"] == [] and frame_json["total"]["requests"] == sum(
                row["requests"] for row in rows.values()
            )
            line = next(line for line in once["apis"].splitlines() if line.startswith("Heartbeat"))
            assert line.split()[-3:] == ["12", "8", "0"]
            assert isinstance(frame_json["findings"], list) and once["findings"]
            assert "REBALANCE_IN_PROGRESS" in once["errors"] and "orders-7" in once["connections"]
            done = CliRunner().invoke(top.top, [f"https://localhost:{admin}", *options[3:], "--once"])
            assert "wants its token" in str(done.exception)
            end.close()


def test_errors_are_reported():
    assert "--once prints a table" in asked(status=2)
    assert "nobody listens there" in asked(f":{free_ports(1)}", "--json", status=2)
    assert _VIEWS == VIEWS


def test_the_help_has_an_example_and_screen_modules_load_only_to_draw():
    result = CliRunner().invoke(top.top, ["--help"])
    assert result.exit_code == 0 and "kproxy top --json" in result.output
    code = "import sys, kproxy.cli.top, kproxy.views.top.once; print('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


SIZES = ((80, 24), (120, 40), (200, 60))
COLOUR = re.compile(r"\x1b\[[\d;]*\b(?:3[0-7]|38;[\d;]+|4[0-7]|48;[\d;]+|9[0-7])[\d;]*m")
STYLE = re.compile(r"\x1b\[[\d;]*m|\x1b\([A-Z0-9]|[\x0e\x0f]")


class Terminals:
    """Terminals in a tmux of the test's own, each with a command; tmux interprets the output as a terminal does."""

    def __init__(self, folder):
        settings = folder / "tmux.conf"
        settings.write_text("set -g status off\n")
        self._tmux = ("tmux", "-S", str(folder / "tmux"), "-f", str(settings))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.do("kill-server", check=False)

    def do(self, *arguments, check=True):
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, timeout=30, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def open(self, name, size, command, **environment):
        named = [f"{key}={value}" for key, value in environment.items()]
        line = shlex.join(["env", "-u", "NO_COLOR", "-u", "COLUMNS", "-u", "LINES", *named, *command])
        self.do("new-session", "-d", "-s", name, "-x", str(size[0]), "-y", str(size[1]), line)

    def shown(self, name):
        """(lines, the same text with its colour sequences)"""
        drawn = self.do("capture-pane", "-p", "-e", "-t", name)
        return STYLE.sub("", drawn).splitlines(), drawn

    def names(self):
        return set(self.do("list-sessions", "-F", "#{session_name}", check=False).split())


@pytest.mark.ring2
def test_in_real_terminals_of_each_size_with_and_without_colours(tmp_path):
    """All figures of the head are complete, each table has its rows, and nothing is wider than the terminal."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is missing: apt-get install tmux")
    with (
        running(tmp_path) as (broker, port, admin),
        Terminals(tmp_path) as terminals,
        socket.create_connection((HOST, port)) as client,
    ):
        client.sendall(request(API_VERSIONS, 3, 1, client="orders-7"))
        end, _ = broker.accept()
        frame(end)
        end.sendall(response(API_VERSIONS, 3, 1))
        frame(client)

        def fail():
            client.sendall(request(HEARTBEAT, 4, 5, {"groupId": "g"}, client="orders-7"))
            frame(end)
            end.sendall(response(HEARTBEAT, 4, 5, {"errorCode": 27}))
            frame(client)

        def shows(name, pattern):
            fail()
            return re.search(pattern, "\n".join(terminals.shown(name)[0]))

        command = [*KPROXY, "top", f"localhost:{admin}", "--interval", "0.5"]
        cases = {f"{kind}-{size[0]}": (size, kind) for kind in ("colours", "plain") for size in SIZES}
        for name, (size, kind) in cases.items():
            terminals.open(name, size, command, TERM="tmux-256color", **({"NO_COLOR": "1"} if kind == "plain" else {}))
        for name, ((width, height), kind) in cases.items():
            wait_until(lambda name=name: shows(name, r"errors/s +[1-9].*\n(?:.*\n)+ *Heartbeat +[\d.]+"))
            lines, drawn = terminals.shown(name)
            assert len(lines) <= height and max(map(len, lines)) <= width
            head = " ".join(lines[:4])
            assert re.search(r"req/s +[\d.]+.* p99[ a-z]* +(?:[\d.]+ \S?s|–) +errors/s +[\d.]+", head), head
            assert re.search(r"brokers +[\d.]+ k?B/s +(?:to )?clients +[\d.]+ k?B/s", head), head
            assert all(f"{number} " in head for number in range(1, 10)) and "findings" in head
            assert "q quit" in lines[-1], (name, lines)
            assert bool(COLOUR.search(drawn)) == (kind == "colours")
            terminals.do("send-keys", "-t", name, "6")
        for name, ((width, _), _kind) in cases.items():
            wait_until(lambda name=name: shows(name, "orders-7"))
            assert max(map(len, terminals.shown(name)[0])) <= width
            terminals.do("send-keys", "-t", name, "q")
        wait_until(lambda: not terminals.names())
