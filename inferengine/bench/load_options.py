"""The options of a load, and its request bodies, which are all made before the clock starts.

A load draws its lengths from `input` and `output`, or is one of WORKLOADS: five that each make one optimisation matter,
with sizes that follow from the model's context.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from inferengine.errors import ConfigError

WORDS = ["the", "engine", "reads", "a", "prompt", "and", "writes", "one", "token", "after", "another", "until", "it"]
LIMITS = ("ttft", "tpot", "e2e")
DEFAULT_CONTEXT, MIN_CONTEXT = 2048, 128


class Sizes(NamedTuple):
    """How large the workloads are."""

    batch: int
    prompt: int
    output: int
    long_prompt: int
    shared_output: int  # of the requests that share a prompt


class LoadRequest(NamedTuple):
    """One request of a workload. `shared`: how many of its prompt's tokens all requests begin with."""

    num_prompt: int
    num_output: int
    shared: int = 0


class LadderWorkload(NamedTuple):
    """What makes one optimisation matter, and the figure that shows it: a path into a report."""

    shows: str
    figure: tuple[str, ...]
    unit: str
    items: Callable[[Sizes], list[LoadRequest]]
    higher_is_better: bool = True


def sizes_of(context: int) -> Sizes:
    """Return sizes that fit a model of `context` tokens with room to spare, for prompts of words have more tokens.

    A long prompt fits a step: without chunks one that does not would wait until nothing else runs, and disturb nobody.
    """
    longest = min(context, 8192)
    large = context >= 8192
    batch, prompt, output = (32, 512, 64) if large else (8, 96, 32)
    return Sizes(batch, min(prompt, longest // 8), min(output, longest // 16), longest * 3 // 16, max(4, output // 8))


def _baseline(sizes: Sizes) -> list[LoadRequest]:
    """Return equal requests that fit at once: no switch should cost anything here."""
    return [LoadRequest(sizes.prompt, sizes.output)] * max(2, sizes.batch // 4)


def _continuous_batching(sizes: Sizes) -> list[LoadRequest]:
    """Return requests of three batches, one long output among seven short ones: a static batch waits for its
    longest."""
    outputs = [sizes.output * 2 if i % 8 == 0 else max(4, sizes.output // 8) for i in range(3 * sizes.batch)]
    return [LoadRequest(max(1, sizes.prompt // 4), count) for count in outputs]


def _paged_attention(sizes: Sizes) -> list[LoadRequest]:
    """Return short requests: a cache that reserves the longest length for each has room for few of them."""
    return [LoadRequest(max(1, sizes.prompt // 4), max(1, sizes.output // 2))] * (2 * sizes.batch)


def _chunked_prefill(sizes: Sizes) -> list[LoadRequest]:
    """Return streams that run while long prompts come in, to see how long they wait for their next token. Enough
    prompts that the steps that hold them are more than one in a hundred."""
    streams = [LoadRequest(16, 3 * sizes.output)] * max(2, sizes.batch // 4)
    return streams + [LoadRequest(sizes.long_prompt, 2)] * max(4, sizes.batch // 2)


def _prefix_caching(sizes: Sizes) -> list[LoadRequest]:
    """Return requests that share the same long instructions and end with a short question."""
    return [LoadRequest(sizes.long_prompt + 24, sizes.shared_output, sizes.long_prompt)] * (3 * sizes.batch)


THROUGHPUT = ("output_tokens_per_s",)
WORKLOADS = {
    "baseline": LadderWorkload("nothing", THROUGHPUT, "tok/s", _baseline),
    "continuous_batching": LadderWorkload("continuous", THROUGHPUT, "tok/s", _continuous_batching),
    "paged_attention": LadderWorkload("paged", THROUGHPUT, "tok/s", _paged_attention),
    "chunked_prefill": LadderWorkload(
        "chunked", ("itl_ms", "p99"), "ms between tokens, p99", _chunked_prefill, higher_is_better=False
    ),
    "prefix_caching": LadderWorkload(
        "prefix", ("ttft_ms", "p50"), "ms to first token, p50", _prefix_caching, higher_is_better=False
    ),
}


@dataclass(frozen=True)
class LoadOptions:
    """One load. `rate` 0 means a closed loop of `concurrency`; `goodput` holds limits in milliseconds by name; `body`
    holds more fields of each request, for `bench features`.

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
    workload: str = ""
    context: int = 0  # of the model, for `workload`; 0: what the server tells, else 2,048
    detailed: bool = False
    body: dict[str, Any] = field(default_factory=dict)

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
        if self.workload and self.workload not in WORKLOADS:
            raise ConfigError("--workload", f"'{self.workload}' is none of {', '.join(WORKLOADS)}")
        if 0 < self.context < MIN_CONTEXT:
            raise ConfigError("--context", f"must be at least {MIN_CONTEXT}")
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
    items = _items(options, generator)
    prefix = _prompt(options, generator, max((item.shared for item in items), default=0))
    bodies: list[bytes] = []
    for item in items:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": item.num_output,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": options.temperature,
            **options.body,
        }
        if "structured_outputs" in options.body:  # a complete text would end the output here, and not at other servers
            body["min_tokens"] = item.num_output
        prompt = prefix[: item.shared] + _prompt(options, generator, item.num_prompt - item.shared)
        if options.chat:
            body["messages"] = [{"role": "user", "content": " ".join(prompt)}]
        else:
            body["prompt"] = prompt if options.prompt == "ids" else " ".join(prompt)
        bodies.append(json.dumps(body).encode())
    return bodies


def _items(options: LoadOptions, generator: random.Random) -> list[LoadRequest]:
    """Return the lengths of each request."""
    if options.workload:
        return WORKLOADS[options.workload].items(sizes_of(options.context or DEFAULT_CONTEXT))
    inputs = length_sampler("--input", options.input, generator)
    outputs = length_sampler("--output", options.output, generator)
    shared = options.shared_prefix
    return [LoadRequest(shared + inputs(), outputs(), shared) for _ in range(options.requests)]


def _prompt(options: LoadOptions, generator: random.Random, length: int) -> list[Any]:
    if options.prompt == "ids" and not options.chat:
        return [generator.randint(options.first_id, options.last_id) for _ in range(length)]
    return [generator.choice(WORDS) for _ in range(length)]
