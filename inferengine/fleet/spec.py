"""What a fleet is to be, as plain values: they travel to actors, and back from them after a loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inferengine.config import ENVIRONMENT_PREFIX, Config, child_environment
from inferengine.errors import ConfigError

NAMESPACE = "inferengine"  # of all fleets' actors
# Sections and keys that a host decides, or that engines do not read.
_NOT_ENGINES = ("HTTP_", "WS_", "UP_", "AUTH_", "WIRE_SOCKET", "WIRE_TCP", "WIRE_CURVE_", "WIRE_ENGINES", "ENGINE_NAME")


@dataclass(frozen=True)
class FleetKeys:
    """The CURVE pairs of a fleet, Z85: one of all its engines, one of all its front ends."""

    engine_public: str
    engine_secret: str = field(repr=False)
    front_public: str
    front_secret: str = field(repr=False)


@dataclass(frozen=True)
class FleetSpec:
    """The engines of a fleet: their settings, what each needs of its machine, and how many there may be."""

    settings: Mapping[str, str]  # INFERENGINE_* variables that differ from the defaults
    least: int  # engines; equal to `most`: their number is fixed
    most: int
    cpus: float  # of each engine, as Ray counts them
    gpus: int
    tensor_parallel: int
    drain_timeout_s: float
    watchdog_s: float  # without a sign of life an engine counts as frozen
    surge: int = 1  # engines above the wanted number while others are replaced; 0: one is missing meanwhile
    queue: float = 4.0  # most waiting requests for each engine, where the number may change
    first_token_ms: float = 0.0  # most milliseconds to the first token, 95th percentile; 0: no target

    def to_map(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Goal:
    """What the directory works towards. Engines keep a copy: a restarted directory takes the one of highest edition."""

    spec: FleetSpec
    wanted: int
    revision: int = 1  # of the engines' settings: an engine of another revision is replaced
    edition: int = 1  # grows with every change


def engine_settings(config: Config) -> dict[str, str]:
    """Return the variables that an engine elsewhere needs to have this configuration. Raises ConfigError for what a
    fleet cannot have."""
    wire = config.wire
    for key in ("socket", "tcp", "curve_secret_file", "curve_clients_file", "curve_engine_key", "engines"):
        if getattr(wire, key):
            raise ConfigError(f"wire.{key}", "a fleet chooses addresses and keys itself: leave it out")
    if config.engine.executor in ("remote", "upstream"):
        raise ConfigError("engine.executor", f"{config.engine.executor} has its devices elsewhere: use torch or onnx")
    defaults = child_environment(Config())
    return {
        name: value
        for name, value in child_environment(config).items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and value != defaults[name]
        and not name.removeprefix(ENVIRONMENT_PREFIX).startswith(_NOT_ENGINES)
    }
