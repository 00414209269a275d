"""A whole engine in process, EngineCore + Scheduler + TorchExecutor, as the tests drive it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inferengine.config import Config
from inferengine.core.scheduler.scheduler import SchedulerOptions
from inferengine.core.sequence import Finished, Request, Sequence
from inferengine.core.speculation import Proposer
from inferengine.engine.core import EngineCore
from inferengine.executor.torch_executor import build_executor
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec


class Engine:
    """Loads a checkpoint and runs requests to their end. `budget` is the token budget of a step; `model` and `cache`
    are further keys of those sections. `build` makes the executor."""

    def __init__(
        self,
        folder: Path,
        *,
        budget: int = 24,
        max_num_seqs: int = 4,
        num_blocks: int = 64,
        block_size: int = 8,
        overlap: bool = False,
        preemption: str = "preempt",
        device: str = "cpu",
        model: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        proposer: Proposer | None = None,
        swap_is_cheap: bool = False,
        build: Callable[[Config], Any] = build_executor,
        **options: Any,
    ) -> None:
        config = Config().with_values(
            model={"path": str(folder), **(model or {})},
            engine={
                "device": device,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": budget,
                "overlap": "on" if overlap else "off",
            },
            cache={"num_blocks": num_blocks, "block_size": block_size, "swap_gib": 0.01, **(cache or {})},
            scheduler={"preemption": preemption},
        )
        self.executor = build(config)
        self.capacity = self.executor.load(lambda phase, share: None)
        if swap_is_cheap:  # so that a preempted sequence is swapped, whatever this machine's times are
            self.capacity = self.capacity._replace(swap_block_s=1e-9, prefill_token_s=1.0)
        self.core = EngineCore(
            self.executor,
            self.capacity,
            SchedulerOptions(budget, max_num_seqs, preemption=preemption, **options),
            clock=lambda: 0.0,
            on_failure=_raise,
            proposer=proposer,
        )
        self.outputs: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.prompt_logprobs: dict[int, list[Any]] = {}
        self.embeddings: dict[int, list[float]] = {}
        self.finished: dict[int, Finished] = {}
        self.largest_difference = 0.0  # of log-probabilities from a reference's, where a test compares them
        self._uid = 0

    def submit(self, prompt: list[int], max_tokens: int = 64, **values: Any) -> int:
        """Queue a request, greedy unless `temperature` says otherwise; `grammar` is a compiled one. Returns its uid."""
        self._uid += 1
        fork_of, seed = values.pop("fork_of", None), values.pop("seed", 0)
        adapter, salt = values.pop("adapter", 0), values.pop("salt", b"")
        eos, grammar = frozenset(values.pop("eos", ())), values.pop("grammar", None)
        params = SamplingParams(**{"temperature": 0.0, **values})
        self.outputs[self._uid] = []
        self.logprobs[self._uid] = []
        self.core.submit(
            Request(
                uid=self._uid,
                prompt_ids=prompt,
                params=params,
                max_tokens=max_tokens,
                seed=seed,
                fork_of=fork_of,
                eos_token_ids=eos,
                adapter=adapter,
                cache_salt=salt,
                grammar=None if grammar is None else GrammarSpec("regex", ""),
            )
        )
        if grammar is not None:
            self.core.grammar_ready(self._uid, grammar)
        return self._uid

    def embed(self, prompt: list[int], pooling: str = "last", adapter: int = 0) -> int:
        """Queue an embedding request. Returns its uid."""
        self._uid += 1
        self.outputs[self._uid] = []
        params = SamplingParams()
        self.core.submit(Request(self._uid, prompt, params, max_tokens=0, pooling=pooling, adapter=adapter))
        return self._uid

    def run(self) -> Engine:
        """Run until everything has ended."""
        while self.core.has_work:
            self.step()
        return self

    def step(self) -> None:
        """Run one step; the scheduler's invariants hold after it."""
        output = self.core.step()
        if output is not None:
            for uid, token in zip(output.uids, output.token_ids, strict=True):
                self.outputs[uid].append(token)
            for uid, items in (output.logprobs or {}).items():
                self.logprobs[uid] += items
            for uid, items in (output.prompt_logprobs or {}).items():
                self.prompt_logprobs.setdefault(uid, items)  # told again after a preemption
            for uid, vector in (output.embeddings or {}).items():
                assert uid not in self.embeddings
                self.embeddings[uid] = array("f", vector).tolist()
            self.finished |= {row.uid: row for row in output.finished}
        self.core.scheduler.check()

    def generate(self, prompts: list[list[int]], max_tokens: int = 64, **values: Any) -> list[list[int]]:
        uids = [self.submit(prompt, max_tokens, **values) for prompt in prompts]
        self.run()
        return [self.outputs[uid] for uid in uids]


class Foreknowledge:
    """Proposes how a text went on before; every third time its last token is wrong. Implements Proposer."""

    on_device = False

    def __init__(self) -> None:
        self.texts: list[list[int]] = []
        self._calls = 0

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        known = list(sequence.tokens)
        found = next((text[len(known) :] for text in self.texts if text[: len(known)] == known), [])[:max_tokens]
        self._calls += 1
        return [*found[:-1], 0] if found and self._calls % 3 == 0 else found

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: `texts` are kept."""


def _raise(error: BaseException) -> None:
    raise error
