"""Recipes by name, from files and from mappings; one may extend another. The built-in ones lie in ``recipes/``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plansmith_errors import ConfigError
from quantize.recipe import Recipe
from quantize.yaml_model import read_yaml, validate

_DIRECTORY = Path(__file__).parent / "recipes"
_SUFFIXES = (".yaml", ".yml")
_RULES = ("linears", "embeddings", "lm_head")

RecipeSource = str | Mapping[str, Any]
"""A built-in name, the path of a YAML file, or the content of one."""


def list_recipes() -> list[str]:
    """Names of the built-in recipes."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def load_recipe(source: RecipeSource) -> Recipe:
    """The recipe, with what it extends filled in. Raises ConfigError.

    ``extends`` names another recipe. Its keys are taken over where this one is silent, section by section; a rule with
    another scheme replaces the old one whole; overrides follow those that were there, so that they win.
    """
    return validate(Recipe, _resolve(source, ()), str(_path_of(source)) if isinstance(source, str) else "recipe")


def relative_to(source: RecipeSource, folder: Path) -> str | dict[str, Any]:
    """``source`` with the paths in it taken from ``folder``; absolute ones stay."""
    if isinstance(source, str):
        return str(folder / source) if source.endswith(_SUFFIXES) else source
    data = dict(source)
    if isinstance(data.get("extends"), str):
        data["extends"] = relative_to(data["extends"], folder)
    calibration = data.get("calibration")
    if isinstance(calibration, Mapping) and isinstance(calibration.get("text"), str):
        data["calibration"] = {**calibration, "text": str(folder / calibration["text"])}
    return data


def _resolve(source: RecipeSource, seen: tuple[str, ...]) -> Any:
    """The data of a recipe without ``extends``; ``seen``: the files that extend it."""
    if isinstance(source, str):
        path = _path_of(source)
        if str(path) in seen:
            raise ConfigError(f"{path}: extends itself, by way of {', '.join(seen)}; one of them must stand alone")
        seen = (*seen, str(path))
        data = read_yaml(path)
        data = relative_to(data, path.parent) if isinstance(data, dict) else data
    else:
        data = dict(source) if "extends" in source else {"name": "custom", **source}
    if not isinstance(data, dict) or "extends" not in data:
        return data
    base = data.pop("extends")
    if not isinstance(base, str):
        raise ConfigError(f"{seen[-1] if seen else 'recipe'}: extends is {base!r}, expected a recipe's name or file")
    return _merge(_resolve(base, seen), data)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {**base, **changes}
    for key in (*_RULES, "calibration"):
        old, new = base.get(key), changes.get(key)
        if (
            isinstance(old, dict)
            and isinstance(new, dict)
            and new.get("scheme", old.get("scheme")) == old.get("scheme")
        ):
            merged[key] = {**old, **new}
    old, new = base.get("overrides"), changes.get("overrides")
    if isinstance(old, list) and isinstance(new, list):
        merged["overrides"] = [*old, *new]
    return merged


def _path_of(name_or_path: str) -> Path:
    if name_or_path in list_recipes():
        return _DIRECTORY / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"recipe {name_or_path!r} is unknown; {_suggest(name_or_path)}, or give a .yaml file")
    return path


def _suggest(name: str) -> str:
    near = difflib.get_close_matches(name, list_recipes(), n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(list_recipes())}"
