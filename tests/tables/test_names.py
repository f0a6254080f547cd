"""Names of topics and brokers from responses, filled into rows that have only an id or an address."""

import json
from uuid import UUID

import pyarrow as pa
import pytest

from kproxy.tables.names import Names
from kproxy.tables.partitions import topic_id
from kproxy.wire.bodies import Found

TOPIC, OTHER = UUID("0123456789abcdef0123456789abcdef"), UUID(int=7)


def learnt(*facts):
    names = Names()
    for fact in facts:
        found = Found()
        found.note_name(*fact) if isinstance(fact[0], UUID) else found.note_broker(*fact)
        names.learn(found)
    return names


def test_the_order_of_facts_does_not_change_a_topics_name():
    rows = pa.table({"topic": pa.array([None, "known", None]), "topic_id": [topic_id(TOPIC), topic_id(TOPIC), "else"]})
    for order in (("orders", "invoices"), ("invoices", "orders")):
        names = learnt(*((TOPIC, name) for name in order))
        filled = names.fill(rows)
        assert filled["topic"].to_pylist() == ["invoices", "known", None]
        assert filled.schema.equals(rows.schema)


def test_without_facts_nothing_changes():
    rows = pa.table({"topic": pa.array([None], pa.string()), "topic_id": [topic_id(TOPIC)]})
    names = Names()
    names.learn(None)
    assert not names and names.fill(rows) is rows
    assert not learnt((-1, "10.0.0.1", 9092), (4, "kafka-4.example", 9092), (5, "", 9092), (6, "10.0.0.300", 1))


@pytest.mark.parametrize("turn", (1, -1))
def test_an_address_is_the_broker_that_advertises_it_unless_two_do(turn):
    facts = [(1, "10.0.0.1", 9092), (2, "fd00:0::2", 9092), (3, "10.0.0.3", 9092), (4, "10.0.0.3", 9092)]
    facts += [(1, "10.0.0.1", 9092), (3, "10.0.0.3", 9092)]
    ends = [("10.0.0.1", 9092), ("10.0.0.1", 9093), ("fd00::2", 9092), ("10.0.0.3", 9092), ("10.0.0.1", 9092)]
    known = pa.array([None, None, None, None, 77], pa.int32())
    addresses, ports = zip(*ends, strict=True)
    rows = pa.table({"broker_address": addresses, "broker_port": pa.array(ports, pa.int32()), "broker_id": known})
    filled = learnt(*facts[::turn]).fill(rows)
    assert filled["broker_id"].to_pylist() == [1, None, 2, None, 77]
    assert filled.schema.equals(rows.schema)


def test_facts_of_several_processes_equal_those_of_one():
    facts = [(TOPIC, "b"), (TOPIC, "a"), (OTHER, "c"), (1, "10.0.0.1", 1), (2, "10.0.0.1", 1), (2, "10.0.0.2", 1)]
    together = Names()
    for fact in facts:
        together.add(json.loads(json.dumps(learnt(fact).as_json())))
    whole = learnt(*facts)
    assert together.as_json() == whole.as_json()
    assert len(whole) == 4
