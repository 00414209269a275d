"""Each number format on the card, held against the same model in fp32: greedy outputs of the embedded model.

What a format generates is read again in fp32 with the log-probability of every token. The loss of a token is how far
its log-probability lies below that of the likeliest one: 0 where fp32 would have chosen it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from inferengine import LLM, SamplingParams

PROMPTS = [
    "Once upon a time there was a small dog",
    "What is a KV cache?",
    "The capital of France is",
    "Lily went to the park with her mother. She",
    "def add(a, b):",
    "One day, a boy named Tom found a key in the garden.",
    "Tell me a story about a cat and a bird.",
    "3 + 4 =",
] * 4
OUTPUT_TOKENS = 48
# Settings, then the bounds: mean loss of a token in nats, share of tokens that fp32 would have chosen.
FORMATS: dict[str, tuple[dict[str, Any], float, float]] = {
    "float32": ({"model": {"dtype": "float32"}}, 1e-4, 0.999),
    "bfloat16": ({"model": {"dtype": "bfloat16"}}, 0.01, 0.97),
    "float16": ({"model": {"dtype": "float16"}}, 0.005, 0.98),
    "fp8": ({"model": {"dtype": "bfloat16", "quantization": "fp8"}}, 0.03, 0.93),
    "fp8_block": ({"model": {"dtype": "bfloat16", "quantization": "fp8_block"}}, 0.03, 0.93),
    "fp8 cache": ({"model": {"dtype": "bfloat16"}, "cache": {"dtype": "fp8"}}, 0.03, 0.93),
    "int8": ({"model": {"dtype": "bfloat16", "quantization": "int8"}}, 0.02, 0.95),
    "int8_w8a8": ({"model": {"dtype": "bfloat16", "quantization": "int8_w8a8"}}, 0.03, 0.93),
    "int4": ({"model": {"dtype": "bfloat16", "quantization": "int4"}}, 0.25, 0.75),
}


def engine(settings: dict[str, Any]) -> LLM:
    values = {section: dict(keys) for section, keys in settings.items()}
    values["engine"] = {"device": "cuda", "max_num_seqs": 64, **values.get("engine", {})}
    values["cache"] = {"num_blocks": 512, **values.get("cache", {})}  # other parts run on the card beside this one
    return LLM("", **values)


def read_again(reference: LLM, outputs: Sequence[tuple[list[int], list[int]]]) -> tuple[float, float]:
    """Return the mean loss of the tokens of these (prompt, output), and the share of them that `reference`, in fp32,
    would have chosen."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    results = reference.generate([[*prompt, *output] for prompt, output in outputs], params, progress=False)
    losses = []
    for (_, output), result in zip(outputs, results, strict=True):
        assert result.prompt_logprobs is not None  # asked for
        losses += [max(0.0, row.top_logprobs[0] - row.logprob) for row in result.prompt_logprobs[-len(output) :]]
    return sum(losses) / len(losses), sum(loss == 0.0 for loss in losses) / len(losses)


def main() -> int:
    wrong = []
    generated = {}
    for name, (settings, _, _) in FORMATS.items():
        with engine(settings) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            generated[name] = [
                (result.prompt_ids, list(result.choices[0].token_ids))
                for result in llm.generate(PROMPTS, params, progress=False)
            ]
    with engine(FORMATS["float32"][0]) as reference:
        for name, outputs in generated.items():
            mean, chosen = read_again(reference, outputs)
            most_loss, least_chosen = FORMATS[name][1:]
            good = mean <= most_loss and chosen >= least_chosen
            wrong += [] if good else [name]
            text = f"mean loss {mean:.4f} (at most {most_loss}), fp32's choice {chosen:.3f} (at least {least_chosen})"
            num_tokens = sum(len(output) for _, output in outputs)
            print(f"{'' if good else 'FAIL: '}{name:10} {num_tokens} tokens, {text}", flush=True)
    print(f"{len(FORMATS)} number formats, wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
