"""Output that an earlier engine gave: read it from a SUBMIT, check it, and replay the grammar over it.

A resumed request is in the state of one that was preempted: its tokens are known and none of them is computed. What is
drawn next depends on (seed, position) and on the tokens, so the whole output is what one engine would have given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

from inferengine.core.constraints import Grammar
from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams
from inferengine.wire import codec
from inferengine.wire.messages import Submit

TOKENS_PER_LOOK = 256  # replayed between two checks whether the request is still wanted
MAX_STALLS = 2  # a request that was in flight at so many stalled steps is not run again

PriorOutputs: TypeAlias = "Sequence[array[int] | None]"  # per choice; None: it has ended, and is not run again
ReplayDone = Callable[[list[Grammar] | InferEngineError], None]


def read_resume(message: Submit, params: SamplingParams, *, vocab_size: int, max_model_len: int) -> PriorOutputs | None:
    """Read the output so far of each choice; None for a request that begins. Raises InferEngineError."""
    if message.stalls >= MAX_STALLS:
        text = f"The request was in flight at {message.stalls} stalled steps: it is not run again."
        raise InferEngineError("engine_stalled", text, field="stalls")
    if message.resume is None:
        return None
    if message.reply == "embedding":
        raise InvalidRequest("resume", "an embedding has no output to go on from: leave it out")
    if len(message.resume) != params.n:
        raise InvalidRequest("resume", f"must have one entry for each of the {params.n} choices (params.n)")
    for choice, part in enumerate(message.resume):  # before anything is done that takes longer for more of them
        if part is not None and len(part) > 4 * max_model_len:
            raise InvalidRequest(
                f"resume[{choice}]", f"has {len(part) // 4} tokens; the model's length allows {max_model_len}"
            )
    outputs = [None if part is None else codec.from_u32(part, "resume") for part in message.resume]
    if all(output is None for output in outputs):
        raise InvalidRequest("resume", "every choice has ended: there is nothing to go on with")
    for choice, output in enumerate(outputs):
        if output and (highest := max(output)) >= vocab_size:
            raise InvalidRequest(
                f"resume[{choice}]", f"token id {highest} is outside the vocabulary of {vocab_size}: send what came"
            )
    if params.seed is None and not params.is_greedy and any(outputs):
        raise InvalidRequest("params.seed", "is missing: the output so far was drawn with one (ACCEPT told it)")
    return outputs


def check_outputs(
    outputs: PriorOutputs, params: SamplingParams, max_tokens: int, eos_token_ids: frozenset[int]
) -> None:
    """Raise InvalidRequest for output that the request could not have given: too much of it, or some after its end."""
    stops = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stops |= eos_token_ids
    for choice, output in enumerate(outputs):
        if output is None:
            continue
        if len(output) > max_tokens:
            raise InvalidRequest(
                f"resume[{choice}]", f"has {len(output)} tokens; max_tokens and the model's length allow {max_tokens}"
            )
        begin = max(params.min_tokens - 1, 0)
        if stops and any(token in stops for token in output[begin:-1]):
            raise InvalidRequest(f"resume[{choice}]", "has tokens after a stop token, where the choice had ended")


class GrammarReplay:
    """Replays the output so far through grammars, in a thread of its own. `deliver` takes a call to the I/O thread."""

    def __init__(self, deliver: Callable[[Callable[[], None]], None]) -> None:
        self._deliver = deliver
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inferengine-replay")

    def advance(
        self, grammars: list[Grammar], outputs: PriorOutputs, done: ReplayDone, is_wanted: Callable[[], bool]
    ) -> None:
        """Replay; `done` gets the grammars of the choices that go on, each at the end of its output, or the error.

        `is_wanted` is asked in this thread; a replay that is not wanted any more is given up."""
        self._pool.submit(self._work, grammars, outputs, done, is_wanted)

    def close(self) -> None:
        """Drop the replays that wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(
        self, grammars: list[Grammar], outputs: PriorOutputs, done: ReplayDone, is_wanted: Callable[[], bool]
    ) -> None:
        outcome: list[Grammar] | InferEngineError
        try:
            outcome = advance(grammars, outputs, is_wanted)
        except InferEngineError as error:
            outcome = error
        except Exception as error:  # a grammar library may fail in any way
            outcome = InferEngineError("engine_error", f"The grammar failed: {error}")
        self._deliver(partial(done, outcome))


def advance(
    grammars: list[Grammar], outputs: PriorOutputs, is_wanted: Callable[[], bool] = lambda: True
) -> list[Grammar]:
    """Advance one grammar for each choice that goes on to the end of its output. Raises InvalidRequest."""
    live = [(choice, output) for choice, output in enumerate(outputs) if output is not None]
    for grammar, (choice, output) in zip(grammars, live, strict=True):
        for place, token_id in enumerate(output):
            if not place % TOKENS_PER_LOOK and not is_wanted():
                raise InferEngineError("cancelled", "Nobody waits for it any more.")
            if grammar.is_terminated() or not grammar.accept(token_id):
                raise InvalidRequest(f"resume[{choice}]", f"the grammar does not allow its token {place}")
    return grammars
