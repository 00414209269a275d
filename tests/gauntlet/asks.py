"""What is asked of the engine: one Ask per request, drawn from tables over the whole feature space.

An Ask is plain data: a replay file is a list of them. A new sampling field is one line in SAMPLING, a new form one in
GRAMMARS. `fit` then takes away what contradicts: fields that a way of asking does not have, and pairs that are refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

WAYS = {"wire": 10, "http": 3, "http-stream": 3, "ws": 3}  # and how often
EMBEDDING_SHARE = 0.06
BAD_SHARE = 0.02  # requests that must be refused
LEAST_PENALTY = 1e-30  # below it logits become infinite, all of them tie, and a last bit decides which do
SPECIAL_IDS = 16  # the first ids of the vocabulary: markers that are kept out of random prompts


@dataclass(frozen=True)
class Ask:
    """One request. `prompt` has one of ids, text, messages; `options` has what is no sampling field; `act` is what its
    client does before the end: {"kind": cancel | disconnect | attach, "after_tokens": n} or {"after_s": s}."""

    name: int
    at_s: float
    way: str
    prompt: dict[str, Any]
    params: dict[str, Any] = field(default_factory=dict)
    grammar: list[Any] | None = None
    reply: str = "tokens"
    options: dict[str, Any] = field(default_factory=dict)
    act: dict[str, Any] | None = None
    after: int | None = None  # comes when that request has ended, and not before `at_s`: clients that take turns

    def to_map(self) -> dict[str, Any]:
        """Return the request as a replay file has it, without defaults."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {}, "tokens")}

    @property
    def is_greedy(self) -> bool:
        return bool(self.params.get("temperature", 1.0) <= 1e-5)

    @property
    def is_comparable(self) -> bool:
        """Whether its tokens are determined: greedy or seeded, and not by ties of infinities."""
        if self.params.get("repetition_penalty", 1.0) < LEAST_PENALTY:
            return False
        return self.reply == "embedding" or self.is_greedy or "seed" in self.params

    @property
    def n(self) -> int:
        return int(self.params.get("n", 1))


def from_map(values: dict[str, Any]) -> Ask:
    return Ask(**values)


