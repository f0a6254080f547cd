"""What tests of the compiled core share. Where no compiler is, `./dev test` says so and these tests are skipped."""

from importlib.util import find_spec

import pytest

from kproxy import core
from kproxy.proxy.relay import compiled

needs_core = pytest.mark.skipif(
    find_spec("kproxy_core") is None, reason="the compiled core is not built: ./dev core builds it with cargo"
)


def lend_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core relay each connection from its first read on, and again after each frame that it gives back."""
    monkeypatch.setenv(core.CHOICE, core.NATIVE)
    monkeypatch.setattr(compiled, "FEW_READS", 1)
    monkeypatch.setattr(compiled, "MOST_READS", 1)


reads_by_core = pytest.mark.skipif(
    core.native() is None, reason="Python alone reads captures: it has no columns whose share could be compared"
)
