"""An FP8 KV cache on the CPU: near the model's own answers, whatever the family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inferengine.layers.attention import Attention
from tests.executor.engine import Engine
from tests.models.checkpoints import logits_reference, make_model, save

PROMPT = [(7 * index) % 301 for index in range(40)]


def logprobs_of(engine: Engine) -> list[float]:
    uid = engine.submit(PROMPT, 6, logprobs=0)
    engine.run()
    return [item.logprob for item in engine.logprobs[uid]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2"])
def test_logprobs_are_near_those_of_a_full_cache(family: str, tmp_path: Path) -> None:
    model = make_model(family, initializer_range=0.05)
    folder = save(model, tmp_path)
    small = Engine(folder, cache={"dtype": "fp8"})
    assert all(layer.dtype == torch.float8_e4m3fn for layer in small.executor.kv.layers)
    uid = small.submit(PROMPT, 6, logprobs=0)
    small.run()
    expected = torch.log_softmax(logits_reference(model, PROMPT + small.outputs[uid]), -1)
    for index, (token, item) in enumerate(zip(small.outputs[uid], small.logprobs[uid], strict=True)):
        assert item.logprob == pytest.approx(float(expected[len(PROMPT) - 1 + index, token]), abs=0.15)
    plain = [item.logprob for item in small.logprobs[uid]]
    assert plain != logprobs_of(Engine(folder)), "codes of 8 bits cannot give the very same numbers"


def test_scales_follow_each_layers_magnitudes(tmp_path: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1000)
    engine = Engine(save(model, tmp_path), cache={"dtype": "fp8"})
    scales = [module.kv_scales for module in engine.executor.model.modules() if isinstance(module, Attention)]
    assert scales[1][1] >= 250 * scales[0][1]
    assert scales[1][0] == pytest.approx(scales[0][0], rel=4)


def test_an_fp8_cache_holds_four_times_the_tokens_of_fp32(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    full, small = (Engine(folder, cache={"dtype": dtype}).executor.kv.num_bytes for dtype in ("auto", "fp8"))
    assert full == 4 * small


def test_an_fp8_cache_supports_swapping_and_prefix_caching(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    prompts = [[index + 3] * 12 for index in range(4)]
    roomy = Engine(folder, cache={"dtype": "fp8"}, budget=64).generate(prompts, 20)
    tight = Engine(folder, cache={"dtype": "fp8"}, budget=64, num_blocks=9, preemption="swap")
    assert tight.generate(prompts, 20) == roomy
    assert tight.core.scheduler.stats.num_preemptions > 0
