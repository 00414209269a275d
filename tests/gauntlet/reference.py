"""What each request should have given: the same request alone on a plain engine in this process.

The plain engine has no speculation, no prefix cache, no chunks, no overlap, one sequence and a first-come queue, and
its choices do not share their prompt. It shares the model's and the sampler's code with the engine under test; that
these are right is what `oracle` asks transformers.

Two ways of adding the same numbers differ in their last bits, so a token may differ where two scores tie. Such a token
is no difference when the plain engine draws it too once its logit is raised and the expected token's lowered by NUDGE:
a margin of TIE_MARGIN. What follows it is compared with what the plain engine says then.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace as replaced
from types import SimpleNamespace
from typing import Any

from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams, from_map, validate
from inferengine.structured_output.spec import GrammarSpec, grammar_from_list, validate_grammar
from tests.gauntlet.asks import Ask
from tests.gauntlet.checkpoints import ADAPTER, Checkpoint
from tests.gauntlet.outcomes import Choice, Outcome, Row
from tests.gauntlet.rounds import MODEL_LENGTH

TIE_MARGIN = 1e-4  # logits
NUDGE = TIE_MARGIN / 2
Nudges = tuple[tuple[int, float], ...]  # (token id, added to its logit)

PLAIN: dict[str, dict[str, Any]] = {
    "speculation": {"method": "none"},
    "scheduler": {"policy": "fcfs", "chunked_prefill": False},
    "engine": {"overlap": "off", "max_num_seqs": 1, "max_num_batched_tokens": MODEL_LENGTH, "cuda_graphs": False},
}


class Reference:
    """One model's answers, kept by request."""

    def __init__(self, checkpoint: Checkpoint, *, device: str = "cpu") -> None:
        from inferengine import LLM

        block_size = 64 if device == "cuda" else 16
        engine = {**PLAIN["engine"], "device": device, **({"threads": 1} if device == "cpu" else {})}
        self.llm = LLM(
            str(checkpoint.folder),
            model={"max_model_len": MODEL_LENGTH, "dtype": "float32", "adapters": str(checkpoint.adapters)},
            cache={"prefix_caching": False, "num_blocks": 2 * MODEL_LENGTH // block_size, "block_size": block_size},
            **{**PLAIN, "engine": engine},
        )
        self.checkpoint = checkpoint
        self._adapters: dict[str, int] = self.llm._executor.adapters.names()
        self._kept: dict[str, Outcome] = {}

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    def prompt_ids(self, ask: Ask) -> list[int]:
        """Return the prompt's tokens. A conversation with tools has more in it than its messages: its answer tells
        them."""
        if "ids" in ask.prompt:
            return list(ask.prompt["ids"])
        if "text" in ask.prompt:
            return list(self.tokenizer.encode(ask.prompt["text"]))
        assert self.llm.chat_template is not None
        text = self.llm.chat_template.render(ask.prompt["messages"])
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def answer(self, ask: Ask, prompt_ids: list[int] | None = None, nudges: Nudges = ()) -> Outcome:
        """Return the expected outcome. `prompt_ids`: those that the engine says it had."""
        same = replaced(ask, name=0, at_s=0.0, act=None, way="wire" if ask.way in ("wire", "ws") else "http")
        key = json.dumps([same.to_map(), prompt_ids if "tools" in ask.options else None, nudges])
        if key not in self._kept:
            self._kept[key] = self._answer(ask, prompt_ids, nudges)
        return self._kept[key]

    def close(self) -> None:
        self.llm.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _answer(self, ask: Ask, prompt_ids: list[int] | None, nudges: Nudges) -> Outcome:
        ids = prompt_ids if prompt_ids and "tools" in ask.options else self.prompt_ids(ask)
        try:
            if ask.reply == "embedding":
                return self._embedding(ask, ids)
            params, spec = self.params(ask, nudges), self._grammar(ask)
            vocab_size = self.llm.capacity.vocab_size
            validate(params, vocab_size=vocab_size, limits=self.llm.config.limits)
            if spec is not None:
                validate_grammar(spec, self.llm.config.limits)
                self.llm._grammars.compile(spec)
        except InferEngineError as error:
            return Outcome(refused=error.code, message=str(error))
        outcome = Outcome(prompt_ids=ids)
        seed = params.seed or 0
        for index in range(params.n):
            outcome.choices.append(self._choice(ask, ids, params, spec, seed, index, outcome))
        return outcome

    def params(self, ask: Ask, nudges: Nudges = ()) -> SamplingParams:
        """Return the parameters as the engine gets them, whatever way they came."""
        values = dict(ask.params)
        if (words := values.pop("bad_words", None)) is not None:
            from frontends.http.bodies import read_bad_words

            values["bad_words_ids"] = read_bad_words(words, self.tokenizer)
        if ask.way.startswith("http") and ask.options.get("echo") and values.get("logprobs") is not None:
            values["prompt_logprobs"] = max(values.get("prompt_logprobs") or 0, values["logprobs"])
        if nudges:
            biases = dict(map(tuple, values.get("logit_bias", ())))
            for token, amount in nudges:
                biases[token] = biases.get(token, 0.0) + amount
            values["logit_bias"] = list(biases.items())
        return from_map(values)

    def _grammar(self, ask: Ask) -> GrammarSpec | None:
        if ask.grammar is not None:
            return grammar_from_list(ask.grammar)
        if ask.options.get("tool_choice") != "required":
            return None
        from frontends.common.chat import read_tools, tools_grammar
        from inferengine.text.output_parser import FORMATS

        limits = self.llm.config.limits
        tools = read_tools(ask.options, limits)
        assert tools is not None
        return tools_grammar(tools, FORMATS["hermes"], SimpleNamespace(tokenizer=self.tokenizer), limits)  # type: ignore[arg-type]

    def _choice(
        self,
        ask: Ask,
        ids: list[int],
        params: SamplingParams,
        spec: GrammarSpec | None,
        seed: int,
        index: int,
        outcome: Outcome,
    ) -> Choice:
        from inferengine.core.scheduler.queues import resolve_max_tokens
        from inferengine.core.sequence import Request, choice_seed
        from inferengine.text import TextStream

        llm, core = self.llm, self.llm.core
        llm._next_uid += 1
        uid = llm._next_uid
        only_first = params.replace(prompt_logprobs=params.prompt_logprobs if index == 0 else None)
        core.submit(
            Request(
                uid=uid,
                prompt_ids=ids,
                params=only_first,
                max_tokens=resolve_max_tokens(len(ids), params.max_tokens, llm._limits),
                eos_token_ids=llm._eos,
                seed=choice_seed(seed, index),
                choice=index,
                arrival_s=time.monotonic(),
                grammar=spec,
                adapter=self._adapters[ADAPTER] if ask.options.get("adapter") else 0,
            )
        )
        if spec is not None:
            core.grammar_ready(uid, llm._grammars.compile(spec))
        is_chat = "messages" in ask.prompt
        stream = TextStream(
            self.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            context_ids=() if is_chat else ids[-4:],
        )
        choice = Choice(tokens=[], text="", logprobs=None if params.logprobs is None else [])
        while core.has_work:
            news = core.step()
            if news is None:
                continue
            tokens = [token for each, token in zip(news.uids, news.token_ids, strict=True) if each == uid]
            row = next((row for row in news.finished if row.uid == uid), None)
            rows = (news.logprobs or {}).get(uid)
            if news.prompt_logprobs and uid in news.prompt_logprobs:
                outcome.prompt_logprobs = [as_row(*each) for each in news.prompt_logprobs[uid]]
            by_id = row is not None and row.reason == "stop" and not isinstance(row.detail, str)
            delta = stream.push(tokens, row is not None, by_id and bool(tokens))
            assert choice.text is not None
            assert choice.tokens is not None
            choice.text += delta.text
            choice.tokens = (choice.tokens + tokens)[: delta.num_tokens]
            if choice.logprobs is not None:
                choice.logprobs = (choice.logprobs + [as_row(*each) for each in rows or ()])[: delta.num_tokens]
            if delta.stop is not None:
                core.cancel(uid)
                choice.reason, choice.detail = "stop", delta.stop
            elif row is not None:
                choice.reason = row.reason
                choice.detail = row.detail[0] if isinstance(row.detail, tuple) else row.detail
        choice.ends = 1
        return choice

    def _embedding(self, ask: Ask, ids: list[int]) -> Outcome:
        from inferengine.core.sequence import Request
        from inferengine.vectors import to_floats

        llm, core = self.llm, self.llm.core
        llm._next_uid += 1
        uid = llm._next_uid
        core.submit(
            Request(
                uid, ids, SamplingParams(), max_tokens=0, arrival_s=time.monotonic(),
                pooling=ask.options.get("pooling", "last"),
                adapter=self._adapters[ADAPTER] if ask.options.get("adapter") else 0,
            )
        )  # fmt: skip
        outcome = Outcome(prompt_ids=ids)
        while core.has_work:
            news = core.step()
            if news is not None and news.embeddings and uid in news.embeddings:
                outcome.embedding = list(to_floats(news.embeddings[uid]))
        return outcome


def as_row(logprob: float, rank: int, top_ids: list[int], top_logprobs: list[float]) -> Row:
    return Row(logprob, rank, dict(zip(top_ids, top_logprobs, strict=True)))
