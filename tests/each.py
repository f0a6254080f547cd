"""Many cases in one test: as `pytest.mark.parametrize`, for cases that take less time than an item of pytest does."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test for each case; a failure names the case, and ends the test.

    names: of one argument, or of as many as each case has values.
    """
    arguments = (names,) if isinstance(names, str) else names
    all_cases = [(case,) if isinstance(names, str) else tuple(case) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            assert all_cases, "there are no cases"
            for values in all_cases:
                given = dict(zip(arguments, values, strict=True))
                try:
                    test(**given, **fixtures)
                except BaseException as fault:
                    fault.add_note(f"case: {', '.join(f'{name}={value!r:.200}' for name, value in given.items())}")
                    raise

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
