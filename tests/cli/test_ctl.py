"""`kproxy ctl` with a running kproxy: the commands as a user types them, and their errors."""

import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr
from io import StringIO

import pytest
from click.testing import CliRunner

from kproxy.admin.asking import AdminPort
from kproxy.cli import ctl
from kproxy.errors import KproxyError
from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, METADATA
from kproxy.views.operator import age
from tests.certificates import Authority
from tests.ports import free_ports
from tests.wire.playbook import request, response

HOST = "127.0.0.1"
KPROXY = (sys.executable, "-c", "from kproxy.cli import main; main()")
COMMANDS = (
    "status",
    "dump",
    "connections",
    "findings",
    "groups",
    "requests",
    "close",
    "drain",
    "log-level",
    "brokers",
    "policy",
    "reload",
    "trace",
)


@contextmanager
def running(folder, settings="", of_cluster=""):
    """Run a kproxy whose broker responds only twice; yields (broker's socket, port, admin port)."""
    port = free_ports(6)
    broker = socket.create_server((HOST, 0))
    broker.settimeout(60)  # until a kproxy has started, on a busy machine
    file = folder / "kproxy.toml"
    file.write_text(
        f'admin = "{HOST}:{port + 5}"\n{settings}\n[[cluster]]\nlisten = "{HOST}:{port}"\n'
        f'bootstrap = ["{HOST}:{broker.getsockname()[1]}"]\n{of_cluster}'
    )
    process = subprocess.Popen([*KPROXY, "run", "--config", str(file)], stderr=subprocess.PIPE, text=True)
    try:
        asks, _ = broker.accept()
        frame(asks)
        asks.sendall(response(API_VERSIONS, 0, 18, {"apiKeys": [{"apiKey": 3, "minVersion": 0, "maxVersion": 12}]}))
        frame(asks)
        named = {"brokers": [{"nodeId": 1, "host": HOST, "port": broker.getsockname()[1]}]}
        asks.sendall(response(METADATA, 12, 3, named))
        yield broker, port, port + 5
    finally:
        process.terminate()
        print(process.communicate(timeout=30)[1])
        broker.close()


def frame(sock):
    head = sock.recv(4, socket.MSG_WAITALL)
    return head + sock.recv(int.from_bytes(head), socket.MSG_WAITALL)


