"""LLM: the engine as a library, for offline work: the same core, executor and text as the service, without sockets."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypedDict, Unpack

from inferengine.config import Config
from inferengine.config import load as load_config
from inferengine.config.values import suggestion
from inferengine.core.constraints import num_mask_threads
from inferengine.core.executor import AdapterStore, Executor, TokenLogprobs
from inferengine.core.scheduler.queues import check_prompt, resolve_max_tokens
from inferengine.core.scheduler.scheduler import StepOutput
from inferengine.core.sequence import Finished, Request, choice_seed
from inferengine.core.speculation import build_proposer
from inferengine.engine.core import EngineCore
from inferengine.engine.model_info import read_model_card
from inferengine.engine.options import admission_limits, scheduler_options
from inferengine.errors import HALF_PAIR, ConfigError, InferEngineError, InvalidRequest
from inferengine.executor.memory.fit import require_fit
from inferengine.executor.memory.plan import device_memory, make_plan
from inferengine.executor.settings import executor_settings
from inferengine.executor.torch_executor import build_executor
from inferengine.sampling_params import MAX_SEED, NAMES, POOLINGS, SamplingParams, from_map, of_choice, validate
from inferengine.structured_output.compiler import GrammarCompiler
from inferengine.structured_output.spec import GrammarSpec, read_grammar, validate_grammar
from inferengine.text import ChatTemplate, TextStream, Tokenizer, check_messages
from inferengine.vectors import to_floats

__all__ = ["LLM", "ChatMessages", "Choice", "Embedding", "Generation", "Prompt", "StructuredOutput"]
Prompt = str | Sequence[int]  # a text, or token ids
ChatMessages = Sequence[Mapping[str, Any]]  # of one conversation: {"role": ..., "content": ...}


class StructuredOutput(TypedDict, total=False):
    """What the output must match: one of these fields, as over HTTP (docs/http.md)."""

    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    guided_json: str | Mapping[str, Any]
    guided_regex: str
    guided_choice: Sequence[str]
    guided_grammar: str
    guided_whitespace_pattern: str
    json_whitespace: str


@dataclass
class Choice:
    """One output. `finish_reason` is stop, length or error; `stop` the string or token id that ended it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Generation:
    """A prompt with its `n` outputs."""

    prompt: str | None
    prompt_ids: list[int]
    choices: list[Choice]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after its first, where asked for

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Embedding:
    """A prompt as a vector of length 1 (L2)."""

    prompt: str | None
    prompt_ids: list[int]
    values: list[float]
    num_cached_tokens: int = 0


class _ChoiceBuilder:
    """Builds a choice from the tokens of steps."""

    def __init__(self, result: Generation, choice: Choice, stream: TextStream) -> None:
        self._result, self._choice, self._stream = result, choice, stream

    def take_prompt(self, logprobs: list[TokenLogprobs] | None) -> None:
        """Keep the log-probabilities of the prompt's tokens."""
        if logprobs is not None:
            self._result.prompt_logprobs = logprobs

    def push(self, tokens: list[int], logprobs: list[TokenLogprobs] | None, row: Finished | None) -> bool:
        """Take tokens and perhaps the end. Returns whether a stop string ended it here."""
        choice = self._choice
        by_id = row is not None and row.reason == "stop" and not isinstance(row.detail, str)
        delta = self._stream.push(tokens, final=row is not None, stop_token=by_id and bool(tokens))
        choice.text += delta.text
        choice.token_ids = (choice.token_ids + tokens)[: delta.num_tokens]
        if choice.logprobs is not None:
            choice.logprobs = (choice.logprobs + (logprobs or []))[: delta.num_tokens]
        if delta.stop is not None:
            choice.finish_reason, choice.stop = "stop", delta.stop
        elif row is not None:
            choice.finish_reason = row.reason
            if isinstance(row.detail, tuple):
                choice.error = ": ".join(row.detail[:2])
            else:
                choice.stop = row.detail or None
        if row is not None:
            self._result.num_cached_tokens = max(self._result.num_cached_tokens, row.num_cached)
        return delta.stop is not None


