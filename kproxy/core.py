"""The compiled core (`native/`), if it is installed, or if Python alone was chosen nothing."""

import os
from importlib import import_module
from types import ModuleType

from kproxy.errors import ConfigError

CHOICE = "KPROXY_CORE"  # the variable that chooses the implementation
AUTO, NATIVE, PYTHON = "auto", "native", "python"  # auto: the compiled core if it is installed


def native() -> ModuleType | None:
    """Return the compiled core, None for Python alone. Raises ConfigError if it is asked for and not installed."""
    choice = os.environ.get(CHOICE, AUTO)
    if choice == PYTHON:
        return None
    if choice not in (AUTO, NATIVE):
        raise ConfigError([(CHOICE, f"it is {choice!r}, and can be {AUTO}, {NATIVE} or {PYTHON}")])
    try:
        return import_module("kproxy_core")
    except ImportError as fault:
        if choice == AUTO and isinstance(fault, ModuleNotFoundError):
            return None
        text = f"the compiled core cannot be loaded: {fault}; pip install ./native builds it, {PYTHON} does without it"
        raise ConfigError([(CHOICE, text)]) from None