def asked(*arguments, status=0):
    done = subprocess.run([*KPROXY, "ctl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def kproxy(tmp_path_factory):
    """A kproxy with TLS and a token, and a client with a pending request; yields (options, client, broker's socket)."""
    folder = tmp_path_factory.mktemp("ctl")
    authority = Authority(folder)
    certificate = authority.server()
    token = folder / "token"
    token.write_text("s3cret-token\n")
    tls = "\n".join(f'{name} = "{value}"' for name, value in certificate.settings().items())
    settings = f'admin_token_file = "{token}"\n[admin_tls]\n{tls}\n'
    rules = 'read_only = true\n[[cluster.policy]]\naction = "deny"\ntopic = "secret-*"\n'
    with running(folder, settings, rules) as (broker, port, admin):
        options = ("-a", f"https://localhost:{admin}", "--token-file", str(token), "--ca", str(certificate.ca))
        wait_until(lambda: json.loads(asked(*options, "status", "--json"))["ready"])
        client = socket.create_connection((HOST, port))
        named = {"clientSoftwareName": "tester", "clientSoftwareVersion": "1.2"}
        client.sendall(request(API_VERSIONS, 3, 1, named, client="orders-7"))
        end, _ = broker.accept()
        frame(end)
        yield options, client, end, token, admin


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_status_connections_and_clusters_are_shown(kproxy):
    options = kproxy[0]
    assert "ready: true" in asked(*options, "status")
    table = asked(*options, "connections")
    assert all(text in table for text in ("orders-7", "tester 1.2", "User:ANONYMOUS", "bootstrap"))
    (row,) = json.loads(asked(*options, "connections", "--client", "orders", "--json"))
    assert asked(*options, "connections", "--client", "nobody").strip() == "no connections"
    assert "no groups were seen" in asked(*options, "groups")
    assert "ApiVersions" in asked(*options, "requests", str(row["number"]))
    (brokers,) = json.loads(asked(*options, "brokers", "--json"))
    assert "1" in brokers["brokers"] and HOST in asked(*options, "brokers")
    (policy,) = json.loads(asked(*options, "policy", "--json"))
    rule = {"action": "deny", "topic": ["secret-*"]}
    assert list(policy.items())[:2] == [("cluster", "default"), ("read_only", True)]
    assert policy["policy"] == [rule] and policy["policy_default"] == "allow" and policy["limits"] == {}
    lines = asked(*options, "policy")
    order = ["read_only: true: refuses every API but", '"rule": 1', "secret-*", "policy_default: allow"]
    assert [lines.find(text) for text in order] == sorted(lines.find(text) for text in order) and order[0] in lines
    assert all(text in lines for text in order)
    assert asked(*options, "log-level", "debug").strip() == "debug" == asked(*options, "log-level").strip()
    asked(*options, "log-level", "info")


def test_frames_are_shown_live_until_their_connection_ends(kproxy):
    options, client, end, _, _ = kproxy
    (row,) = json.loads(asked(*options, "connections", "--json"))
    number = str(row["number"])
    tracing = subprocess.Popen(
        [*KPROXY, "ctl", *options, "trace", "--connection", number, "--frames", "2"], stdout=subprocess.PIPE, text=True
    )
    assert "tracing" in tracing.stdout.readline()
    client.sendall(request(HEARTBEAT, 4, 2, {"groupId": "billing\x1b[2J"}, client="orders-7"))
    frame(end)
    end.sendall(response(API_VERSIONS, 3, 1, {"apiKeys": []}) + response(HEARTBEAT, 4, 2, {"errorCode": 25}))
    text, _ = tracing.communicate(timeout=30)
    assert "-> Heartbeat request v4  correlation id 2  client orders-7" in text
    assert "billing\\x1b[2J" in text and "\x1b" not in text
    assert "<- ApiVersions response v3" in text and "number of frames" in text

    assert asked(*options, "drain", "--all").strip() == "draining: 1"
    client.settimeout(20)
    while client.recv(1 << 16):
        """What was due."""
    client.close()
    end.close()
    wait_until(lambda: asked(*options, "connections").strip() == "no connections")
    assert json.loads(asked(*options, "drain", "--all", "--json")) == {"draining": 0}


def test_missing_objects_are_reported_with_a_remedy(kproxy):
    options, _, _, token, admin = kproxy
    assert "connection 999 is not open" in asked(*options, "close", "999", status=1)
    assert "say what is drained" in asked(*options, "drain", status=2)
    assert "say what is traced" in asked(*options, "trace", status=2)
    assert "cluster='none' is none of default" in asked(*options, "drain", "--cluster", "none", status=2)
    assert "wants its token" in asked(*options[:2], *options[4:], "status", status=2)
    assert "is not trusted" in asked(*options[:2], "--token-file", str(token), "status", status=2)
    assert "https://" in asked("-a", f"localhost:{admin}", "status", status=2)
    assert "is no admin port of kproxy: it answers 404 Not Found" in asked(
        "-a", f"{options[1]}/x", *options[2:], "status", status=2
    )
    port = free_ports(1)
    assert "nobody listens there" in asked("-a", f":{port}", "status", status=2)
    with socket.create_server((HOST, port)) as kafka:

        def reset():
            client, _ = kafka.accept()
            client.recv(1)
            client.close()  # the kernel resets a connection that is closed with unread bytes

        refusing = threading.Thread(target=reset)
        refusing.start()
        error = asked("-a", f"{HOST}:{port}", "status", status=2)
        refusing.join()
    assert "does not answer with HTTP" in error and "--admin of kproxy run says which port is the admin port" in error
    for address in ("ftp://localhost", "localhost:99600", "[::1"):
        assert "is no address of an admin port: give [http[s]://]HOST:PORT" in asked("-a", address, "status", status=2)
    assert "holds no token" in asked("-a", f":{port}", "--token-file", str(token) + "x", "status", status=2)
    wrong = token.with_name("wrong")
    another = f"wants another token than the one in {wrong}"
    for text, message in (("s3cret\nof lines", "one word of at most 4096 ASCII"), ("s3cret", another)):
        wrong.write_text(text)
        refused = asked(*options[:2], "--token-file", str(wrong), *options[4:], "status", status=2)
        assert message in refused and "s3cret" not in refused


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_has_an_example(command):
    result = CliRunner().invoke(ctl.ctl, [command, "--help"])
    assert result.exit_code == 0 and f"kproxy ctl {command}" in result.output and "--json" in result.output
    assert set(COMMANDS) == set(ctl.ctl.commands)


@pytest.mark.parametrize("read_only", [True, False])
def test_the_deciding_setting_is_named_even_if_no_rule_decides(read_only):
    class Port:
        def get(self, path):
            assert path == "/api/policy"
            return [{"cluster": "east", "read_only": read_only, "policy": [], "policy_default": "allow", "limits": {}}]

    result = CliRunner().invoke(ctl.policy, [], obj=Port)
    assert result.exit_code == 0 and "cluster: east" in result.output and "policy_default: allow" in result.output
    assert ("read_only: true: refuses" in result.output) == read_only
    assert ("read_only: false" in result.output) != read_only


def test_a_slow_dump_is_announced():
    printed = []

    class Port:
        def post(self, path, **_):
            printed.append(capture.getvalue())
            return 200, {"folder": "/dumps/now"}

    with redirect_stderr(StringIO()) as capture:
        ctl.dump.callback.__wrapped__(Port, as_json=False)
    assert "this takes a minute" in printed[0]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.0123, "0.0123 s"), (59.94, "59.9 s"), (60, "1m"), (3661, "1h 1m"), (3e5, "3d 11h")],
)
def test_ages_are_rounded(seconds, text):
    assert age(seconds) == text


def test_a_misspelt_group_is_not_blamed_on_the_settings():
    """The message must not send a user who misspelt a group to the settings."""

    class Port:
        def get(self, path, **options):
            return [] if options["after"] else [{"cluster": "shop", "group": "billing"}]

    text = CliRunner().invoke(ctl.groups, ["--group", "biling"], obj=Port, catch_exceptions=False).output
    assert text == "1 group seen, none of them chosen; `kproxy ctl groups` lists them\n"


def test_the_token_is_not_sent_to_the_target_of_a_redirect(tmp_path):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers.get("Authorization"))
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{stranger.server_port}/api/status\x1b[2J")
            self.end_headers()

        def log_message(self, *_):
            pass

    (tmp_path / "token").write_text("s3cret-word")
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stranger,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as kproxy,
    ):
        for server in (stranger, kproxy):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(KproxyError, match="is not where it answers: it sends to 'http://") as fault:
            AdminPort(f"127.0.0.1:{kproxy.server_port}", tmp_path / "token").get("/api/status")
        for server in (stranger, kproxy):
            server.shutdown()
    assert asked == ["Bearer s3cret-word"] and "\x1b" not in str(fault.value)
