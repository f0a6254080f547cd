"""What every table of the settings is made from; below the modules of the features, which `settings.py` puts together.

Refuses to know any setting.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """A table of settings: an unknown key is a fault, and nothing changes it once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field of that type holds, or holds several of; None: it holds plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_in(part)) is not None), None)
