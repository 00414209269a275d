"""The wanted state of a fleet as plain values, which can be sent to actors and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inferengine.config import ENVIRONMENT_PREFIX, Config, child_environment
from inferengine.errors import ConfigError

NAMESPACE = "inferengine"  # of all fleets' actors
# Sections and keys that the host sets itself, or that engines do not read.
_NOT_ENGINES = ("HTTP_", "WS_", "UP_", "AUTH_", "WIRE_SOCKET", "WIRE_TCP", "WIRE_CURVE_", "WIRE_ENGINES", "ENGINE_NAME")


@dataclass(frozen=True)
class FleetKeys:
    """The two CURVE key pairs of a fleet, in Z85: one shared by its engines, one shared by its front ends."""

    engine_public: str
    engine_secret: str = field(repr=False)
    front_public: str
    front_secret: str = field(repr=False)


@dataclass(frozen=True)
class FleetSpec:
    """The engines of a fleet: their settings, the resources of each, and the bounds of their number."""

    settings: Mapping[str, str]  # INFERENGINE_* variables that differ from the defaults
    least: int  # engines; if equal to `most`, their number is fixed
    most: int
    cpus: float  # of each engine, as Ray counts them
    gpus: int  # of each engine
    tensor_parallel: int
    drain_timeout_s: float
    watchdog_s: float  # seconds without a sign of life after which an engine counts as frozen
    surge: int = 1  # engines above the wanted number while others are replaced; 0: one is missing meanwhile
    queue: float = 4.0  # target of waiting requests for each engine, where the number of engines may change
    first_token_ms: float = 0.0  # target of the time to the first token, 95th percentile; 0: none

    def to_map(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Goal:
    """The state that the directory works towards. Engines hold copies; a restarted directory takes the newest."""

    spec: FleetSpec
    wanted: int
    revision: int = 1  # of the engines' settings: an engine of another revision is replaced
    edition: int = 1  # grows with every change of the goal; tells which copy is the newest


def engine_settings(config: Config) -> dict[str, str]:
    """Return the INFERENGINE_* variables that give an engine on another machine this configuration.

    Raises ConfigError for a key that a fleet sets itself, and for an executor that runs elsewhere.
    """
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
