"""Access to the admin port over real HTTP: with and without a token, from this machine and from browsers."""

import asyncio
import json
import os
import random
import socket
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
import uvloop

from kproxy.admin.guard import Guard, Token, _is_ours
from kproxy.admin.server import MAX_BODY, Admin
from kproxy.errors import ConfigError
from kproxy.proxy.config.load import load
from tests.proxy.live import HOST, kproxy, live

POST = {"X-Kproxy": "yes"}
EVERYWHERE = ("/", "/metrics", "/health", "/ready", "/api", "/api/connections")


@asynccontextmanager
async def serving(host="127.0.0.1", **more):
    done = []

    async def act(query):
        done.append(dict(query))
        return 200, {"done": len(done)}

    admin = Admin(
        host,
        0,
        scrape=lambda _: (b"a 1\n", "text/plain"),
        not_ready=tuple,
        api={"connections": lambda _: []},
        actions={"act": act},
        **more,
    )
    await admin.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield http, f"http://127.0.0.1:{admin.address[1]}", done
    finally:
        await admin.stop()


def run(coroutine):
    return uvloop.run(coroutine)


async def status(http, method, url, **more):
    async with http.request(method, url, **more) as answer:
        return answer.status, await answer.text()


def token_of(folder, text="s3cret-token"):
    file = folder / "token"
    file.write_text(text)
    return Token(file)


def bearer(text):
    return {"Authorization": f"Bearer {text}"}


def test_without_a_token_this_machine_may_ask_and_act_but_no_web_page():
    async def main():
        async with serving() as (http, url, done):
            for path in EVERYWHERE:
                assert (await status(http, "GET", url + path))[0] == 200
            code, text = await status(http, "POST", f"{url}/api/act")
            assert code == 403 and "X-Kproxy" in text, "what a form of a web page can send is not enough"
            assert (await status(http, "POST", f"{url}/api/act", data="a=1", headers={"Origin": "http://evil"}))[
                0
            ] == 403
            assert not done
            assert (await status(http, "POST", f"{url}/api/act?level=x", headers=POST))[0] == 200
            assert done == [{"level": "x"}]
            code, _ = await status(http, "OPTIONS", f"{url}/api/act")
            assert code >= 400, "no page of another origin is told that it may"

    run(main())


@pytest.mark.parametrize("name", ["evil.example", "evil.example:9600", "localhost.evil.example", "[evil]:1"])
def test_a_foreign_host_name_that_resolves_to_this_machine_is_refused(name):
    async def main():
        async with serving() as (http, url, done):
            for path in EVERYWHERE:
                code, text = await status(http, "GET", url + path, headers={"Host": name})
                assert code == 403 and "localhost" in text
            assert (await status(http, "POST", f"{url}/api/act", headers=POST | {"Host": name}))[0] == 403
            assert not done

    run(main())


def test_from_elsewhere_a_foreign_name_reads_nothing_but_what_is_scraped_and_probed(tmp_path):
    """As a page that a browser in the network holds open, whose name leads here by now."""
    own = next((host for host in _own_addresses() if not host.startswith("127.")), None)
    if own is None:
        pytest.skip("this machine has no address but loopback")
    told = {"/": 200, "/metrics": 200, "/health": 200, "/ready": 200, "/api": 200, "/api/connections": 200}
    scraped = told | dict.fromkeys(("/", "/api", "/api/connections"), 403)
    of_names = {
        "evil.example": scraped,
        "10.0.0.7.evil.example:9600": scraped,
        "svc.evil.example": scraped,
        "kproxy.example.com:9600": told,
        "KPROXY.example.com.": told,
        "kproxy.internal.example": told,  # where it listens
        "kproxy": told,
        "kproxy.kafka.svc:9600": told,
        "kproxy.kafka.svc.cluster.local": told,
        "10.0.0.7:9600": told,
        "[fd00::7]:9600": told,
    }

    async def main():
        guard = Guard(hosts=("kproxy.internal.example", "kproxy.example.com"))
        async with serving(host="0.0.0.0", guard=guard) as (http, url, _):
            url = url.replace("127.0.0.1", own)
            for name, wanted in of_names.items():
                found = {
                    path: (await status(http, "GET", url + path, headers={"Host": name}))[0] for path in EVERYWHERE
                }
                assert found == wanted, name
            refused = await status(http, "GET", f"{url}/api", headers={"Host": "evil.example"})
            assert "admin_hosts" in refused[1]
            tool = {"Host": "evil.example", "Sec-Kproxy": "ctl"}  # as kproxy ctl sends it, and no page can
            assert (await status(http, "GET", f"{url}/api", headers=tool))[0] == 200
        token = Guard(token_of(tmp_path), hosts=("kproxy.example.com",))
        async with serving(host="0.0.0.0", guard=token) as (http, url, _):
            named = {"Host": "evil.example"}
            assert (await status(http, "GET", f"{url}/api", headers=named | bearer("s3cret-token")))[0] == 200
            listed = {"Host": "kproxy.example.com"}
            assert (await status(http, "GET", f"{url}/api", headers=listed))[0] == 401

    run(main())


