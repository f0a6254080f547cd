"""Exchanges that are counted by column give the cells that their events give."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy.metrics import Metrics
from kproxy.metrics.columns import count
from kproxy.wire.events import ANSWERED, NONE, Exchange
from kproxy.wire.interest import Interest
from kproxy.wire.offline.bulk import NULL, Bulk
from tests.metrics.test_metrics import info

FETCH_12 = Interest().plan(1 << 16 | 12)
TIMES = st.integers(0, 700 * 10**9)

exchanges = st.lists(
    st.tuples(
        st.integers(0, 2),  # its connection
        st.integers(14, 200 << 20),
        st.integers(14, 200 << 20),
        TIMES,
        st.one_of(st.just(0), TIMES),
        st.one_of(st.just(0), TIMES),
        st.one_of(st.just(NONE), st.integers(0, 40_000)),
        st.sampled_from([NULL, 0, 6, 29]),
        st.sampled_from([None, 0, 500]),
    ),
    min_size=1,
    max_size=30,
)


def cells(metrics):
    found = {}
    for broker in metrics.cluster("default").brokers.values():
        for name, api in broker.apis.items():
            plain = {slot: getattr(api, slot) for slot in type(api).__slots__}
            found[broker.broker, name] = plain, broker.queue, broker.queue_ns, broker.mute, broker.mute_ns
    return found


def connections(metrics):
    return [metrics.connection(info(), "watch", broker) for broker in ("1", "2", "2")]


@settings(max_examples=60)
@given(exchanges)
def test_columns_count_as_events_do(some):
    by_event, by_column = Metrics(), Metrics()
    of_events, of_columns = connections(by_event), connections(by_column)
    waits = list(dict.fromkeys(one[-1] for one in some))  # often none at all, or one of 0
    prefixes = [(None, None, wait, None, None) for wait in waits]
    columns = {name: [] for name in ("request_bytes", "response_bytes", "queue_ns", "muted_ns", "throttle_ms")}
    columns |= {name: [] for name in ("request_start", "request_end", "response_start", "response_end", "error_code")}
    for connection, request, response, served, queue, muted, throttle, code, wait in some:
        exchange = Exchange(FETCH_12, 0, 0, 0, request, 0)
        exchange.request_end, exchange.response_start = served % 7, served + queue + muted + served % 7
        exchange.response_end = exchange.response_start + request % 3 * served
        exchange.response_bytes, exchange.queue_ns, exchange.muted_ns = response, queue, muted
        exchange.throttle_ms, exchange.max_wait_ms, exchange.outcome = throttle, wait, ANSWERED
        exchange.errors = (code,) if code not in (0, NULL) else ()
        of_events[connection].events([exchange])
        for name in columns:
            columns[name].append(code if name == "error_code" else getattr(exchange, name))
    bulk = Bulk(
        FETCH_12,
        np.array([each[0] for each in some]),
        np.array([waits.index(each[8]) for each in some]),
        prefixes,
        {name: np.array(column, np.int64) for name, column in columns.items()},
        None,
        None,
    )
    count(of_columns, bulk)
    assert cells(by_column) == cells(by_event)


def test_what_belongs_to_no_connection_is_left_out():
    metrics = Metrics()
    (connection, *_) = connections(metrics)
    ones = np.ones(2, np.int64)
    columns = dict.fromkeys(
        (
            *("request_bytes", "response_bytes", "queue_ns", "muted_ns", "throttle_ms"),
            *("request_start", "request_end", "response_start", "response_end"),
        ),
        ones,
    )
    bulk = Bulk(
        FETCH_12, np.array([0, 1]), np.zeros(2, int), [(None,) * 5], columns | {"error_code": ones * 0}, None, None
    )
    count([None, connection], bulk)
    assert metrics.cluster("default").brokers["1"].apis["Fetch", "12"].requests == 1
    connection.move("7")
    count([None, connection], bulk)
    brokers = metrics.cluster("default").brokers
    assert brokers["7"].apis["Fetch", "12"].requests == 1
    assert (brokers["1"].open["watch"], brokers["7"].open["watch"], brokers["1"].accepted["watch"]) == (0, 1, 1)
