"""The base of every table of settings; below the modules of the features, which `settings.py` puts together.

Refuses to know any setting.
"""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Frozen(BaseModel):
    """A table of settings: an unknown key is a fault, and nothing changes it once it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_true(cls, value: Any, info: ValidationInfo) -> Any:
        """For pydantic, as for Python, `true` is 1."""
        if isinstance(value, bool) and {int, float} & set(_plain(cls.model_fields[str(info.field_name)].annotation)):
            raise ValueError(f"{str(value).lower()} is not a number")
        return value


def _plain(annotation: Any) -> Iterator[Any]:
    """The types that a field's annotation is made of."""
    parts = get_args(annotation)
    yield from (one for part in parts for one in _plain(part)) if parts else (annotation,)


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field of that type holds, or holds several of; None: it holds plain values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := model_in(part)) is not None), None)
