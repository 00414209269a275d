"""Read values from files, environment variables and flags, and check them against the fields of the configuration."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferengine.errors import ConfigError

ENVIRONMENT_PREFIX = "INFERENGINE_"

logger = logging.getLogger(__name__)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file. Raises ConfigError for one that cannot be read."""
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except FileNotFoundError:
        raise ConfigError("--config", f"no such file: {path}") from None
    except OSError as error:
        raise ConfigError("--config", f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("--config", f"{path.name} is not valid TOML: {error}") from None


def flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """`section.key` to value. Raises ConfigError for a key outside of sections."""
    flat: dict[str, Any] = {}
    for section, values in document.items():
        if not isinstance(values, dict):
            raise ConfigError(section, "keys stand inside a [section]")
        for key, value in values.items():
            flat[f"{section}.{key}"] = value
    return flat


def from_environment(
    variables: Mapping[str, str], known: Mapping[str, Any], renamed: Mapping[str, str]
) -> dict[str, str]:
    """The variables that set a known key, old names included. Raises ConfigError for other INFERENGINE_ variables."""
    names = {variable_name(name): name for name in known}
    old_names = {variable_name(name): variable_name(new) for name, new in renamed.items()}
    found: dict[str, str] = {}
    for variable, value in variables.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        current = current_name(variable, old_names, "{}")
        if current not in names:
            raise ConfigError(variable, f"no such key{suggestion(variable, names)}")
        if current != variable and current in variables:
            raise ConfigError(variable, f"is the old name of {current}, which is set too")
        found[names[current]] = value
    return found


def variable_name(key: str) -> str:
    """The environment variable of a key: INFERENGINE_SECTION_KEY."""
    return f"{ENVIRONMENT_PREFIX}{key.replace('.', '_')}".upper()


def current_name(name: str, renamed: Mapping[str, str], shown: str) -> str:
    """The present name of a key. Logs a warning where `name` is an old one. `shown` formats names in the warning."""
    if name not in renamed:
        return name
    logger.warning(
        "%s is now %s; the old name is read for one more release", shown.format(name), shown.format(renamed[name])
    )
    return renamed[name]


def convert(name: str, item: dataclasses.Field[Any], raw: Any) -> Any:
    """The value of a key from text, or from a TOML value. Raises ConfigError naming the key."""
    value = _typed(name, str(item.type), raw)
    choices, minimum = item.metadata["choices"], item.metadata["minimum"]
    if choices and value not in choices:
        raise ConfigError(name, f"must be one of {', '.join(map(str, choices))}; got {value!r}")
    if minimum is not None and value < minimum:
        raise ConfigError(name, f"must be at least {minimum}; got {value}")
    return value


def _typed(name: str, kind: str, raw: Any) -> Any:
    if kind == "bool":
        lowered = str(raw).lower()
        if lowered in ("true", "1", "yes", "on"):
            return True
        if lowered in ("false", "0", "no", "off"):
            return False
        raise ConfigError(name, f"must be true or false; got {raw!r}")
    if kind == "str":
        if not isinstance(raw, str):
            raise ConfigError(name, f"must be text; got {raw!r}")
        return raw
    if isinstance(raw, bool):
        raise ConfigError(name, f"must be a number; got {raw!r}")
    wanted = "a whole number" if kind == "int" else "a number"
    try:
        value: int | float = float(raw) if kind != "int" or isinstance(raw, float) else int(raw)
        usable = math.isfinite(value) and (kind != "int" or value == int(value))
    except (TypeError, ValueError, OverflowError):  # the last: an integer that is too large for a float
        usable = False
    if not usable:
        raise ConfigError(name, f"must be {wanted}; got {raw!r}")
    return int(value) if kind == "int" else value


def suggestion(name: str, known: Mapping[str, Any]) -> str:
    """The end of an error message: the known name that is nearest, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
