"""Globs of names: the matcher agrees with a plain evaluation of each pattern, and is as fast with many patterns."""

import random
import sys

from kproxy.proxy.filters.policy import globs
from kproxy.proxy.filters.policy.globs import Matcher, Patterns


def plain(pattern: str, name: str) -> bool:
    """A match as docs/policy.md defines it, character by character."""
    reached = {0}  # positions in the pattern: what is before them matches the name so far
    tokens: list[tuple[str, bool]] = []
    characters = iter(pattern)
    for character in characters:
        following = next(characters, "") if character == "\\" else ""
        tokens.append((following, False) if following else (character, character in "*?"))

    def with_stars(places: set[int]) -> set[int]:
        places = set(places)
        for place in sorted(places):
            while place < len(tokens) and tokens[place] == ("*", True):
                place += 1
                places.add(place)
        return places

    for character in name:
        after = set()
        for place in with_stars(reached):
            if place < len(tokens):
                token, is_wild = tokens[place]
                if is_wild and token == "*":
                    after.add(place)
                elif (is_wild and token == "?") or (not is_wild and token == character):
                    after.add(place + 1)
        reached = after
    return len(tokens) in with_stars(reached)


def test_the_matcher_agrees_with_a_plain_evaluation_of_each_pattern(monkeypatch) -> None:
    matched = compared = 0
    for seed in range(400):
        dice = random.Random(seed)
        monkeypatch.setattr(globs, "MAX_STEPS", dice.choice((3, 50, 16 * 1024)))
        patterns = ["".join(dice.choices("aab*?-\\\n", k=dice.randrange(7))) for _ in range(dice.randrange(1, 30))]
        patterns = [pattern.rstrip("\\") for pattern in patterns]
        matcher = Matcher((number // 2, pattern) for number, pattern in enumerate(patterns))
        for _ in range(40):
            name = "".join(dice.choices("aab-*?\\\nä", k=dice.randrange(8)))
            expected = 0
            for number, pattern in enumerate(patterns):
                expected |= plain(pattern, name) << number // 2
            assert matcher.ranks(name) == expected, (patterns, name)
            assert Patterns(patterns).match(name) == bool(expected)
            matched += bool(expected)
            compared += 1
    assert compared == 16_000 and matched > 4000, matched


def test_a_star_alone_matches_all_names() -> None:
    assert Patterns(["a", "**"]).is_all and not Patterns(["a*", "*?", ""]).is_all
    assert Patterns([""]).match("") and not Patterns([""]).match("a")


def test_a_character_costs_one_lookup_however_many_patterns_there_are() -> None:
    """Counted in the states that the automaton adds: names of the same form add none."""
    automaton = Matcher((number, f"*secret*{number}*x") for number in range(200))._automaton
    assert automaton is not None
    for number in range(2000):
        automaton.ranks(f"orders-{number}")
    steps = automaton._steps
    for number in range(2000, 4000):
        automaton.ranks(f"orders-{number}")
    assert automaton._steps == steps < 200


def test_the_number_of_remembered_states_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(globs, "MAX_STEPS", 100)
    automaton = Matcher([(0, "*a?????b*c"), (1, "?x*y?")])._automaton
    assert automaton is not None
    dice = random.Random(1)
    for _ in range(500):
        automaton.ranks("".join(dice.choices("abcxy", k=12)))
        assert automaton._steps <= 100 and len(automaton._known) <= 101


def test_the_bytes_of_remembered_states_are_limited_for_long_patterns(monkeypatch) -> None:
    monkeypatch.setattr(globs, "MAX_BYTES", 100_000)
    automaton = Matcher((number, f"*{number}?{'a' * 900}*b") for number in range(20))._automaton
    assert automaton is not None
    dice = random.Random(1)
    for _ in range(200):
        automaton.ranks("".join(dice.choices("a0123456789", k=50)))
        assert sum(map(sys.getsizeof, automaton._known)) < 100_000
    assert automaton._steps > 5
