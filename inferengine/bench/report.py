"""The report of a load: latencies of the good replies, throughput, goodput and errors.

TTFT is the time to the first event with output, ITL the gap between two events of a stream, TPOT a request's mean per
output token after the first, E2E the whole request. Goodput counts the requests per second that met every limit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from inferengine.bench.load_generator import LoadReply

PERCENTILES = (50, 90, 95, 99)
ROWS = {"ttft_ms": "first token", "itl_ms": "between events", "tpot_ms": "per output token", "e2e_ms": "whole request"}


def summary(values: list[float]) -> dict[str, float]:
    """Return mean and percentiles in milliseconds of values in seconds; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    shown = {
        f"p{share}": ordered[min(len(ordered) - 1, round((len(ordered) - 1) * share / 100))] for share in PERCENTILES
    }
    return {name: round(value * 1e3, 3) for name, value in {"mean": statistics.fmean(values), **shown}.items()}


def per_output_token(reply: LoadReply) -> float | None:
    """Return the seconds per output token after the first; None for fewer than two."""
    tokens = reply.usage.get("completion_tokens", len(reply.event_s))
    return (reply.ended_s - reply.event_s[0]) / (tokens - 1) if reply.event_s and tokens > 1 else None


def meets(reply: LoadReply, limits: Mapping[str, float]) -> bool:
    """Return whether a good reply kept every limit, in milliseconds by `ttft`, `tpot`, `e2e`."""
    figures = {
        "ttft": reply.event_s[0] - reply.started_s if reply.event_s else math.inf,
        "tpot": per_output_token(reply) or 0.0,
        "e2e": reply.ended_s - reply.started_s,
    }
    return reply.is_good and all(figures[name] * 1e3 <= limit for name, limit in limits.items())


def report(replies: list[LoadReply], seconds: float, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures, ready for JSON. `goodput_per_s` only with limits."""
    good = [reply for reply in replies if reply.is_good]
    output = sum(reply.usage.get("completion_tokens", len(reply.event_s)) for reply in good)
    prompt = sum(reply.usage.get("prompt_tokens", 0) for reply in good)
    return {
        "seconds": round(seconds, 3),
        "completed": len(good),
        "failed": len(replies) - len(good),
        "errors": dict(Counter(_cause(reply) for reply in replies if not reply.is_good)),
        "requests_per_s": round(len(good) / seconds, 3),
        "output_tokens_per_s": round(output / seconds, 1),
        "total_tokens_per_s": round((output + prompt) / seconds, 1),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "ttft_ms": summary([reply.event_s[0] - reply.started_s for reply in good if reply.event_s]),
        "itl_ms": summary(_gaps(good)),
        "tpot_ms": summary([value for reply in good if (value := per_output_token(reply)) is not None]),
        "e2e_ms": summary([reply.ended_s - reply.started_s for reply in good]),
        **({"goodput_per_s": round(sum(meets(r, limits) for r in replies) / seconds, 3)} if limits else {}),
    }


def standard_fields(replies: list[LoadReply], seconds: float, load: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the figures under the names that `vllm bench serve` writes, for tools that read its files."""
    good = [reply for reply in replies if reply.is_good]
    prompt = sum(reply.usage.get("prompt_tokens", 0) for reply in good)
    output = sum(reply.usage.get("completion_tokens", len(reply.event_s)) for reply in good)
    found: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S", time.gmtime()),
        "endpoint_type": "openai-chat" if load["chat"] else "openai",
        "backend": "openai-chat" if load["chat"] else "openai",
        "label": None,
        "burstiness": load["burstiness"],
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(replies),
        "request_rate": load["rate"] or "inf",
        "max_concurrency": None if load["rate"] else load["concurrency"],
        "duration": seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (prompt + output) / seconds,
    }
    values = {
        "ttft": [reply.event_s[0] - reply.started_s for reply in good if reply.event_s],
        "tpot": [value for reply in good if (value := per_output_token(reply)) is not None],
        "itl": _gaps(good),
        "e2el": [reply.ended_s - reply.started_s for reply in good],
    }
    for name, seconds_of in values.items():
        ordered = sorted(1e3 * value for value in seconds_of) or [0.0]
        found |= {
            f"mean_{name}_ms": statistics.fmean(ordered),
            f"median_{name}_ms": statistics.median(ordered),
            f"std_{name}_ms": statistics.pstdev(ordered),
            f"p99_{name}_ms": ordered[round((len(ordered) - 1) * 0.99)],
        }
    return found


def details(replies: list[LoadReply]) -> dict[str, list[Any]]:
    """Return each request's figures, in seconds, under the names of `vllm bench serve --save-detailed`."""
    first = min((reply.started_s for reply in replies), default=0.0)
    return {
        "start_times": [reply.started_s - first for reply in replies],
        "input_lens": [reply.usage.get("prompt_tokens", 0) for reply in replies],
        "output_lens": [reply.usage.get("completion_tokens", len(reply.event_s)) for reply in replies],
        "ttfts": [reply.event_s[0] - reply.started_s if reply.event_s else 0.0 for reply in replies],
        "itls": [
            [after - before for before, after in zip(reply.event_s, reply.event_s[1:], strict=False)]
            for reply in replies
        ],
        "errors": ["" if reply.is_good else _cause(reply) for reply in replies],
    }


def table(found: Mapping[str, Any]) -> str:
    """Return a report as text."""
    lines = [
        f"requests    {found['completed']:,} completed, {found['failed']:,} failed in {found['seconds']:,.2f} s",
        f"throughput  {found['requests_per_s']:,.2f} requests/s, {found['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{found['total_tokens_per_s']:,.1f} tokens/s with prompts",
    ]
    if "goodput_per_s" in found:
        lines.append(f"goodput     {found['goodput_per_s']:,.2f} requests/s within the limits")
    lines += [f"error       {count:,} times: {text}" for text, count in found["errors"].items()]
    names = ["mean", *(f"p{share}" for share in PERCENTILES)]
    lines += ["", f"{'milliseconds':<18}" + "".join(f"{name:>12}" for name in names)]
    lines += [
        f"{label:<18}" + "".join(f"{found[key][name]:>12,.2f}" for name in names)
        for key, label in ROWS.items()
        if found[key]
    ]
    return "\n".join(lines)


def _gaps(replies: list[LoadReply]) -> list[float]:
    """Return the seconds between two events of a stream, over all replies."""
    return [
        after - before for reply in replies for before, after in zip(reply.event_s, reply.event_s[1:], strict=False)
    ]


def _cause(reply: LoadReply) -> str:
    return f"{reply.status} {reply.error[:120] or 'the stream ended without a finish_reason'}"
