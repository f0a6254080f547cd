"""The screen of `kproxy top` by its keys, before a kproxy that runs: sort, filter, open, pause, reconnect."""

import asyncio
from itertools import pairwise

import pytest

from kproxy.admin.asking import AdminPort
from kproxy.protocol.apis import API_VERSIONS, HEARTBEAT, METADATA
from kproxy.views.top.explanations import MEANINGS
from kproxy.views.top.screen import Top
from kproxy.views.top.source import Source
from kproxy.views.top.tables import WRAP
from tests.ports import free_ports
from tests.proxy.live import HOST, kproxy, live, request, response
from tests.proxy.process.knowledge.test_feed_link import exchanged, known, rebalance
from tests.proxy.process.workers import test_parent

HOSTILE = "[red]evil[/red]\u202e\u05d0e\u0301" + "x" * 400  # of 512 bytes, more is no client id to kproxy
PATIENCE_S = 120


async def until(pilot, condition):
    try:
        async with asyncio.timeout(30):
            while not condition():
                await pilot.pause(0.02)
    except TimeoutError:
        raise AssertionError("\n".join(text(pilot.app))) from None


def text(app):
    """The text on the screen, line by line."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


async def heartbeats(client, broker, count, error, name="c"):
    for number in range(count):
        await client.send(request(HEARTBEAT, 4, number, {"groupId": "g"}, client=name))
        await broker.frame()
        await broker.send(response(HEARTBEAT, 4, number, {"errorCode": error}))
        await client.frame()


def of(app, key, value):
    return next((row for row in app.shown if row[key] == value), {})


def test_keys_choose_sort_filter_open_and_pause():
    async def test():
        async with test_parent.kproxy("--detail", "topics", workers=1) as here:
            pairs = [await here.connect() for _ in range(2)]
            asked, answer = request(API_VERSIONS, 3, 1, client=HOSTILE), response(API_VERSIONS, 3, 1)
            await exchanged(*pairs[0], asked, answer)
            await rebalance(pairs, "billing", 1)
            await heartbeats(*pairs[1], 5, 27)
            await pairs[0][0].send(request(METADATA, 12, 77, client="\x1b[2J" + HOSTILE))
            await pairs[0][1].frame()  # and no answer
            await known(here, "billing", 1)
            app = Top(Source(AdminPort(f"{HOST}:{here.admin}")), interval_s=0.2)
            async with app.run_test(size=(80, 24)) as pilot:
                await until(pilot, lambda: of(app, "api", "Heartbeat").get("requests") == 5)
                assert of(app, "api", "Heartbeat")["errors"] == 5

                await until(pilot, lambda: app.sort == ("requests_per_s", True))
                await pilot.press("s", "s", "s", "s")
                assert app.sort == ("errors_per_s", True)
                await pilot.press("S", "S", "S", "S", "S")
                assert app.sort == ("api", False)
                await pilot.press("r")
                assert app.sort == ("api", True)
                names = [row["api"] for row in app.shown]
                assert len(names) > 2 and all(one > other for one, other in pairwise(names))

                await pilot.press("slash", *"HEART", "enter")
                assert [row["api"] for row in app.shown] == ["Heartbeat"]
                await until(pilot, lambda: any("1 of" in line for line in text(app)))
                await pilot.press("enter")
                assert app.place.table == "api_brokers" and app.shown[0]["requests"] == 5
                await pilot.press("escape", "escape")
                assert len(app.shown) == len(names)

                await pilot.press("question_mark")
                assert of(app, "name", "wait p99") and of(app, "name", "/") and app.place.table == "help"
                await pilot.press("question_mark")  # which changes nothing there
                await until(pilot, lambda: any("goes back" in line for line in text(app)))
                said = " ".join(row["value"] for row in app.shown)
                assert MEANINGS["wait_p99_s"] in said and all(len(row["value"]) <= WRAP for row in app.shown)
                await pilot.press("escape")
                assert app.place.table == "apis"

                await pilot.press("5")
                await until(pilot, lambda: of(app, "group", "billing").get("members") == 2)
                await pilot.press("enter")
                await until(pilot, lambda: [row["member_id"] for row in app.shown] == ["m0", "m1"])

                await pilot.press("6")
                await until(pilot, lambda: len(app.shown) == 2 and app.shown[0]["requests_pending"] == 1)
                await until(pilot, lambda: any("[red]evil" in line for line in text(app)))
                shown = "\n".join(text(app))
                assert "\x1b" not in shown and "\u202e" not in shown and "\u05d0" not in shown
                assert {len(line) for line in text(app)} == {80}
                await pilot.press("enter")
                await until(pilot, lambda: [row["correlation_id"] for row in app.shown] == [77])
                await pilot.press("enter")
                assert of(app, "value", "Metadata")["name"] == "api"
                assert app.place.table == "details"
                await until(pilot, lambda: any("[red]evil" in line for line in text(app)))
                await pilot.press("escape", "escape", "escape")
                assert app.place.table == "connections"

                await pilot.press("1", "p")
                await until(pilot, lambda: any("paused" in line for line in text(app)))
                before = of(app, "api", "Heartbeat")
                await heartbeats(*pairs[1], 3, 0)
                await pilot.pause(0.5)  # some questions' time
                assert of(app, "api", "Heartbeat") == before
                await pilot.press("p")
                await until(pilot, lambda: of(app, "api", "Heartbeat").get("requests") == 8)

                await pilot.press("8")
                await until(pilot, lambda: of(app, "error", "REBALANCE_IN_PROGRESS").get("answers") == 5)
                for key in "23479":
                    await pilot.press(key)
                    await pilot.pause(0.05)
                await pilot.resize_terminal(40, 10)
                await pilot.press("6")
                await until(pilot, lambda: len(app.shown) == 2)

    live(test(), PATIENCE_S)


@pytest.mark.ring2
def test_a_kproxy_that_stops_answering_is_asked_again():
    async def test():
        port = free_ports(6)
        admin = f"{HOST}:{port + 5}"
        app = Top(Source(AdminPort(admin, timeout_s=5)), interval_s=0.2)
        async with app.run_test(size=(120, 24)) as pilot:
            await until(pilot, lambda: any("nobody listens there" in line for line in text(app)))
            for restarts in range(2):
                async with kproxy(port=port, admin=admin) as here:
                    client, broker = await here.connect()
                    await heartbeats(client, broker, 2 + restarts, 0)
                    wanted = 2 + restarts
                    await until(pilot, lambda wanted=wanted: of(app, "api", "Heartbeat").get("requests") == wanted)
                    assert app._source.restarts == restarts
                    client.close()
                await until(pilot, lambda: any("asking again" in line for line in text(app)))
                assert of(app, "api", "Heartbeat")["requests"] == 2 + restarts  # the last that is known

    live(test(), PATIENCE_S)
