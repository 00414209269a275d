"""Read values from files, environment variables and flags, and check them against the fields of the configuration."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from inferengine.config.environment import REVISION_VARIABLE
from inferengine.errors import ConfigError

ENVIRONMENT_PREFIX = "INFERENGINE_"
MAX_WIRE_PORT = 65533  # the two after an engine's are those of its STATUS and of its KV events
FILE_NAME = re.compile(r"[\w.-]+")

logger = logging.getLogger(__name__)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError for one that cannot be read."""
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except FileNotFoundError:
        raise ConfigError("--config", f"no such file: {path}") from None
    except OSError as error:
        raise ConfigError("--config", f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError: also of bytes, and of numbers with too many digits
        raise ConfigError("--config", f"{path.name} is not valid TOML: {error}") from None


def flatten(document: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a parsed TOML file to `section.key` → value. Raises ConfigError for a key outside of sections."""
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
    """Return the variables that set a known key, old names included. Raises ConfigError for other INFERENGINE_
    variables."""
    names = {variable_name(name): name for name in known}
    old_names = {variable_name(name): variable_name(new) for name, new in renamed.items()}
    found: dict[str, str] = {}
    for variable, value in variables.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == REVISION_VARIABLE:
            continue
        current = current_name(variable, old_names, "{}")
        if current not in names:
            raise ConfigError(variable, f"no such key{variable_suggestion(variable, names)}")
        if current != variable and current in variables:
            raise ConfigError(variable, f"is the old name of {current}, which is set too")
        found[names[current]] = value
    return found


def variable_name(key: str) -> str:
    """Return the environment variable of a key: INFERENGINE_SECTION_KEY."""
    return f"{ENVIRONMENT_PREFIX}{key.replace('.', '_')}".upper()


def current_name(name: str, renamed: Mapping[str, str], shown: str) -> str:
    """Return the present name of a key. Logs a warning where `name` is an old one. `shown` formats names in the
    warning."""
    if name not in renamed:
        return name
    logger.warning(
        "%s is now %s; the old name is read for one more release", shown.format(name), shown.format(renamed[name])
    )
    return renamed[name]


def convert(name: str, item: dataclasses.Field[Any], raw: Any) -> Any:
    """Convert text, or a TOML value, to the value of a key. Raises ConfigError naming the key."""
    value = _typed(name, str(item.type), raw)
    choices, minimum, maximum = (item.metadata[name] for name in ("choices", "minimum", "maximum"))
    if choices and value not in choices:
        raise ConfigError(name, f"must be one of {', '.join(map(str, choices))}; got {value!r}")
    if minimum is not None and value < minimum:
        raise ConfigError(name, f"must be at least {minimum}; got {value}")
    if maximum is not None and value > maximum:
        raise ConfigError(name, f"must be at most {maximum}; got {value}")
    if item.metadata["is_file_name"] and not FILE_NAME.fullmatch(value):
        raise ConfigError(name, f"must have letters, digits, _, - and . only: files are named by it; got {value!r}")
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


def check_address(key: str, address: str) -> None:
    """Raise ConfigError naming `key` for what cannot be an engine's address."""
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= MAX_WIRE_PORT:
            raise ConfigError(
                key, f"must be tcp://HOST:PORT with a port from 1 to {MAX_WIRE_PORT}; got {address[:200]!r}"
            )
    elif not address.startswith(("ipc://", "inproc://")):
        raise ConfigError(key, f"must begin with ipc:// or tcp://; got {address[:200]!r}")


def allowed(item: dataclasses.Field[Any]) -> str:
    """Return what a key takes, in words: `one of auto, cpu, cuda`, `a whole number, at least 1`; empty for any text."""
    choices, minimum, maximum = (item.metadata[name] for name in ("choices", "minimum", "maximum"))
    if choices:
        return f"one of {', '.join(map(str, choices))}"
    kind = {"bool": "true or false", "int": "a whole number", "float": "a number"}.get(str(item.type), "")
    bounds = [f"at least {minimum:g}"] if minimum is not None else []
    bounds += [f"at most {maximum:g}"] if maximum is not None else []
    return ", ".join([kind, *bounds])


# Flags of other engines' command lines → keys of the same meaning (docs/configuration.md).
FOREIGN_KEYS = {
    "api_keys": "auth.keys_file",
    "api_key": "auth.keys_file",
    "batch_size": "engine.max_num_batched_tokens",
    "chunked_prefill_size": "scheduler.prefill_chunk",
    "context_length": "model.max_model_len",
    "ctx_size": "model.max_model_len",
    "data_parallel_size": "up.engines",
    "disable_radix_cache": "cache.prefix_caching",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "enable_lora": "model.adapters",
    "enable_prefix_caching": "cache.prefix_caching",
    "enforce_eager": "engine.cuda_graphs",
    "gpu_memory_utilization": "cache.memory_fraction",
    "kv_cache_dtype": "cache.dtype",
    "lora_modules": "model.adapters",
    "max_running_requests": "engine.max_num_seqs",
    "mem_fraction_static": "cache.memory_fraction",
    "num_speculative_tokens": "speculation.max_drafts",
    "schedule_policy": "scheduler.policy",
    "scheduling_policy": "scheduler.policy",
    "served_model_name": "model.served_name",
    "speculative_model": "speculation.draft_model",
    "ssl_certfile": "http.tls_certificate",
    "ssl_keyfile": "http.tls_key",
    "swap_space": "cache.swap_gib",
    "tensor_parallel_size": "engine.tensor_parallel",
    "tool_call_parser": "http.tool_parser",
    "uvicorn_log_level": "log.level",
}
NEAR = 0.74  # difflib's ratio above which a name counts as misspelt


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that `name` may have meant: of the same last part, another engine's flag, or misspelt.

    None where nothing is alike: a bad suggestion is worse than none. Dashes count as underscores.
    """
    known = list(known)
    plain = name.strip("-").replace("-", "_").lower()
    section, _, key = plain.rpartition(".")
    if same := [each for each in known if each == plain or each.rpartition(".")[2] == key]:
        return same
    if FOREIGN_KEYS.get(key) in known:
        return [FOREIGN_KEYS[key]]
    ratios: dict[str, float] = {}
    for each in known:
        other_section, _, other_key = each.rpartition(".")
        ratio = difflib.SequenceMatcher(None, key, other_key).ratio()
        if section:
            ratio = 0.6 * ratio + 0.4 * difflib.SequenceMatcher(None, section, other_section).ratio()
        ratios[each] = ratio
    best = max(ratios.values(), default=0.0)
    return [each for each, ratio in ratios.items() if ratio == best] if best >= NEAR else []


def suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error message: the known keys that may have been meant, after `prefix`, or nothing."""
    close = [prefix + each for each in nearest(name, known)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def variable_suggestion(variable: str, known: Iterable[str]) -> str:
    """Return the same as `suggestion` for an environment variable; `known` are variables too."""
    close = difflib.get_close_matches(
        variable.removeprefix(ENVIRONMENT_PREFIX), [each.removeprefix(ENVIRONMENT_PREFIX) for each in known], 1, NEAR
    )
    return f"; did you mean {ENVIRONMENT_PREFIX}{close[0]}?" if close else ""
