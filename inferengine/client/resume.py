"""How an open call goes on when its engine is lost: whether it may, what it says to the next engine, for how long.

A call is *lost* from the moment its engine is (`lost_s`), and *held* while no message of it is on its way: nothing that
an engine may still say about it is listened to. It goes on with the tokens that came; the seed, the position of each
draw and the tokens decide what follows, so its reader sees a pause and nothing else.
"""

from __future__ import annotations

from typing import Any

from inferengine.client.streams import Call
from inferengine.errors import InferEngineError
from inferengine.sampling_params import GREEDY_TEMPERATURE
from inferengine.wire.codec import to_u32
from inferengine.wire.messages import RESUME_OUTPUT, Attach, Submit, Welcome

RESUME_WAIT_S = 120.0  # default of how long an open call waits for an engine
# Times that a call is submitted again without a new token in between: a request that kills its engine each time is
# given up before the supervisor gives up the engine, after five quick failures in a row.
MAX_FRUITLESS = 4
MAX_STALLS = 2  # stalled steps that a call may have been in flight at
REATTACH_S = 15.0  # how long the request may take to be on the new engine: another client submits it again
RETRY_S, LONGEST_RETRY_S = 0.25, 5.0

LOST = frozenset({"engine_unavailable", "engine_restarted", "engine_stalled", "draining"})  # what a lost engine says
_RETRIED = frozenset({"overloaded", "rate_limited", "draining", "engine_unavailable"})


def refusal(call: Call, code: str) -> InferEngineError | None:
    """Why a call whose engine was just lost, as `code` says, cannot go on; None if it can. Counts the loss."""
    if not call.resubmit:
        return _restarted("The engine that ran this request is gone.")
    if code == "engine_stalled":
        call.num_stalls += 1
        if call.num_stalls >= MAX_STALLS:
            text = f"The request was in flight at {call.num_stalls} stalled steps: it is not run again."
            return InferEngineError("engine_stalled", text)
    num_tokens = sum(collector.num_tokens for collector in call.collectors)
    call.num_fruitless = call.num_fruitless + 1 if num_tokens == call.num_tokens_then else 1
    call.num_tokens_then = num_tokens
    if call.num_fruitless > MAX_FRUITLESS:
        return _restarted(f"The engine was lost {call.num_fruitless} times in a row before the request got on.")
    if num_tokens and _needs_seed(call):
        return _restarted("The engine that ran this request is gone, and its seed is not known.")
    return None


def misfit(call: Call, welcome: Welcome) -> InferEngineError | None:
    """Why it cannot go on at this engine, which is READY; None if it can."""
    message, model = call.origin, welcome.model
    if model is None or call.model not in (None, (model.name, model.fingerprint)):
        return _restarted("The engine that ran this request is gone; the one there is serves another model.")
    if not isinstance(message, Submit):
        return None
    if message.adapter and message.adapter not in model.adapters:
        return _restarted("The engine that ran this request is gone; the one there is has not its adapter.")
    if call.begun and RESUME_OUTPUT not in welcome.features:
        return _restarted("The engine that ran this request is gone; the one there is is too old to go on with it.")
    return None


def next_message(call: Call, welcome: Welcome, now: float) -> Submit | Attach:
    """What to say to this engine."""
    message = call.origin
    if isinstance(message, Attach):
        return attach_again(call)
    left_s = None if call.deadline_s is None else call.deadline_s - now
    message = message._replace(deadline_ms=None if left_s is None else max(1, int(left_s * 1000)))
    if RESUME_OUTPUT not in welcome.features or message.reply == "embedding" or not (call.was_accepted or call.begun):
        return message
    params: dict[str, Any] = message.params
    if call.seed is not None:
        params = {**params, "seed": call.seed}
    if any(collector.has_prompt for collector in call.collectors):
        params = {name: value for name, value in params.items() if name != "prompt_logprobs"}
    outputs = tuple(None if item.finished else to_u32(item.all_ids) for item in call.collectors)
    return message._replace(params=params, resume=outputs, stalls=call.num_stalls)


def attach_again(call: Call) -> Attach:
    """To the same request, from what has come of it."""
    reply = call.origin.reply
    cursors = tuple(c.num_characters if reply == "text" else c.num_tokens for c in call.collectors)
    return Attach(call.id, call.message.stream, cursors, reply)


def retry_after(call: Call, error: InferEngineError, now: float) -> float | None:
    """In how many seconds to ask again an engine that has just refused a lost call; None: its refusal is the end."""
    if call.lost_s is None:
        return None
    if error.code in _RETRIED and (call.was_accepted or error.code in LOST):
        return min(max(error.retry_after_s or RETRY_S, RETRY_S), LONGEST_RETRY_S)
    if error.code == "not_found" and isinstance(call.origin, Attach) and now < (call.asked_s or 0.0) + REATTACH_S:
        return RETRY_S
    return None


def _needs_seed(call: Call) -> bool:
    message = call.origin
    if not isinstance(message, Submit) or call.seed is not None or message.params.get("seed") is not None:
        return False
    return bool(message.params.get("temperature", 1.0) > GREEDY_TEMPERATURE)


def _restarted(text: str) -> InferEngineError:
    return InferEngineError("engine_restarted", text)
