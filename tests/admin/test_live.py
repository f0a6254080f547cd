"""GET /api/live on a kproxy with connections through it."""

import asyncio
import json

from kproxy.admin import live as asked_live
from kproxy.metrics import Metrics, figures
from kproxy.protocol.apis import HEARTBEAT
from tests.admin.test_operator import asked, operated
from tests.metrics.counters.test_slow import FETCH, MS, PRODUCE, exchange
from tests.metrics.test_figures import connected
from tests.proxy.live import live as running
from tests.proxy.live import request, response


async def heartbeats(here, count):
    client, broker = await here.connect()
    for number in range(count):
        await client.send(request(HEARTBEAT, 4, number))
        await broker.frame()
        await broker.send(response(HEARTBEAT, 4, number, {"errorCode": 27}))
        await client.frame()
    return client


def of_heartbeats(answer):
    return [row[3:] for row in answer["totals"] if row[2] == "Heartbeat"]


def test_the_first_answer_has_all_counts_and_later_ones_only_changes(monkeypatch):
    monkeypatch.setattr(figures, "STEP_S", 0.05)
    monkeypatch.setattr(asked_live, "LEAST_S", 0.0)
    monkeypatch.setattr(asked_live, "SHARE", 0)

    async def test():
        async with operated() as (here, http):
            client = await heartbeats(here, 3)
            first = await asked(http, "/api/live")
            ((requests, errors, *_),) = of_heartbeats(first)
            assert (requests, errors) == (3, 3)
            assert [row[2:] for row in first["errors"] if row[2] == "Heartbeat"] == [
                ["Heartbeat", "REBALANCE_IN_PROGRESS", 3]
            ]
            assert first["state"]["ready"] and first["state"]["connections"] == 1
            while not (answer := await asked(http, "/api/live"))["samples"]:  # noqa: ASYNC110 (asked over HTTP)
                await asyncio.sleep(0.02)
            seen = answer["samples"][-1]["n"]
            names = len(answer["series"])
            later = await asked(http, "/api/live", after=seen, series=names, groups=1)
            assert all(sample["n"] > seen for sample in later["samples"])
            assert (later["first_series"], later["series"]) == (names, [])
            # A client with a higher sample number saw a former process: it gets everything again.
            again = await asked(http, "/api/live", after=1_000_000, series=500, groups=7)
            assert again["first_series"] == 0 and again["samples"][0]["n"] == 1
            added = sum(row[1] for sample in again["samples"] for row in sample["s"])
            assert added <= sum(row[3] for row in again["totals"])
            client.close()
            for parameters in ({"after": "-1"}, {"series": "x"}, {"groups": "99999"}, {"slow_after": "1e9"}):
                async with http.get("/api/live", params=parameters) as refused:
                    assert refused.status == 400 and "is not a number" in await refused.text()

    running(test())


def test_slow_exchanges_are_named_once_each():
    metrics = Metrics()
    connection = connected(metrics)
    connection.events([exchange(PRODUCE, 40 * MS, correlation_id=8)])

    async def test():
        answers = asked_live.Live(gathering(metrics), dict, with_history=False)
        first = json.loads(await answers.answer({}))
        (row,) = first["slow"]
        named = dict(zip(first["slow_columns"], row, strict=True))
        assert (named["api"], named["correlation_id"], named["broker_s"], named["client_id"]) == (
            *("Produce", 8, 0.04, "shop"),
        )
        assert json.loads(await answers.answer({"slow_after": str(named["at_us"])}))["slow"] == []
        assert "samples" not in first

    asyncio.run(test())


def gathering(metrics, asked=None):
    async def gather(with_lags):
        if asked is not None:
            asked.append(with_lags)
        return metrics

    return gather


def test_clients_share_one_answer_and_a_costly_one_is_reused_for_longer():
    gathered = []
    metrics = Metrics()
    connected(metrics).events([exchange(PRODUCE, MS)])

    async def test():
        answers = asked_live.Live(gathering(metrics, gathered), dict, with_history=True)
        await asyncio.gather(*(answers.answer({}) for _ in range(20)))
        assert len(gathered) == 1
        assert answers.interval_s >= asked_live.LEAST_S
        answers._cost_s = 0.05  # seconds of a core
        assert answers.interval_s == 5.0
        answers._cost_s = 60.0
        assert answers.interval_s == asked_live.LONGEST_S

    asyncio.run(test())


def test_a_fault_while_counting_costs_a_sample_and_not_the_history(monkeypatch, caplog):
    monkeypatch.setattr(figures, "STEP_S", 0.01)
    monkeypatch.setattr(asked_live, "SHARE", 0)
    metrics, faults = Metrics(), [OSError("a worker has ended")]
    connection = connected(metrics)

    async def gather(_):
        if faults and answers._history.last:
            raise faults.pop()
        connection.events([exchange(PRODUCE, MS)])
        return metrics

    answers = asked_live.Live(gather, dict, with_history=True)

    async def test():
        sampling = asyncio.create_task(answers.run())
        while faults or answers._history.last < 4:  # noqa: ASYNC110 (there is no event for a sample)
            await asyncio.sleep(0.01)
        sampling.cancel()

    running(test())
    assert [json.loads(text)["s"][0][1] for _, text in answers._history.samples][:3] == [1, 1, 1]
    assert "no sample for the history" in caplog.text


def test_totals_beyond_the_limit_of_an_answer_are_summed(monkeypatch):
    monkeypatch.setattr(asked_live, "LEAST_S", 0.0)
    monkeypatch.setattr(asked_live, "SHARE", 0)
    metrics = Metrics()
    for number in range(150):
        connected(metrics, broker=str(number)).events([exchange(PRODUCE, MS)] * 2)

    async def test():
        answers = asked_live.Live(gathering(metrics), dict, with_history=False)
        whole = json.loads(await answers.answer({}))
        assert len(whole["totals"]) == 150 and "apis" not in whole
        for number in range(150):
            connected(metrics, broker=str(number)).events([exchange(FETCH, MS)])
        cut = json.loads(await answers.answer({}))
        assert len(cut["totals"]) == asked_live.MAX_TOTALS
        assert [row[:4] for row in cut["apis"]] == [["demo", "", "Produce", 300], ["demo", "", "Fetch", 150]]
        assert [row[10 - 1][1] for row in cut["apis"]] == [300, 150]
        assert len(cut["of_brokers"]) == 150 and {tuple(row[2:4]) for row in cut["of_brokers"]} == {("", 3)}
        metrics.clusters.clear()
        assert "apis" not in json.loads(await answers.answer({}))

    asyncio.run(test())
