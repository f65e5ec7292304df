"""Fields of ``config.json`` or GGUF metadata by name and type. Every error is a ValueError that names the field and what was given."""

from __future__ import annotations

from collections.abc import Mapping

Fields = Mapping[str, object]


def int_field(fields: Fields, field: str, default: int | None = None) -> int:
    """The integer; ``default`` for a field that is absent or null, and an error without one."""
    value = fields.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{field}: given {value!r}, allowed: an integer")
    return value


def float_field(fields: Fields, field: str, default: float | None = None) -> float:
    """The number; ``default`` for a field that is absent or null, and an error without one."""
    value = fields.get(field)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{field}: given {value!r}, allowed: a number")
    return float(value)


def optional_float(fields: Fields, field: str, default: float | None = None) -> float | None:
    """The number, or None where null says so; ``default`` only where the field is absent."""
    if field not in fields:
        return default
    return None if fields[field] is None else float_field(fields, field)


def bool_field(fields: Fields, field: str, default: bool = False) -> bool:
    """true or false; ``default`` for a field that is absent or null."""
    value = fields.get(field)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{field}: given {value!r}, allowed: true or false")
    return value


def token_ids(fields: Fields, field: str) -> tuple[int, ...]:
    """Token ids of a field that may be absent, null, one id or a list of ids. Raises ValueError for anything else."""
    value = fields.get(field)
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"{field}: given {value!r}, allowed: a token id, a list of token ids, or null")
    return ids
