"""`each`: every case is tried, and a failure says which."""

import inspect

import pytest

from tests.each import each


def test_every_case_of_every_list_is_tried_with_the_fixtures():
    seen = []

    @each("letter", "ab")
    @each(("number", "double"), [(1, 2), (3, 6)])
    def test(letter, number, double, place):
        seen.append((letter, number, double, place))

    assert list(inspect.signature(test).parameters) == ["place"]
    test(place="here")
    assert seen == [("a", 1, 2, "here"), ("a", 3, 6, "here"), ("b", 1, 2, "here"), ("b", 3, 6, "here")]


def test_a_failure_names_its_case():
    @each("number", [1, 2, 3])
    def test(number):
        assert number != 2

    with pytest.raises(AssertionError) as failed:
        test()
    assert failed.value.__notes__ == ["case: number=2"]


def test_no_case_is_a_failure():
    with pytest.raises(AssertionError, match="there are no cases"):
        each("number", [])(lambda number: None)()
