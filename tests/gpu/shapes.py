"""Public shapes on the card, cut to their first layers: greedy outputs in bfloat16, held against transformers in fp32.

python -m tests.gpu.shapes [NAME ...] [--device cpu]        names of benchmarks.shapes

Weights are random, heads, widths and vocabulary those of the published model, so each shape takes the kernels that it
takes when it serves. Each completes 1, 16 and 200 prompts at once, and one that is longer than its window.
transformers then reads every prompt with its output, in fp32 and in bfloat16. The engine's log-probabilities may be
1.5 times as far from fp32's as transformers' own in bfloat16 are, since its sums have another order. The same bound
holds for how much less likely its tokens are than the likeliest.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.shapes import SHAPES, write_tokenizer
from inferengine import LLM, SamplingParams

# Odd widths and ratios of query to KV heads (6, 4 and 16 to 1), heads of 256 and of 80, norms behind blocks, windows.
DEFAULT = ("qwen2.5-1.5b", "gemma-3-1b", "glm-4-9b", "stablelm-3b")
NUM_LAYERS = 4
OUTPUT_TOKENS = 12
LONGEST = 6000  # tokens of the long prompt, where the model's context allows
BATCHES = ((1, 700, 700), (16, 1, 300), (200, 5, 40))  # prompts, the shortest and the longest of them in tokens


class Output(NamedTuple):
    """What the engine made of a prompt: token ids, and the log-probability of each."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Differences(NamedTuple):
    """Of all output tokens, in nats: how far the engine's and transformers' log-probabilities in bfloat16 are from
    fp32's, on average; how far fp32's of the engine's tokens are below fp32's highest, on average and at most."""

    engine: float
    transformers: float
    loss: float
    most_loss: float

    @property
    def are_small(self) -> bool:
        """Whether the engine is as near as the rounding of bfloat16 explains."""
        least = self.transformers
        return self.engine <= 1.5 * least and self.loss <= 1.5 * least and self.most_loss <= 30 * least


def cut(name: str, num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """Return the configuration of a shape with its first layers, so many that each kind of layer is among them."""
    values = dict(SHAPES[name])
    layers = max(num_layers, values.get("sliding_window_pattern") or 0)
    return {**values, "num_hidden_layers": min(layers, values["num_hidden_layers"])}


def random_model(folder: Path, device: torch.device) -> torch.nn.Module:
    """Return transformers' model of config.json in bfloat16 with random weights, which it saves to the folder.

    Products keep the size of their input, and scores of attention have a deviation of about 2: so a few of the keys
    have most of the weight, and a wrong one is seen. Logits have a deviation of 3. Where the embeddings are the head,
    too, they are small and the last norm's gain is large: else each token's own logit is the highest.
    """
    config = AutoConfig.from_pretrained(folder)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    is_tied = config.tie_word_embeddings
    generator = torch.Generator(device).manual_seed(0)
    for place, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device, dtype=torch.bfloat16)
        if parameter.ndim == 1:
            is_score, is_last = place.endswith(("q_norm.weight", "k_norm.weight")), place == "model.norm.weight"
            parameter.data.add_(noise.mul_(0.1)).add_(0.5 if is_score else 14.0 if is_last and is_tied else 0.0)
        else:
            is_score = any(part in place for part in ("q_proj", "k_proj", "qkv_proj"))
            factor = 1.5 if is_score else 3.0 if "lm_head" in place else 0.2 if "embed" in place and is_tied else 1.0
            parameter.data.copy_(noise.mul_(factor * parameter.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    return model


def prompts_of(vocab_size: int, context: int) -> list[list[list[int]]]:
    """Return batches of prompts of random tokens; the last batch is the long one."""
    draw = random.Random(0)
    lengths = [[draw.randint(least, most) for _ in range(count)] for count, least, most in BATCHES]
    lengths.append([min(LONGEST, context - OUTPUT_TOKENS)])
    return [[[draw.randrange(3, vocab_size) for _ in range(length)] for length in batch] for batch in lengths]


def generate(folder: Path, batches: list[list[list[int]]], device: str) -> list[Output]:
    """Complete the prompts by the engine, a batch at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0)
    settings = {
        "model": {"dtype": "bfloat16", "max_model_len": len(batches[-1][0]) + OUTPUT_TOKENS},
        "engine": {"device": device, "max_num_seqs": 256, "tune": "0"},  # what a busy card measures is not kept
        "cache": {"num_blocks": 512, "prefix_caching": False},  # other parts run on the card beside this one
    }
    outputs = []
    with LLM(folder, **settings) as llm:
        for batch in batches:
            for result in llm.generate(batch, params, progress=False):
                choice = result.choices[0]
                assert choice.logprobs is not None  # asked for
                outputs.append(Output(result.prompt_ids, choice.token_ids, [row.logprob for row in choice.logprobs]))
    return outputs


@torch.inference_mode()
def read(model: torch.nn.Module, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return the log-probabilities [output tokens, vocabulary] that a model of transformers has for each next token."""
    ids = torch.tensor([prompt + output[:-1]], device=next(model.parameters()).device)
    return model(ids, logits_to_keep=len(output)).logits[0].float().log_softmax(-1)


def differences(model: torch.nn.Module, outputs: list[Output]) -> Differences:
    """Hold the engine's outputs and the model, which is in bfloat16, against the model in fp32."""
    exact = copy.deepcopy(model).float()
    ours, theirs, losses = [], [], []
    for output in outputs:
        at = torch.tensor(output.tokens)[:, None]
        reference, rounded = (read(each, output.prompt, output.tokens).cpu() for each in (exact, model))
        chosen = reference.gather(1, at)[:, 0]
        ours.append((torch.tensor(output.logprobs) - chosen).abs())
        theirs.append((rounded.gather(1, at)[:, 0] - chosen).abs())
        losses.append(reference.amax(-1) - chosen)
    loss = torch.cat(losses)
    return Differences(
        *(float(number) for number in (torch.cat(ours).mean(), torch.cat(theirs).mean(), loss.mean(), loss.amax()))
    )


def check(name: str, device: str) -> bool:
    """Compare one shape; print a line. Returns whether it is within the bounds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder, values = Path(scratch), cut(name)
        (folder / "config.json").write_text(json.dumps(values))
        write_tokenizer(folder, values["vocab_size"])
        model = random_model(folder, torch.device(device))
        outputs = generate(folder, prompts_of(values["vocab_size"], values["max_position_embeddings"]), device)
        generated = time.monotonic()
        found = differences(model, outputs)
    num_tokens = sum(len(output.tokens) for output in outputs)
    print(
        f"{'' if found.are_small else 'FAIL: '}{name:14} {num_tokens} tokens, nats from fp32: {found.engine:.5f} "
        f"(transformers in bfloat16 {found.transformers:.5f}), below the likeliest {found.loss:.5f}, at most "
        f"{found.most_loss:.4f}; {generated - begin:.0f} + {time.monotonic() - generated:.0f} s",
        flush=True,
    )
    return found.are_small


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    names = options.names or DEFAULT
    wrong = [name for name in names if not check(name, options.device)]
    print(f"{len(names)} shapes, wrong: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