@dataclass(frozen=True)
class Space:
    """What the engine of a round has, as far as requests depend on it."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int  # that the cache holds: prompt and output of one request must fit
    adapters: tuple[str, ...] = ()
    grammars: bool = True
    max_output: int = 64  # of one choice

    @property
    def room(self) -> int:
        """Most tokens of one request, prompt and output."""
        return min(self.max_model_len, self.kv_tokens)


Draw = Callable[[random.Random, Space], Any]


def some_ids(rng: random.Random, space: Space, count: int) -> list[int]:
    return [rng.randrange(SPECIAL_IDS, space.vocab_size) for _ in range(count)]


def _one_of(*values: Any) -> Draw:
    return lambda rng, space: rng.choice(values)


# field -> (how often it is asked for, its value)
SAMPLING: dict[str, tuple[float, Draw]] = {
    "max_tokens": (1.0, lambda rng, space: rng.choice((1, 2, 5, 12, 24, 40, space.max_output, space.max_output))),
    "temperature": (1.0, _one_of(0.0, 0.0, 0.0, 0.3, 0.7, 1.0, 1.5)),
    "seed": (0.93, lambda rng, space: rng.choice((0, -5, 7, rng.getrandbits(62)))),
    "top_p": (0.25, _one_of(0.05, 0.5, 0.9, 0.95, 0.999)),
    "top_k": (0.25, _one_of(-1, 1, 2, 20, 1000)),
    "min_p": (0.15, _one_of(0.01, 0.1, 0.5)),
    "repetition_penalty": (0.15, _one_of(0.8, 1.1, 1.3, 2.0)),
    "presence_penalty": (0.12, _one_of(-2.0, 0.5, 2.0)),
    "frequency_penalty": (0.12, _one_of(-1.0, 0.3, 2.0)),
    "n": (0.12, _one_of(2, 3, 4)),
    "min_tokens": (0.12, _one_of(1, 3, 10)),
    "ignore_eos": (0.5, _one_of(True)),
    "stop_token_ids": (0.12, lambda rng, space: some_ids(rng, space, rng.choice((1, 40)))),
    "stop": (0.15, lambda rng, space: rng.sample((" the", ".", "e", "\n", " a", "not there"), rng.choice((1, 3)))),
    "include_stop_str_in_output": (0.08, _one_of(True)),
    "skip_special_tokens": (0.08, _one_of(False)),
    "logit_bias": (0.12, lambda rng, space: [[token, rng.choice((-100.0, -3.0, 2.0, 8.0))] for token in
                                             dict.fromkeys(some_ids(rng, space, rng.choice((1, 5, 60))))]),
    "allowed_token_ids": (0.05, lambda rng, space: some_ids(rng, space, 200)),
    "bad_words_ids": (0.06, lambda rng, space: [some_ids(rng, space, rng.choice((1, 1, 2))) for _ in range(20)]),
    "logprobs": (0.2, _one_of(0, 1, 5, 20)),
    "prompt_logprobs": (0.1, _one_of(0, 2, 5)),
}  # fmt: skip

# Values at the edge of what is allowed: rare, because a broken edge hides everything else.
EXTREMES: dict[str, Draw] = {
    "repetition_penalty": _one_of(1e-308, 1e-300, 1e-38, 1e-3, 100.0),
    "temperature": _one_of(1e-5, 1.1e-5, 2.0),
    "top_p": _one_of(1e-6, 1.0),
    "min_p": _one_of(1.0),
    "n": _one_of(16),
    "top_k": _one_of((1 << 31) - 1),
}
EXTREME_SHARE = 0.05

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAGS = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]}
GRAMMARS: list[list[Any]] = [
    ["json_schema", json.dumps(SCHEMA), None],
    ["json_schema", json.dumps(SCHEMA), ""],
    ["json_schema", json.dumps({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}), None],
    ["json_object", "{}", None],
    ["regex", "[a-z ]+", None],
    ["regex", r"(yes|no), \d{1,3} times", None],
    ["choice", json.dumps(["red", "green", "greenish blue"]), None],
    ["lark", 'start: "the " WORD " sat" ("!" | ".")\nWORD: /[a-z]{1,8}/', None],
    ["lark", 'root ::= item ("," item)*\nitem ::= [0-9]+', None],
    ["structural_tag", json.dumps(TAGS), None],
]
BROKEN_GRAMMAR = ["regex", "(unclosed", None]

TEXTS = (
    "Once upon a time",
    "What is a KV cache?",
    "The little robot walked to the edge of the forest and looked at the river for a very long time before it",
    "2 + 2 =",
    "Name: Ada. City: Paris. Age: 36. Summary:",
    "A queue is a line of people. The first in the line is served first. A stack is different:",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}

OPTIONS: dict[str, tuple[float, Draw]] = {
    "priority": (0.2, _one_of(-5, 1, 10)),
    "tenant": (0.3, _one_of("a", "b", "c")),
    "salt": (0.1, _one_of("pepper", "sea")),
    "deadline_s": (0.05, _one_of(0.05, 0.3, 30.0)),
    "detached": (0.08, _one_of(True)),
    "echo": (0.1, _one_of(True)),
}
ACTS: dict[str, float] = {"cancel": 0.08, "disconnect": 0.04, "attach": 0.06}


class Prompts:
    """Prompts of a round: random beginnings that several requests share, and random ends."""

    def __init__(self, rng: random.Random, space: Space) -> None:
        self._space = space
        self._beginnings = [some_ids(rng, space, space.room) for _ in range(4)]

    def draw(self, rng: random.Random) -> dict[str, Any]:
        kind = rng.random()
        if kind < 0.2:
            return {"text": rng.choice(TEXTS)}
        if kind < 0.35:
            messages = [{"role": "user", "content": rng.choice(TEXTS)}]
            if rng.random() < 0.3:
                messages.insert(0, {"role": "system", "content": "Answer in one word."})
            return {"messages": messages}
        shared = rng.choice((0, 16, 48, 100, 180))
        beginning = rng.choice(self._beginnings)[:shared]
        ids = beginning + some_ids(rng, self._space, rng.choice((1, 2, 7, 30)))
        if rng.random() < 0.3:  # what n-gram speculation finds again
            ids = (ids[-12:] * 4)[: rng.randrange(8, 49)]
        return {"ids": ids}


def draw_ask(rng: random.Random, name: int, at_s: float, prompts: Prompts, space: Space) -> Ask:
    """Draw one request of the feature space."""
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    prompt = prompts.draw(rng)
    options = {key: draw(rng, space) for key, (share, draw) in OPTIONS.items() if rng.random() < share}
    if space.adapters and rng.random() < 0.2:
        options["adapter"] = rng.choice(space.adapters)
    act = None
    for kind, share in ACTS.items():
        if rng.random() < share:
            when = (
                {"after_tokens": rng.choice((1, 2, 9))}
                if rng.random() < 0.6
                else {"after_s": rng.choice((0.0, 0.01, 0.1))}
            )
            act = {"kind": kind, **when}
    if rng.random() < EMBEDDING_SHARE:
        options["pooling"] = rng.choice(("last", "mean"))
        return fit(Ask(name, at_s, rng.choice(("wire", "http")), prompt, {}, None, "embedding", options, act), space)
    params = {key: draw(rng, space) for key, (share, draw) in SAMPLING.items() if rng.random() < share}
    if rng.random() < EXTREME_SHARE:
        key = rng.choice(list(EXTREMES))
        params[key] = EXTREMES[key](rng, space)
    grammar = rng.choice(GRAMMARS) if space.grammars and rng.random() < 0.2 else None
    if space.grammars and "messages" in prompt and rng.random() < 0.2:
        options["tools"] = [TOOL]
        options["tool_choice"] = rng.choice(("auto", "required"))
        way, grammar = rng.choice(("http", "http-stream")), None
    if rng.random() < BAD_SHARE:
        way, options["bad"] = "wire", True
        if space.grammars and rng.random() < 0.5:
            grammar = BROKEN_GRAMMAR
        else:
            params["logit_bias"] = [[space.vocab_size, 1.0]]
    reply = rng.choice(("tokens", "tokens", "both", "both", "text"))
    return fit(Ask(name, at_s, way, prompt, params, grammar, reply, options, act), space)


def fit(ask: Ask, space: Space) -> Ask:
    """Return the nearest request that is not refused for what it combines."""
    params, options, act, prompt = dict(ask.params), dict(ask.options), ask.act, dict(ask.prompt)
    if ask.reply == "embedding":
        keep = ("tenant", "salt", "pooling", "adapter", *(("priority", "deadline_s") if ask.way == "wire" else ()))
        if ask.way == "http" and "messages" in prompt:
            prompt = {"text": TEXTS[0]}
        act = act if act and act["kind"] == "cancel" and "after_s" in act else None
        options = {key: value for key, value in options.items() if key in keep}
        return replace(ask, prompt=_short(prompt, 0, space), params={}, grammar=None, options=options, act=act)
    params["max_tokens"] = max(1, min(params.get("max_tokens", 16), space.room - 150))
    prompt = _short(prompt, params["max_tokens"], space)
    params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
    if not params["min_tokens"]:
        del params["min_tokens"]
    if params.get("temperature", 1.0) <= 1e-5:
        params.pop("n", None)
        params.pop("seed", None)
    if ask.grammar is not None:  # together they may leave no token: that is another engine's answer, not a difference
        for name in ("allowed_token_ids", "bad_words_ids"):
            params.pop(name, None)
        params["logit_bias"] = [
            pair for pair in params.get("logit_bias", []) if abs(pair[1]) < 100.0 or "bad" in options
        ]
        if not params["logit_bias"]:
            del params["logit_bias"]
    if ask.way != "wire":
        options.pop("deadline_s", None) if ask.way != "ws" else None
        options.pop("tenant", None)  # that of the key
        if act and act["kind"] == "attach":
            act = None
    if act and act["kind"] == "attach":
        params.pop("prompt_logprobs", None)
    if ask.way.startswith("http"):
        if "bad_words_ids" in params:
            params["bad_words"] = ["the", "robot", "zebra"]
            del params["bad_words_ids"]
        if "messages" in prompt or ask.way == "http-stream":
            options.pop("echo", None)
        if ask.way == "http-stream" or options.get("detached"):
            params.pop("prompt_logprobs", None)
            options.pop("echo", None)
        if act and act["kind"] == "cancel":
            act = {**act, "kind": "disconnect"}
        if act and ask.way == "http":
            act = {"kind": "disconnect", "after_s": act.get("after_s", 0.05)}
        if act and options.get("detached"):
            options.pop("detached")
    else:
        options.pop("echo", None)
    if ask.way == "ws":
        params.pop("prompt_logprobs", None)
        options.pop("adapter", None)
        options.pop("detached", None)
    if ask.way == "wire" and ask.reply == "tokens":
        params.pop("stop", None)
        params.pop("include_stop_str_in_output", None) if "stop_token_ids" not in params else None
    if ask.reply == "text" and act and "after_tokens" in act:
        act = {**act, "after_tokens": 1}
    grammar = None if ask.way == "ws" and ask.grammar and ask.grammar[0] == "structural_tag" else ask.grammar
    return replace(ask, prompt=prompt, params=params, grammar=grammar, options=options, act=act)


def _short(prompt: dict[str, Any], max_tokens: int, space: Space) -> dict[str, Any]:
    if "ids" in prompt:
        return {"ids": prompt["ids"][: max(1, space.room - max_tokens - 1)]}
    return prompt