class _ProgressBar:
    """A progress bar on a terminal."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="output")
        self._tokens = 0
        self._begin = time.monotonic()

    def advance(self, num_tokens: int, *, done: bool) -> None:
        """Count new tokens, and an output that is complete."""
        self._tokens += num_tokens
        if done:
            self._bar.set_postfix_str(f"{self._tokens / (time.monotonic() - self._begin):.0f} tokens/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


class LLM:
    """A loaded model. `settings` are sections of the configuration: LLM("folder", cache={"num_blocks": 512}).

    Not for several threads at once: it is the service that serves many.
    """

    def __init__(
        self, folder: str | os.PathLike[str] = "", /, *, config: Config | None = None, **settings: Mapping[str, Any]
    ) -> None:
        for section, values in settings.items():
            if not isinstance(values, Mapping):
                raise ConfigError(section, "must be keys of a section: LLM(cache={'num_blocks': 512}), for one")
        config = (config or load_config(environment={})).with_values(**settings)
        self.config = config.with_values(model={"path": os.fspath(folder)}) if folder else config
        card = read_model_card(self.config)
        self.tokenizer = Tokenizer.from_files(card.files)
        self.chat_template = ChatTemplate.from_files(card.files)
        self._eos, self._pooling = frozenset(card.eos_token_ids), card.pooling
        if self.config.engine.executor == "torch" and self.config.engine.check_memory:
            wanted = executor_settings(self.config)
            require_fit(wanted, make_plan(wanted, device_memory(wanted.device)))
        self._executor: Executor
        if self.config.engine.executor == "upstream":
            raise ConfigError("engine.executor", "upstream is the engine's alone: the class LLM computes by itself")
        if self.config.engine.executor != "torch":
            from inferengine.engine.process import build_executor as build_named_executor  # and what serves

            self._executor = build_named_executor(self.config)
        elif self.config.engine.tensor_parallel > 1:
            from inferengine.executor.parallel.executor import build_parallel_executor  # and torch.distributed

            self._executor = build_parallel_executor(self.config)
        else:
            self._executor = build_executor(self.config)
        self.capacity = self._executor.load(lambda phase, share: None)
        self._executor.warm_up(lambda phase, share: None)
        self._limits = admission_limits(self.config, self.capacity)
        options = scheduler_options(self.config, self.capacity, is_service=False)
        self.core = EngineCore(
            self._executor,
            self.capacity,
            options,
            clock=time.monotonic,
            thread_clock=time.thread_time,
            proposer=build_proposer(self.config.speculation.method, self.capacity),
        )
        self._grammars = GrammarCompiler(
            card.files["tokenizer.json"].decode(),
            vocab_size=self.capacity.vocab_size,
            eos_token_ids=list(card.eos_token_ids),
            limits=self.config.limits,
            max_lexers=num_mask_threads(),
        )
        self._random = random.Random(self.config.engine.seed or None)
        self._next_uid = 0
        self._closed = False

    # -- calls -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        progress: bool = True,
        **structured: Unpack[StructuredOutput],
    ) -> list[Generation]:
        """Complete each prompt (text or token ids); the results come in the order of the prompts.

        `params` is one for all or one each; `adapter` names a LoRA adapter of the folder model.adapters; `structured`
        takes response_format, structured_outputs or guided_*.
        Raises InvalidRequest naming the field of the first request that cannot run (then nothing has run), and
        TypeError for an unknown name in `structured`.
        """
        if unknown := sorted(structured.keys() - StructuredOutput.__annotations__.keys()):
            known = sorted(StructuredOutput.__annotations__)
            if (name := unknown[0]) in NAMES:
                raise TypeError(f"there is no argument {name}: it belongs in params, as SamplingParams({name}=...)")
            raise TypeError(f"there is no argument {unknown[0]}{suggestion(unknown[0], known)}")
        self._refuse_scores()
        if not self.capacity.is_causal:
            raise InvalidRequest("prompts", "the model makes embeddings alone: call embed", code="unsupported")
        listed = self._as_list(prompts)
        per_prompt = _params_of_each(params, len(listed))
        spec, number = read_grammar(structured), self._adapter(adapter)
        jobs = [self._job(prompt, chosen, spec, number) for prompt, chosen in zip(listed, per_prompt, strict=True)]
        return self._run(jobs, spec, progress)

    def chat(
        self,
        conversations: ChatMessages | Sequence[ChatMessages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        progress: bool = True,
        template: Mapping[str, Any] | None = None,
        **structured: Unpack[StructuredOutput],
    ) -> list[Generation]:
        """Answer one conversation or several: lists of {"role", "content"}.

        `template` holds variables for the chat template. Otherwise as `generate`. Raises InvalidRequest, also for
        a model without a chat template.
        """
        if self.chat_template is None:
            raise InvalidRequest("messages", "the model has no chat template: use generate", code="unsupported")
        if isinstance(conversations, str | Mapping) or not isinstance(conversations, Sequence):
            raise InvalidRequest("messages", 'must be a list of {"role", "content"}, or a list of such lists')
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Any = [conversations] if single else conversations
        rendered = [self.chat_template.render(check_messages(list(each)), **(template or {})) for each in listed]
        prompts = [self.tokenizer.encode(_characters("messages", text), add_special_tokens=False) for text in rendered]
        return self.generate(prompts, params, adapter=adapter, progress=progress, **structured)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        adapter: str | None = None,
        progress: bool = True,
    ) -> list[Embedding]:
        """Return the embedding of each prompt (text or token ids), in their order: of the final hidden states the last
        token's or the mean, as `pooling` or else model.pooling says.

        Raises InvalidRequest naming the field of the first prompt that cannot run (then nothing has run), and
        InferEngineError when computing one fails.
        """
        self._refuse_scores()
        pooling = pooling or self._pooling
        if pooling not in POOLINGS:
            raise InvalidRequest("pooling", f"must be one of {', '.join(POOLINGS)}")
        listed, number = self._as_list(prompts), self._adapter(adapter)
        ids = [self._token_ids(prompt) for prompt in listed]
        for each in ids:
            check_prompt(len(each), self._limits)
        first = self._next_uid + 1
        self._next_uid += len(ids)
        waiting = set(range(first, first + len(ids)))
        for uid, each in enumerate(ids, first):
            arrival_s = time.monotonic()
            self.core.submit(
                Request(uid, each, SamplingParams(), max_tokens=0, arrival_s=arrival_s, pooling=pooling, adapter=number)
            )
        vectors: dict[int, bytes] = {}
        cached: dict[int, int] = {}
        bar = _ProgressBar(len(ids)) if progress and sys.stderr.isatty() else None
        try:
            while waiting:
                output = self.core.step()
                if output is None:
                    continue
                vectors |= output.embeddings or {}
                for row in output.finished:
                    if isinstance(row.detail, tuple):
                        raise InferEngineError(*row.detail[:2])
                    waiting.discard(row.uid)
                    cached[row.uid] = row.num_cached
                    if bar is not None:
                        bar.advance(row.num_prompt, done=True)
        finally:
            for uid in waiting:
                self.core.cancel(uid)
            if bar is not None:
                bar.close()
        return [
            Embedding(prompt if isinstance(prompt, str) else None, each, to_floats(vectors[uid]), cached[uid])
            for uid, (prompt, each) in enumerate(zip(listed, ids, strict=True), first)
        ]

    def close(self) -> None:
        """Give the device's memory back. Any number of times."""
        if self._closed:
            return
        self._closed = True
        self._grammars.close()
        self._executor.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _refuse_scores(self) -> None:
        if self.capacity.scores:
            raise InvalidRequest("prompts", "the model scores pairs of texts: POST /v1/rerank", code="unsupported")

    def _as_list(self, prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """Return one prompt or several as a list."""
        if self._closed:
            raise InferEngineError("engine_unavailable", "This LLM has been closed: make another one.")
        if isinstance(prompts, str):
            return [prompts]
        if not isinstance(prompts, Sequence):
            raise InvalidRequest("prompts", "must be a text, token ids, or a list of either")
        one: Any = prompts
        return [one] if one and isinstance(one[0], int) else list(one)

    def _adapter(self, name: str | None) -> int:
        """Return the number of a loaded adapter; 0: none."""
        if name is None:
            return 0
        adapters: AdapterStore | None = getattr(self._executor, "adapters", None)
        numbers = {} if adapters is None else adapters.names()
        if name not in numbers:
            known = ", ".join(sorted(numbers)) or "none: set model.adapters"
            raise InvalidRequest("adapter", f"there is no adapter {name!r}; loaded: {known}", code="model_not_found")
        return numbers[name]

    def _job(self, prompt: Prompt, params: SamplingParams, spec: GrammarSpec | None, adapter: int) -> _Job:
        ids = self._token_ids(prompt)
        params = from_map(params.to_map())  # as a client's are read: SamplingParams(stop="one text") is one stop string
        validate(params, vocab_size=self.capacity.vocab_size, limits=self.config.limits)
        if spec is not None:
            validate_grammar(spec, self.config.limits)
            self._grammars.compile(spec)
        max_tokens = resolve_max_tokens(len(ids), params.max_tokens, self._limits, min_tokens=params.min_tokens)
        return _Job(prompt if isinstance(prompt, str) else None, ids, params, max_tokens, adapter)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if prompt == "":
            raise InvalidRequest("prompt", "must not be empty")
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt)
        ):
            raise InvalidRequest("prompt", "must be a text or a list of token ids")
        ids = self.tokenizer.encode(_characters("prompt", prompt)) if isinstance(prompt, str) else list(prompt)
        if any(not 0 <= token < self.capacity.vocab_size for token in ids):
            raise InvalidRequest("prompt", f"a token id is outside the vocabulary of {self.capacity.vocab_size}")
        return ids

    def _run(self, jobs: list[_Job], spec: GrammarSpec | None, progress: bool) -> list[Generation]:
        outputs: dict[int, _ChoiceBuilder] = {}
        results: list[Generation] = []
        for job in jobs:
            choices = [Choice(logprobs=None if job.params.logprobs is None else []) for _ in range(job.params.n)]
            results.append(Generation(job.prompt, job.prompt_ids, choices))
            self._submit(job, spec, results[-1], outputs)
        bar = _ProgressBar(len(outputs)) if progress and sys.stderr.isatty() else None
        try:
            while self.core.has_work:
                output = self.core.step()
                if output is not None:
                    self._take_output(output, outputs, bar)
        finally:
            for uid in list(outputs):
                self.core.cancel(uid)
            if bar is not None:
                bar.close()
        return results

    def _submit(
        self, job: _Job, spec: GrammarSpec | None, result: Generation, outputs: dict[int, _ChoiceBuilder]
    ) -> None:
        first = None
        grammars = [] if spec is None else self._grammars.compile_many(spec, len(result.choices))
        seed = job.params.seed if job.params.seed is not None else self._random.randrange(MAX_SEED)
        for index, choice in enumerate(result.choices):
            self._next_uid += 1
            uid = self._next_uid
            self.core.submit(
                Request(
                    uid=uid,
                    prompt_ids=job.prompt_ids,
                    params=of_choice(job.params, index),
                    adapter=job.adapter,
                    max_tokens=job.max_tokens,
                    eos_token_ids=self._eos,
                    seed=choice_seed(seed, index),
                    choice=index,
                    fork_of=first,
                    arrival_s=time.monotonic(),
                    grammar=spec,
                )
            )
            first = first or uid
            if grammars:
                self.core.grammar_ready(uid, grammars[index])
            stream = TextStream(
                self.tokenizer,
                stop=job.params.stop,
                include_stop=job.params.include_stop_str_in_output,
                skip_special_tokens=job.params.skip_special_tokens,
                min_tokens=job.params.min_tokens,
                context_ids=job.prompt_ids[-4:],
            )
            outputs[uid] = _ChoiceBuilder(result, choice, stream)

    def _take_output(self, step: StepOutput, outputs: dict[int, _ChoiceBuilder], bar: _ProgressBar | None) -> None:
        ended = {row.uid: row for row in step.finished}
        fresh: dict[int, list[int]] = {}
        for uid, token in zip(step.uids, step.token_ids, strict=True):
            fresh.setdefault(uid, []).append(token)
        for uid in fresh.keys() | ended.keys():
            output, row = outputs.get(uid), ended.get(uid)
            if output is None:
                continue
            output.take_prompt((step.prompt_logprobs or {}).get(uid))
            stopped = output.push(fresh.get(uid, []), (step.logprobs or {}).get(uid), row)
            if stopped and row is None:
                self.core.cancel(uid)
            if stopped or row is not None:
                del outputs[uid]
            if bar is not None:
                bar.advance(len(fresh.get(uid, [])), done=stopped or row is not None)


@dataclass(frozen=True)
class _Job:
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    adapter: int


def _characters(field: str, text: str) -> str:
    """Return the text. Raises InvalidRequest where part of it is no character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(field, HALF_PAIR) from None
    return text


def _params_of_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise InvalidRequest("params", "must be SamplingParams(max_tokens=16, ...), or a list with one for each prompt")
    if len(params) != count:
        raise InvalidRequest("params", f"there are {count} prompts and {len(params)} parameter sets")
    return list(params)