def test_a_listed_name_leads_here_over_loopback_too_as_through_a_reverse_proxy():
    async def main():
        async with serving(guard=Guard(hosts=("kproxy.example.com",))) as (http, url, _):
            for path in EVERYWHERE:
                assert (await status(http, "GET", url + path, headers={"Host": "kproxy.example.com"}))[0] == 200
                assert (await status(http, "GET", url + path, headers={"Host": "kproxy.svc"}))[0] == 403

    run(main())


@pytest.mark.parametrize("wrong", ["http://kproxy.example.com", "kproxy.example.com:9600", "*.example.com", " "])
def test_an_invalid_host_name_is_refused(wrong):
    flags = {"listen": f"{HOST}:9092", "bootstrap": "kafka:9092", "admin_hosts": wrong}
    if wrong.strip():
        with pytest.raises(ConfigError, match="without scheme and port"):
            load(flags=flags)
    assert load(flags=flags | {"admin_hosts": "a.example, b.example"}).admin_hosts == ("a.example", "b.example")


def test_names_and_numbers_of_this_machine_are_ours():
    own = socket.gethostname()
    for host in (
        "localhost",
        "LOCALHOST:9600",
        "127.0.0.1:9600",
        "10.1.2.3",
        "[::1]:9600",
        "kproxy.localhost",
        own,
    ):
        assert _is_ours(host), host
    for host in ("", "evil", "evil.example:9600", "127.0.0.1.evil.example", "localhost.evil"):
        assert not _is_ours(host), host


def test_requests_without_the_token_get_only_health_and_readiness(tmp_path):
    async def main():
        async with serving(guard=Guard(token_of(tmp_path))) as (http, url, done):
            for path in EVERYWHERE:
                expected = 200 if path in ("/health", "/ready") else 401
                assert (await status(http, "GET", url + path))[0] == expected, path
                assert (await status(http, "GET", url + path, headers=bearer("s3cret-token")))[0] == 200
            for wrong in ("s3cret-toke", "s3cret-token2", "", "S3CRET-TOKEN", "é"):
                assert (await status(http, "GET", f"{url}/metrics", headers=bearer(wrong)))[0] == 401
            basic = {"Authorization": "Basic s3cret-token"}
            assert (await status(http, "GET", f"{url}/metrics", headers=basic))[0] == 401
            assert (await status(http, "POST", f"{url}/api/act", headers=POST))[0] == 401
            assert not done
            assert (await status(http, "POST", f"{url}/api/act", headers=bearer("s3cret-token")))[0] == 200
            foreign = bearer("s3cret-token") | {"Host": "kproxy.example"}
            assert (await status(http, "GET", f"{url}/metrics", headers=foreign))[0] == 200

    run(main())


def test_metrics_can_be_left_open(tmp_path):
    async def main():
        async with serving(guard=Guard(token_of(tmp_path), open_metrics=True)) as (http, url, _):
            assert (await status(http, "GET", f"{url}/metrics"))[0] == 200
            assert (await status(http, "GET", f"{url}/api/connections"))[0] == 401

    run(main())


def test_a_token_is_replaced_while_it_runs_and_never_by_nothing(tmp_path, caplog):
    file = tmp_path / "token"
    token = token_of(tmp_path, "first\n")
    assert token.accepts("Bearer first") and token.accepts("bearer  first")
    other = tmp_path / "other"
    other.write_text("second")
    other.rename(file)
    assert token.accepts("Bearer second") and not token.accepts("Bearer first")
    for broken in ("", "two words", "x" * 5000, "ünïcode"):
        file.write_text(broken)
        os.utime(file, ns=(time.time_ns(), time.time_ns() + random.randrange(1 << 30)))
        assert token.accepts("Bearer second") and not token.accepts("Bearer ") and not token.accepts("")
    file.unlink()
    assert token.accepts("Bearer second")
    assert "stays in force" in caplog.text and "second" not in caplog.text
    file.write_text("third")
    assert token.accepts("Bearer third") and not token.accepts("Bearer second")


