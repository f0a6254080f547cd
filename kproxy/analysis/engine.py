"""The functions that jobs are written in, those of PySpark, imported when a job first runs.

Duty: let the commands of `kproxy spark`, their options and their help be read without pyspark, whose import takes a
second where it is installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Window
    from pyspark.sql import functions as F
else:

    class _Lazy:
        """Stands for an object of a module until it is used."""

        def __init__(self, module: str, name: str | None = None) -> None:
            self._module, self._name = module, name

        def __getattr__(self, attribute: str) -> Any:
            found = importlib.import_module(self._module)
            return getattr(found if self._name is None else getattr(found, self._name), attribute)

    F = _Lazy("pyspark.sql.functions")
    Window = _Lazy("pyspark.sql", "Window")

__all__ = ["F", "Window"]
