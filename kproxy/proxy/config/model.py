"""The base class of every table of settings. The modules of features import it, and `settings.py` imports those.

Refuses to know any setting.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Frozen(BaseModel):
    """An immutable table of settings; an unknown key is a fault."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_true(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number, since pydantic, like Python, accepts it as 1."""
        if isinstance(value, bool) and {int, float} & set(_plain(cls.model_fields[str(info.field_name)].annotation)):
            raise ValueError(f"{str(value).lower()} is not a number")
        return value


def _plain(annotation: Any) -> Iterator[Any]:
    """Yield the types that a field's annotation consists of."""
    parts = get_args(annotation)
    yield from (one for part in parts for one in _plain(part)) if parts else (annotation,)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field of that type, or of its elements; None if the field has plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_in(part)) is not None), None)
