"""What transformers says: greedy tokens by full recompute in fp32, and log-probabilities of prompt and output.

Each token is judged after the tokens that the engine drew before it (teacher forcing), so one near tie does not spoil
what follows. Penalties, biases and forbidden tokens are applied here a second time, from their definitions alone.
"""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

from tests.gauntlet.asks import Ask
from tests.gauntlet.checkpoints import ADAPTER, Checkpoint, merge_adapter
from tests.gauntlet.comparison import near
from tests.gauntlet.outcomes import Choice, Outcome, Row
from tests.gauntlet.reference import Reference

GREEDY_MARGIN = {"float32": 2e-3, "bfloat16": 0.75}  # logits that a drawn token may be below the best, in fp32
LOGPROB_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.6}


class Oracle:
    """transformers' reading of a checkpoint, with and without its adapter."""

    def __init__(self, checkpoint: Checkpoint, reference: Reference, *, device: str, dtype: str) -> None:
        self._checkpoint, self._reference = checkpoint, reference
        self._device, self._dtype = device, dtype
        self._models: dict[bool, Any] = {}

    def judge(self, ask: Ask, outcome: Outcome) -> list[str]:
        """Return differences from what transformers says; empty where it has nothing to say."""
        if ask.reply == "embedding" or outcome.refused is not None:
            return []
        found: list[str] = []
        ids = outcome.prompt_ids or self._reference.prompt_ids(ask)
        for index, choice in enumerate(outcome.choices):
            if choice.tokens is None or choice.reason == "error":
                continue
            greedy = ask.is_greedy and ask.grammar is None and "tools" not in ask.options
            if not choice.tokens or not (greedy or choice.logprobs):
                continue
            logits = self._logits(ask, ids + choice.tokens[:-1])
            if choice.logprobs:
                found += self._rows(f"logprobs: choice {index}", choice.tokens, choice.logprobs, logits[len(ids) - 1 :])
            if greedy:
                found += self._greedy(ask, index, ids, choice, logits[len(ids) - 1 :])
        if outcome.prompt_logprobs and len(ids) > 1:
            rows = list(outcome.prompt_logprobs)
            found += self._rows("prompt_logprobs", ids[1:], rows, self._logits(ask, ids)[:-1])
        return [f"transformers: {each}" for each in found]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _logits(self, ask: Ask, ids: list[int]) -> Any:
        import torch

        with torch.inference_mode():
            return (
                self._model(bool(ask.options.get("adapter")))(torch.tensor([ids], device=self._device), use_cache=False)
                .logits[0]
                .float()
            )

    def _model(self, adapted: bool) -> Any:
        if adapted not in self._models:
            import torch
            import transformers

            with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    self._checkpoint.folder, dtype=torch.float32
                ).eval()
            if adapted:
                merge_adapter(model, self._checkpoint.adapters / ADAPTER)
            self._models[adapted] = model.to(self._device)
        return self._models[adapted]

    def _rows(self, kind: str, tokens: list[int], rows: list[Row | None] | list[Row], logits: Any) -> list[str]:
        expected = logits.log_softmax(-1).gather(-1, logits.new_tensor(tokens).long().unsqueeze(-1))[:, 0].tolist()
        tolerance = LOGPROB_TOLERANCE[self._dtype]
        for place, (row, value) in enumerate(zip(rows, expected, strict=False)):
            if row is not None and not near(row.logprob, value, tolerance):
                return [f"{kind}: {row.logprob:.4f} at {place} is not {value:.4f}"]
        return []

    def _greedy(self, ask: Ask, index: int, ids: list[int], choice: Choice, logits: Any) -> list[str]:
        params = self._reference.params(ask)
        tokens = choice.tokens or []
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else set(self._reference.llm._eos))
        scale = min(max(params.repetition_penalty, 1 / params.repetition_penalty), 1e4)
        for place, token in enumerate(tokens):
            row = process(
                logits[place].clone(), ids, tokens[:place], params, stops if place < params.min_tokens else set()
            )
            if not math.isfinite(float(row.max())):
                continue  # penalties of 1e-308 make infinities, which all tie
            margin = float(row.max() - row[token])
            if not margin <= GREEDY_MARGIN[self._dtype] * scale:
                best = int(row.argmax())
                return [f"greedy: choice {index} has {token} at {place}, {margin:.3g} below {best}"]
        return []


def process(row: Any, prompt: list[int], output: list[int], params: Any, stops: set[int]) -> Any:
    """Apply penalties, bias, forbidden and allowed tokens, by their definitions in docs/parameters.md."""
    for token in {*prompt, *output} if params.repetition_penalty != 1.0 else ():
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in {*output}:
        row[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias:
        row[token] += bias
    if params.allowed_token_ids:
        allowed = row.new_full(row.shape, float("-inf"))
        allowed[list(params.allowed_token_ids)] = 0.0
        row = row + allowed
    for word in params.bad_words_ids:
        *head, last = word
        if not head or output[-len(head) :] == head:
            row[last] = float("-inf")
    for token in stops:
        row[token] = float("-inf")
    return row
