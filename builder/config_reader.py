"""Typed reading of a Hugging Face ``config.json``: every value is checked before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plansmith_errors import BuildError

_LARGEST = 2**31 - 1  # sizes are compiled into 32-bit dimensions


@dataclass(frozen=True)
class ConfigReader:
    """Reads values of ``config``; a JSON null counts as missing. Every method raises BuildError on a wrong value."""

    config: Mapping[str, Any]
    where: str = "config.json"

    def get(self, key: str) -> Any:
        return self.config.get(key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _LARGEST) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise BuildError(f"{self.where}: {key} is {value!r}; expected an integer of {minimum} to {maximum}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise BuildError(f"{self.where}: {key} is {value!r}; expected a finite number above 0")
        return float(value)

    def optional_float(self, key: str) -> float | None:
        return None if self.get(key) is None else self.positive_float(key)

    def positive_floats(self, key: str, count: int) -> tuple[float, ...]:
        """A list of ``count`` of them."""
        values = self._value(key, None)
        if not isinstance(values, list) or len(values) != count:
            found = f"a list of {len(values)}" if isinstance(values, list) else repr(values)
            raise BuildError(f"{self.where}: {key} is {found}; expected a list of {count} numbers")
        each = ConfigReader({f"{key}[{index}]": value for index, value in enumerate(values)}, self.where)
        return tuple(map(each.positive_float, each.config))

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise BuildError(f"{self.where}: {key} is {value!r}; expected true or false")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """The mapping under ``key``, or None where there is none."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise BuildError(f"{self.where}: {key} is {value!r}; expected a mapping")
        return ConfigReader(value, f"{self.where}: {key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is None:
            raise BuildError(f"{self.where}: {key} is missing; the model cannot be built without it")
        return default
