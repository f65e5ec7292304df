"""The base of every section of a launch config: unknown fields are refused, values do not change, infinity and truth are no numbers."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Final, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

_NUMBERS: Final = frozenset({int, float, NoneType})


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_one(cls, given: object) -> object:
        """``threads: yes`` would be one thread."""
        if isinstance(given, dict):
            for name, field in cls.model_fields.items():
                if isinstance(given.get(name), bool) and _is_number(field.annotation):
                    raise ValueError(f"{name}: given {given[name]}, a number is expected")
        return given


def _is_number(annotation: object) -> bool:
    """Whether nothing but a number, or none, may stand there."""
    if get_origin(annotation) is Annotated:
        return _is_number(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return all(_is_number(part) for part in get_args(annotation))
    return annotation in _NUMBERS
