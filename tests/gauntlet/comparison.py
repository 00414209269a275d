"""Whether an outcome is the expected one. Every difference is one line that begins with its kind."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.gauntlet.asks import Ask
from tests.gauntlet.outcomes import Choice, Outcome, Row
from tests.gauntlet.reference import NUDGE, TIE_MARGIN, Nudges, Reference

MAX_TIES = 3  # that one output may have
GONE = {"engine_restarted", "engine_unavailable"}  # what a request may end with when its engine is killed


@dataclass(frozen=True)
class Tolerance:
    """How far apart numbers may be. `tokens`: whether tokens are compared at all (fp32), or only by margins (bf16)."""

    logprob: float = 2e-3
    embedding: float = 1e-4
    tokens: bool = True


TOLERANCES = {"float32": Tolerance(), "bfloat16": Tolerance(logprob=0.5, embedding=0.1, tokens=False)}


def compare(
    ask: Ask,
    outcome: Outcome,
    reference: Reference,
    tolerance: Tolerance,
    *,
    killed: bool,
    kills_are_seen: bool,
    may_overload: bool,
) -> list[str]:
    """Return the differences. `killed`: the engine was killed in this round; `kills_are_seen`: then requests may end
    with an error. `may_overload`: the configuration ends requests rather than have others wait."""
    found = [f"problem: {problem}" for problem in outcome.problems]
    if killed and kills_are_seen and outcome.problems:
        found = []  # a connection that broke with the engine
    expected = reference.answer(ask, outcome.prompt_ids)
    allowed = set()
    if killed:
        allowed |= {"engine_unavailable"}  # asked while there was no engine: 503, to be asked again
    if killed and kills_are_seen:
        allowed |= GONE
    if may_overload:
        allowed |= {"overloaded"}
    if "deadline_s" in ask.options:
        allowed |= {"deadline_exceeded"}
    if outcome.left:
        allowed |= {"cancelled", "engine_unavailable"}
    if outcome.refused in allowed:
        return found
    if expected.refused is not None or outcome.refused is not None:
        return found + _compare_refusals(outcome, expected)
    if ask.reply == "embedding":
        return found + _compare_embeddings(outcome, expected, tolerance, allowed)
    if outcome.prompt_ids is not None and expected.prompt_ids != outcome.prompt_ids:
        found.append(f"prompt: tokens {outcome.prompt_ids} are not {expected.prompt_ids}")
    for index, choice in enumerate(outcome.choices):
        if choice.ends > 1:
            found.append(f"ends: choice {index} has {choice.ends} terminal events")
        if choice.ends == 0 and not outcome.left:
            found.append(f"ends: choice {index} has no terminal event")
        if (
            choice.reason in ("error", "abort")
            and choice.detail not in allowed
            and not _fails_too(choice, expected, index)
            and not (choice.reason == "abort" and outcome.left)
        ):
            found.append(f"failed: choice {index} ended with {choice.reason} {choice.detail}")
    if not outcome.left and len(outcome.choices) != len(expected.choices):
        found.append(f"choices: {len(outcome.choices)} of {len(expected.choices)}")
    if found or not ask.is_comparable or not tolerance.tokens:
        return found
    for index, choice in enumerate(outcome.choices):
        if index < len(expected.choices):
            found += _compare_choice(ask, index, choice, outcome, expected, reference, tolerance)
    if outcome.prompt_logprobs is not None and expected.prompt_logprobs is not None:
        found += _compare_rows("prompt_logprobs", outcome.prompt_logprobs, expected.prompt_logprobs, tolerance)
    elif (
        expected.prompt_logprobs
        and not outcome.left
        and all(each.reason in ("stop", "length") for each in outcome.choices)
    ):
        found.append("prompt_logprobs: there are none")
    if ask.options.get("tool_choice") == "required" and not outcome.left:
        found += _check_calls(outcome)
    return found


def _compare_refusals(outcome: Outcome, expected: Outcome) -> list[str]:
    """Compare refusals: a request that the plain engine refuses or fails must be refused or fail, and no other may."""
    if expected.refused is not None and outcome.refused is not None:
        if outcome.refused == expected.refused or {outcome.refused, expected.refused} <= {
            "invalid_request",
            "unsupported",
        }:
            return []
        return [f"refused: with {outcome.refused}, expected {expected.refused}: {outcome.message}"]
    if expected.refused is not None:
        return [] if outcome.left else [f"refused: it was taken, expected {expected.refused} {expected.message}"]
    if any(choice.reason == "error" for choice in expected.choices):
        return []  # alone it fails as well
    return [f"refused: {outcome.refused} {outcome.message}"]


def _fails_too(choice: Choice, expected: Outcome, index: int) -> bool:
    return any(each.reason == "error" for each in expected.choices[index : index + 1])


def _compare_embeddings(outcome: Outcome, expected: Outcome, tolerance: Tolerance, allowed: set[str]) -> list[str]:
    failed = [choice.detail for choice in outcome.choices if choice.reason in ("error", "abort")]
    if outcome.embedding is None:
        return [] if outcome.left or (failed and set(failed) <= allowed) else [f"embedding: there is none {failed}"]
    assert expected.embedding is not None
    if len(outcome.embedding) != len(expected.embedding):
        return [f"embedding: {len(outcome.embedding)} values, expected {len(expected.embedding)}"]
    worst = max(abs(a - b) for a, b in zip(outcome.embedding, expected.embedding, strict=True))
    return [f"embedding: values differ by {worst:.2g}"] if not worst <= tolerance.embedding else []


def _compare_choice(
    ask: Ask,
    index: int,
    choice: Choice,
    outcome: Outcome,
    expected: Outcome,
    reference: Reference,
    tolerance: Tolerance,
) -> list[str]:
    """Compare tokens first; where one differs that ties with the expected one, the rest is held against what follows
    then."""
    nudges: Nudges = ()
    wanted = expected.choices[index]
    whole = choice.reason in ("stop", "length")
    if choice.tokens is not None:
        while (place := _first_difference(choice.tokens, wanted.tokens or [], whole)) is not None:
            tie = _tie(ask, index, choice.tokens, wanted.tokens or [], place, nudges, outcome, reference)
            if tie is None:
                return [_told(ask, index, place, choice, wanted)]
            nudges, wanted = tie
    elif choice.text is not None and "tools" not in ask.options:
        while _disagrees(choice.text, wanted.text or "", whole):
            tie = _tie_in_text(ask, index, choice.text, wanted, nudges, outcome, reference)
            if tie is None:
                break
            nudges, wanted = tie
    where = f"choice {index}"
    found: list[str] = []
    if whole and wanted.reason != "error" and choice.tool_calls is None:
        if choice.text is not None and choice.text != wanted.text and "tools" not in ask.options:
            found.append(f"text: {where}: {choice.text!r} is not {wanted.text!r}")
        if (choice.reason, _detail(choice)) != (wanted.reason, _detail(wanted)) and not found:
            found.append(f"finish: {where}: {choice.reason} {choice.detail!r} is not {wanted.reason} {wanted.detail!r}")
    elif (
        choice.text
        and wanted.text is not None
        and "tools" not in ask.options
        and _disagrees(choice.text, wanted.text, whole=False)
    ):
        found.append(f"text: {where}: {choice.text!r} does not begin {wanted.text!r}")
    if choice.logprobs is not None and wanted.logprobs is not None:
        rows = wanted.logprobs if whole else wanted.logprobs[: len(choice.logprobs)]
        found += _compare_rows(f"logprobs: {where}", choice.logprobs, rows, tolerance)
    return found


def _first_difference(got: Sequence[int], wanted: Sequence[int], whole: bool) -> int | None:
    for place, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return place
    if len(got) > len(wanted) or (whole and len(got) < len(wanted)):
        return min(len(got), len(wanted))
    return None


def _tie(
    ask: Ask,
    index: int,
    got: list[int],
    wanted: list[int],
    place: int,
    nudges: Nudges,
    outcome: Outcome,
    reference: Reference,
) -> tuple[Nudges, Choice] | None:
    """Return the expected choice once a near tie at `place` is broken the other way; None where that is no tie."""
    if place >= min(len(got), len(wanted)) or len(nudges) >= 2 * MAX_TIES:
        return None
    scale = _sharpness(ask)
    more = (*nudges, (got[place], NUDGE * scale), (wanted[place], -NUDGE * scale))
    other = reference.answer(ask, outcome.prompt_ids, more)
    if other.refused is not None:
        return None
    choice = other.choices[index]
    return (more, choice) if (choice.tokens or [])[: place + 1] == got[: place + 1] else None


def _disagrees(got: str, wanted: str, whole: bool) -> bool:
    """Return whether a text is not the wanted one, or its beginning. One that was cut off within a character ends in
    U+FFFD."""
    return got != wanted if whole else not wanted.startswith(got.removesuffix("\ufffd"))


def _tie_in_text(
    ask: Ask, index: int, got: str, wanted: Choice, nudges: Nudges, outcome: Outcome, reference: Reference
) -> tuple[Nudges, Choice] | None:
    """Find a tie as `_tie` does where only the text is known: the expected token alone is lowered, by the whole margin,
    so that what ties with it is drawn instead. Right is what agrees with the text for longer."""
    if len(nudges) >= MAX_TIES:
        return None
    agreed = _agreed(got, wanted.text or "")
    tokens = wanted.tokens or []
    ends = [len(reference.tokenizer.decode(tokens[: place + 1])) for place in range(len(tokens))]
    first = sum(end <= agreed for end in ends)
    for place in range(max(0, first - 2), min(len(tokens), first + 2)):  # half a character may be held back
        more = (*nudges, (tokens[place], -TIE_MARGIN * _sharpness(ask)))
        other = reference.answer(ask, outcome.prompt_ids, more)
        if other.refused is None and _agreed(got, other.choices[index].text or "") > agreed:
            return more, other.choices[index]
    return None


def _agreed(one: str, other: str) -> int:
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def _sharpness(ask: Ask) -> float:
    """Return how much the penalties enlarge a logit, and with it its last bits."""
    penalty = float(ask.params.get("repetition_penalty", 1.0))
    return min(max(penalty, 1 / penalty, 1.0), 1e4)


def _told(ask: Ask, index: int, place: int, choice: Choice, wanted: Choice) -> str:
    kind = "greedy" if ask.is_greedy else "sampled"
    around = slice(max(0, place - 2), place + 3)
    got, expected = (choice.tokens or [])[around], (wanted.tokens or [])[around]
    return f"tokens: {kind} choice {index} differs at {place}: …{got} is not …{expected}"


def _detail(choice: Choice) -> object:
    return choice.detail or None  # "": the grammar is complete; HTTP tells null


def _compare_rows(
    kind: str, got: Sequence[Row | None], wanted: Sequence[Row | None], tolerance: Tolerance
) -> list[str]:
    if len(got) != len(wanted):
        return [f"{kind}: {len(got)} rows, expected {len(wanted)}"]
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one is None or other is None:
            continue
        if not near(one.logprob, other.logprob, tolerance.logprob):
            return [f"{kind}: {one.logprob:.5f} at {place} is not {other.logprob:.5f}"]
        common = one.top.keys() & other.top.keys()
        if any(not near(one.top[token], other.top[token], tolerance.logprob) for token in common):
            return [f"{kind}: alternatives at {place}: {one.top} are not {other.top}"]
        floor = min(other.top.values(), default=0.0)
        strangers = [
            token for token in one.top if token not in other.top and one.top[token] > floor + tolerance.logprob
        ]
        if strangers:
            return [f"{kind}: alternatives at {place}: {strangers} are not among {other.top}"]
    return []


def near(one: float, other: float, tolerance: float) -> bool:
    if math.isinf(one) or math.isinf(other):
        return one == other or min(one, other) < -1e4
    return abs(one - other) <= tolerance * max(1.0, abs(other) / 10)


def _check_calls(outcome: Outcome) -> list[str]:
    """Check that the calls asked for are whole and valid, unless the length cut them."""
    found = []
    for choice in outcome.choices:
        if choice.reason not in ("tool_calls",):
            continue
        for call in choice.tool_calls or []:
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                arguments = None
            if not isinstance(arguments, dict) or arguments.get("city") not in ("Paris", "Rome"):
                found.append(f"tools: {call} does not match its schema")
    return found