@pytest.mark.parametrize("text", [None, "", " \n", "two words"])
def test_a_kproxy_with_no_token_in_its_file_does_not_start(text, tmp_path):
    if text is not None:
        (tmp_path / "token").write_text(text)
    with pytest.raises(ConfigError, match="admin_token_file"):
        Token(tmp_path / "token")


def test_without_a_token_other_machines_may_not_act():
    own = next((host for host in _own_addresses() if not host.startswith("127.")), None)
    if own is None:
        pytest.skip("this machine has no address but loopback")

    async def main():
        async with serving(host="0.0.0.0") as (http, url, done):
            url = url.replace("127.0.0.1", own)
            assert (await status(http, "GET", f"{url}/api/connections", headers={"Host": "kproxy.svc"}))[0] == 200
            code, text = await status(http, "POST", f"{url}/api/act", headers=POST)
            assert code == 403 and "admin_token_file" in text and not done

    run(main())


def _own_addresses():
    for target in ("192.0.2.1", "10.255.255.255"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))
            except OSError:
                continue
            yield probe.getsockname()[0]


@pytest.mark.parametrize("admin", [":0", "0"])
def test_without_a_host_the_admin_port_is_for_this_machine_alone(admin, caplog):
    caplog.set_level("INFO")

    async def test():
        async with kproxy(admin=admin) as here:
            host, port = here.server.admin_address
            assert host in ("127.0.0.1", "::1")
            assert f"--admin 0.0.0.0:{port}" in caplog.text
            for own in _own_addresses():
                if not own.startswith("127."):
                    with pytest.raises(OSError):
                        socket.create_connection((own, port), 2).close()

    live(test())


def test_the_admin_address_is_a_port_or_host_and_port():
    flags = {"listen": f"{HOST}:9092", "bootstrap": "kafka:9092"}
    assert load(flags=flags | {"admin": "9600"}).admin == ("", 9600)
    assert load(flags=flags | {"admin": ":9600"}).admin == ("", 9600)
    assert load(flags=flags | {"admin": "0.0.0.0:9600"}).admin == ("0.0.0.0", 9600)
    for wrong in ("96000", "x", ""):
        with pytest.raises(ConfigError):
            load(flags=flags | {"admin": wrong}) if wrong else load(flags=flags | {"admin": "localhost"})


def test_any_posted_body_gets_an_answer_that_names_the_error():
    chance = random.Random(7)
    good = b'{"level": "debug", "connection": 1}'
    bodies = [b"", b"null", b"[]", b"{}", b'"x"', b"{" * 5000, b'{"a": {}}', b'{"a": NaN}', b"\xff\xfe", good]
    for _ in range(150):
        body = bytearray(good * chance.randrange(1, 3))
        for _ in range(chance.randrange(1, 6)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        bodies.append(bytes(body[: chance.randrange(len(body) + 1)]))
    bodies.append(b'{"a": "' + b"x" * MAX_BODY + b'"}')

    async def main():
        async with serving() as (http, url, done):
            codes = set()
            for body in bodies:
                code, text = await status(http, "POST", f"{url}/api/act", data=body, headers=POST)
                assert code in (200, 400, 413), text
                codes.add(code)
                if code == 400:
                    assert "body" in text
            assert codes == {200, 400, 413}
            assert all(isinstance(value, str) for query in done for value in query.values())
            assert (await status(http, "GET", f"{url}/health"))[0] == 200

    run(main())


def test_no_posted_body_ends_kproxy():
    chance = random.Random(11)
    values = ["", "x", "-1", "1", 1, 1e9, 1 << 70, "yes", "☃", "default", "debug", None, [], "127.0.0.1", "a" * 1000]
    names = ["connection", "client", "cluster", "all", "level", "seconds", "frames", "bytes"]

    async def test():
        async with kproxy(admin=f"{HOST}:0") as here, aiohttp.ClientSession() as http:
            url = f"http://{here.server.admin_address}"
            for _ in range(200):
                action = chance.choice(["close", "drain", "log-level", "trace", "none"])
                body = {chance.choice(names): chance.choice(values) for _ in range(chance.randrange(4))}
                if action == "trace":
                    body["seconds"] = 0
                code, text = await status(http, "POST", f"{url}/api/{action}", data=json.dumps(body), headers=POST)
                assert code in (200, 400, 404), (action, body, text)
            assert not here.server.relays.worker.traces
            await asyncio.sleep(0)

    live(test())
