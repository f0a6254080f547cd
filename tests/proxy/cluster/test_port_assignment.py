"""A node id has one port, no two have the same, and a port passes on only from an id that is gone."""

from hypothesis import given
from hypothesis import strategies as st

from kproxy.proxy.cluster.port_assignment import ABSENT_S, RETRY_S, Given, Held, PortAssignment

LARGE = 1_840_211_337
IDS = st.sampled_from([0, 3, 7, 1001, LARGE, LARGE + 1, 2**31 - 1])


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def begun(count, clock=None, first=9201):
    assignment = PortAssignment(range(first, first + count), clock=clock or Clock())
    assignment.answered(())
    return assignment


STEPS = st.lists(
    st.tuples(st.just("named"), IDS)
    | st.tuples(st.just("answered"), st.sets(IDS))
    | st.tuples(st.just("passes"), st.sampled_from([1.0, ABSENT_S / 2, ABSENT_S]))
    | st.tuples(st.just("busy"), st.sets(IDS))
    | st.tuples(st.just("restart"), st.none()),
    max_size=60,
)


@given(st.integers(1, 8), STEPS)
def test_no_two_ids_have_one_port_and_it_passes_on_only_from_one_that_is_gone(count, steps):
    clock = Clock()
    assignment = begun(count, clock)
    lacked = {}  # node id -> since when no answer has named it and a complete one has lacked it
    busy = set()

    def name(node_id):
        lacked.pop(node_id, None)
        before = dict(assignment.ports)
        if node_id in before:
            assignment.named(node_id)
            assert assignment.ports == before
            return
        given = assignment.give(node_id, lambda: busy)
        passing = {
            each for each in before if each in lacked and clock.now - lacked[each] >= ABSENT_S and each not in busy
        }
        if given is None:
            assert assignment.ports == before and len(before) == count
            return
        assert assignment.ports[node_id] == given.port
        if len(before) < count:
            assert given.former is None
            assert given.port == min(set(assignment.range) - set(before.values()))
            assert assignment.ports == before | {node_id: given.port}
        else:
            assert given.former in passing and given.port == before[given.former]
            assert lacked[given.former] == min(lacked[each] for each in passing)
            del before[given.former]
            assert assignment.ports == before | {node_id: given.port}

    for step, value in steps:
        if step == "named":
            name(value)
        elif step == "answered":
            assignment.answered(value)
            for each in assignment.ports:
                if each not in value:
                    lacked.setdefault(each, clock.now)
            for each in sorted(value):
                name(each)
        elif step == "passes":
            clock.now += value
        elif step == "busy":
            busy = value
        else:
            held = assignment.held()
            assignment = begun(count, clock)
            assignment.restore(held)
            assert assignment.held() == held
        clock.now += RETRY_S
        ports = list(assignment.ports.values())
        assert len(set(ports)) == len(ports) <= count
        assert set(ports) <= set(assignment.range)
        assert assignment.absent.keys() <= assignment.ports.keys()


def test_no_port_is_assigned_before_the_first_complete_answer():
    assignment = PortAssignment(range(9201, 9204))
    assert assignment.give(LARGE, tuple) is None
    assignment.answered([LARGE])
    assert assignment.give(LARGE, tuple) == (9201, None, 0.0)


def test_ids_with_ports_outside_a_changed_range_get_new_ports():
    assignment = begun(2, first=9202)
    assignment.restore({1: Held(9201, 5.0), 2: Held(9202, 5.0), 3: Held(9203), 4: Held(9203, 5.0)})
    assert assignment.ports == {2: 9202, 3: 9203}
    assert assignment.absent.keys() == {2}


def test_connections_are_counted_once_a_second_at_most_while_no_port_is_left():
    clock, counts = Clock(), []

    def busy():
        counts.append(clock.now)
        return {1}

    assignment = begun(1, clock)
    assert assignment.give(1, busy)
    assignment.answered([2])
    assert assignment.give(2, busy) is None  # absent for too short a time to count anything
    clock.now += ABSENT_S
    for _ in range(1000):
        assert assignment.give(2, busy) is None
    assert counts == [clock.now]
    clock.now += RETRY_S
    assert assignment.give(2, tuple) == (9201, 1, ABSENT_S + RETRY_S)


def test_in_a_smaller_range_brokers_that_are_named_come_before_absent_ones() -> None:
    """The longest absent give up their ports, as many as are lacking, even if they are absent for a short time."""
    held = {1001: Held(9201, 3.0), 1002: Held(9202, 5.0), 7: Held(9203), 9: Held(9204), 5: Held(9205)}
    assignment = PortAssignment(range(9201, 9204), lambda node_id: node_id == 5)
    assignment.restore(held)
    assert assignment.ports == {1001: 9201, 7: 9203} and assignment.absent.keys() == {1001}
    assignment.answered({5, 7, 9})
    assert assignment.give(9, tuple) == Given(9202)
    tiny = PortAssignment(range(9201, 9202))
    tiny.restore(held)  # more are lacking than there are ports
    assert tiny.ports == {} and not tiny.absent
    unchanged = PortAssignment(range(9201, 9206))
    unchanged.restore(held)
    assert unchanged.ports == {node_id: each.port for node_id, each in held.items()}
