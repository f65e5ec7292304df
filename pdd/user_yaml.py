"""YAML files that users write: read whole or refused, with lines that name the file, the field and what is wrong. Knows no schema."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError


class _Loader(yaml.SafeLoader):
    """YAML forbids a key that is given twice in one mapping; the library keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(what: str, path: Path) -> object:
    """``what``: the file is, in errors: ValueError, one line, when it cannot be read, is not YAML, or has a key twice."""
    try:
        loader = _Loader(path.read_text(encoding="utf-8"))
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{what} {path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ValueError(f"{what} {path}: nested too deep") from error


def mistakes(error: ValidationError) -> list[str]:
    """A line for each: its field, what is wrong, the value given."""
    return [_line(one["loc"], _message(one["type"], one["msg"], one.get("ctx", {})), one.get("input")) for one in error.errors()]


def _message(kind: str, message: str, context: dict[str, object]) -> str:
    if kind == "union_tag_not_found":
        return f"field {context['discriminator']} is needed"
    if kind == "union_tag_invalid":
        return f"{str(context['discriminator']).strip(chr(39))}: given {context['tag']!r}, allowed {context['expected_tags']}"
    if kind == "tuple_type":
        return "a list is expected"
    return message.removeprefix("Value error, ")


def _line(loc: tuple[int | str, ...], message: str, given: object) -> str:
    where = ".".join(str(part) for part in loc) or "top level"
    shown = "" if isinstance(given, dict | list | BaseModel) else f" (given {given!r})"
    return f"{where}: {message}{shown}"
