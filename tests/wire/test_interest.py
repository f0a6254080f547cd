"""What all sessions together may hold: exactly so much, and who makes room for others."""

from kproxy.wire.interest import HeldBudget

SECOND = 10**9


def test_the_request_that_is_held_for_longest_makes_room_after_a_second() -> None:
    budget, gone = HeldBudget(100), []

    def give_up(session: str) -> None:
        gone.append(session)
        budget.release(60)

    assert not budget.take(101)  # nobody can make room
    budget.give_up = give_up
    budget.begin("first", 0)
    assert budget.take(60, 0, "first") and budget.take(40, 0) and budget.held_bytes == 100
    budget.release(40)
    budget.begin("second", 5)
    assert not budget.take(41, SECOND - 1, "second") and budget.held_bytes == 60
    assert not budget.take(41, SECOND, "first")  # it does not make room for itself
    assert budget.take(41, SECOND, "second") and (gone, budget.held_bytes) == (["first"], 41)
    budget.begin("third", SECOND)
    budget.end("second")
    assert not budget.take(60, 2 * SECOND - 1) and gone == ["first"]
    assert budget.take(99, 2 * SECOND) and gone == ["first", "third"]


def test_what_is_noted_has_a_limit_of_its_own_or_none() -> None:
    budget = HeldBudget(0, 10)
    assert budget.note(4) and budget.note(6) and not budget.note(1) and budget.noted_bytes == 10
    budget.forget(6)
    assert not budget.note(7) and budget.note(6) and budget.noted_bytes == 10
    assert HeldBudget(0).note(1 << 40)
