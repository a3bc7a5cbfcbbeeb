"""YAML files into pydantic models, with errors that a user can act on.

Duplicate keys are refused (YAML keeps the last one in silence); an unknown key is answered with the nearest known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from plansmith_errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

# pydantic's own words for these speak of Python
_EXPECTED = {
    "path_type": "expected a path",
    "model_type": "expected a section of keys and values",
    "model_attributes_type": "expected a section of keys and values",
    "int_type": "expected a whole number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list, such as [1, 2]",
}


class _UniqueKeyLoader(yaml.SafeLoader):
    pass


def _construct_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Hashable, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a scalar", key_node.start_mark)
        if key in mapping:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML text; ``source`` names it in errors. Raises ConfigError with line and column."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}: {error.problem}{place}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is nested too deeply to be a build file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def read_yaml(path: Path) -> Any:
    """Read and parse a YAML file. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a UTF-8 text; expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_yaml(text, str(path))


def validate(model: type[Model], data: Any, source: str) -> Model:
    """Make a model of parsed data; every error becomes one clear line of a ConfigError."""
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{source}: expected a mapping of keys to values, found {found}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_explain(model, problem) for problem in error.errors(include_url=False)]
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise ConfigError(f"{source}: " + "; ".join(lines[:3]) + more) from None


def _explain(model: type[BaseModel], problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "top level"
    if problem["type"] == "extra_forbidden":
        known = _fields_at(model, problem["loc"][:-1])
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {where!r}; {hint}"
    if problem["type"] == "missing":
        return f"{where!r} is missing"
    message = _EXPECTED.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return f"{where!r} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _fields_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields of the model that lies at ``path``, following nested models and their containers."""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # an index of a list or a key of a mapping: stay in the model of its elements
        nested = _model_in(field.annotation)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
