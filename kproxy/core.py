"""The compiled core (`native/`), if it is installed, or if Python alone was chosen nothing."""

import os
from importlib import import_module
from types import ModuleType

from kproxy.errors import ConfigError

CHOICE = "KPROXY_CORE"  # the variable that chooses the implementation
INTERFACE = 3  # of the core that this kproxy uses, as in native/src/lib.rs
AUTO, NATIVE, PYTHON = "auto", "native", "python"  # auto: the compiled core if it is installed


def native() -> ModuleType | None:
    """Return the compiled core, None for Python alone.

    Raises ConfigError if it is asked for and not installed, or of another version of kproxy.
    """
    choice = os.environ.get(CHOICE, AUTO)
    if choice == PYTHON:
        return None
    if choice not in (AUTO, NATIVE):
        raise ConfigError([(CHOICE, f"it is {choice!r}, and can be {AUTO}, {NATIVE} or {PYTHON}")])
    try:
        core = import_module("kproxy_core")
    except ImportError as fault:
        if choice == AUTO and isinstance(fault, ModuleNotFoundError):
            return None
        raise _unusable(f"cannot be loaded: {fault}") from None
    if getattr(core, "INTERFACE", 0) != INTERFACE:
        raise _unusable("is of another version of kproxy")
    return core


def _unusable(why: str) -> ConfigError:
    text = f"the compiled core {why}; pip install ./native builds it, {CHOICE}={PYTHON} does without it"
    return ConfigError([(CHOICE, text)])
