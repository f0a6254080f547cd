"""The compiled core is used if it fits; else the error says what to do."""

import re
import sys
from importlib import import_module

import pytest

from kproxy import core
from kproxy.errors import ConfigError
from tests.native import needs_core


@pytest.mark.parametrize(
    ("choice", "message"),
    [("rust", "it is 'rust', and can be auto, native or python"), ("native", "pip install ./native")],
)
def test_an_unavailable_core_is_reported(choice: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(core.CHOICE, choice)
    monkeypatch.setitem(sys.modules, "kproxy_core", None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        core.native()


@needs_core
def test_a_core_of_another_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("kproxy_core"), "INTERFACE", core.INTERFACE + 1)
    with pytest.raises(ConfigError, match=r"the compiled core is of another version of kproxy; pip install \./native"):
        core.native()
