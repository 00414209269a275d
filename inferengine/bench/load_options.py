"""The options of a load, and its request bodies, which are all made before the clock starts."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from inferengine.errors import ConfigError

WORDS = ["the", "engine", "reads", "a", "prompt", "and", "writes", "one", "token", "after", "another", "until", "it"]
LIMITS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class LoadOptions:
    """One load. `rate` 0 means a closed loop of `concurrency`; `goodput` holds limits in milliseconds by name.

    Raises ConfigError, which names the option of `inferengine bench`.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str = ""
    model: str = ""
    chat: bool = False
    concurrency: int = 16
    rate: float = 0.0
    burstiness: float = 1.0
    requests: int = 128
    input: str = "128"
    output: str = "64"
    prompt: str = "text"
    first_id: int = 100
    last_id: int = 1000
    shared_prefix: int = 0
    temperature: float = 0.0
    warm_up: int = 2
    seed: int = 0
    goodput: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            understood = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            understood = False
        if not understood:
            raise ConfigError("--url", f"'{self.url}' is not like http://host:8000")
        if not self.api_key.isprintable():
            raise ConfigError("--api-key", "must be one line of printable characters")
        if self.prompt not in ("text", "ids"):
            raise ConfigError("--prompt", f"must be text or ids; got '{self.prompt}'")
        for name in ("concurrency", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}", "must be at least 1")
        if self.burstiness <= 0:
            raise ConfigError("--burstiness", "must be above 0")
        if self.first_id > self.last_id:
            raise ConfigError("--first-id", f"must not be above --last-id, {self.last_id}")
        for name in ("input", "output"):
            length_sampler(f"--{name}", getattr(self, name), random.Random(0))
        for name in self.goodput:
            if name not in LIMITS:
                raise ConfigError("--goodput", f"'{name}' is none of {', '.join(LIMITS)}")

    @property
    def base_path(self) -> str:
        """The path between the host and `/v1`: the address may end in `/v1`, as OpenAI's does."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1")


def length_sampler(option: str, text: str, generator: random.Random) -> Callable[[], int]:
    """Parse a length: `128`, `64:512` (uniform) or `lognormal:MEDIAN:SIGMA`. Raises ConfigError."""
    parts = text.split(":")
    try:
        if parts[0] == "lognormal" and len(parts) == 3:
            median, sigma = float(parts[1]), float(parts[2])
            if not (0 < median < math.inf and 0 <= sigma < math.inf):
                raise ValueError
            return lambda: max(1, round(generator.lognormvariate(math.log(median), sigma)))
        low, high = int(parts[0]), int(parts[-1])
        if len(parts) > 2 or not 0 < low <= high:
            raise ValueError
    except ValueError:
        raise ConfigError(option, f"'{text}' is not like 128, 64:512 or lognormal:200:0.6") from None
    return lambda: generator.randint(low, high) if low < high else low


def request_bodies(options: LoadOptions, model: str) -> list[bytes]:
    """Return one JSON body for each request; the same for the same seed."""
    generator = random.Random(options.seed)
    inputs = length_sampler("--input", options.input, generator)
    outputs = length_sampler("--output", options.output, generator)
    prefix = _prompt(options, generator, options.shared_prefix)
    bodies: list[bytes] = []
    for _ in range(options.requests):
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": outputs(),
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": options.temperature,
        }
        prompt = prefix + _prompt(options, generator, inputs())
        if options.chat:
            body["messages"] = [{"role": "user", "content": " ".join(prompt)}]
        else:
            body["prompt"] = prompt if options.prompt == "ids" else " ".join(prompt)
        bodies.append(json.dumps(body).encode())
    return bodies


def _prompt(options: LoadOptions, generator: random.Random, length: int) -> list[Any]:
    if options.prompt == "ids" and not options.chat:
        return [generator.randint(options.first_id, options.last_id) for _ in range(length)]
    return [generator.choice(WORDS) for _ in range(length)]
