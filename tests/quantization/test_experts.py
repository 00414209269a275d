"""Experts from published layouts of quantized checkpoints, and rounded when they are loaded."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferengine.errors import ConfigError
from inferengine.kernels.experts import MX_GROUP, expert_numbers, mxfp4_numbers
from inferengine.quantization.experts import EXPERT_CODES, mxfp4_codes
from inferengine.quantization.weight import dequantize
from tests.executor.engine import Engine
from tests.models.checkpoints import logits_reference, model_of, save
from tests.models.families import BARE, CASES, EXPERTS, Case, compare
from tests.quantization.checkpoints import LAYOUTS

QWEN3_MOE = CASES["qwen3-moe"]
WHOLE_WORDS = QWEN3_MOE._replace(
    values={**QWEN3_MOE.values, "head_dim": 16, "moe_intermediate_size": 48, "intermediate_size": 96}
)
GPT_OSS = Case("GptOssConfig", {**CASES["gpt-oss"].values, "hidden_size": 64, "intermediate_size": 96})


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "quantization_config": quantization}))


def write_codes(model: Any, folder: Path, layout: str) -> Any:
    """Write a checkpoint whose products are codes of a layout, with a tensor for each expert as Qwen publishes them;
    the model that it equals."""
    values, to_codes, to_tensors = LAYOUTS[layout]
    tensors = load_file(save(model, folder) / "model.safetensors")
    for name in [name for name in tensors if re.search(r"(_proj(_with_mqa)?|\.w\d)\.weight", name)]:
        codes = to_codes(tensors.pop(name))
        stored = to_tensors(codes)
        stored.pop("bias", None)
        tensors |= {name.replace("weight", suffix): value.contiguous() for suffix, value in stored.items()}
        tensors[f"{name}.numbers"] = dequantize(codes)
    plain = {name.removesuffix(".numbers"): tensors.pop(name) for name in [*tensors] if name.endswith(".numbers")}
    plain_router = {"modules_to_not_convert": ["mlp.gate"]} if layout == "fp8-blocks" else {}
    rewrite(folder, tensors, {**values, **plain_router})
    same, beside = copy.deepcopy(model), folder / "plain"
    floats = load_file(save(same, beside) / "model.safetensors") | plain
    save_file(floats, beside / "model.safetensors", metadata={"format": "pt"})
    return same.from_pretrained(beside, attn_implementation="eager").eval()


def write_mxfp4(model: Any, folder: Path) -> Any:
    """Write a checkpoint as GPT-OSS is published. Returns the model that it equals."""
    tensors, same = load_file(save(model, folder) / "model.safetensors"), copy.deepcopy(model)
    for name, parameter in same.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        rows = parameter.data.transpose(1, 2)  # [experts, out, in]
        codes = mxfp4_codes(rows.flatten(0, 1))
        parameter.data = mxfp4_numbers(codes.codes, codes.scales).view(rows.shape).transpose(1, 2).contiguous()
        groups = rows.shape[2] // MX_GROUP
        del tensors[name]
        tensors[f"{name}_blocks"] = codes.codes.view(*rows.shape[:2], groups, MX_GROUP // 2)
        tensors[f"{name}_scales"] = codes.scales.view(*rows.shape[:2], groups)
    rewrite(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return same


@pytest.mark.parametrize("case", [QWEN3_MOE, CASES["deepseek-v3"]], ids=lambda case: case.config)
def test_fp8_blocks_as_published(case, tmp_path):
    compare(tmp_path, write_codes(model_of(case.config, case.values), tmp_path, "fp8-blocks"), case)


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed-int4", "compressed-int4-zeros", "compressed-fp8"])
def test_other_layouts_of_qwen3_moe(layout, tmp_path):
    compare(tmp_path, write_codes(model_of(WHOLE_WORDS.config, WHOLE_WORDS.values), tmp_path, layout), WHOLE_WORDS)


def test_gptq_of_mixtral(tmp_path):
    case = CASES["mixtral"]._replace(values={**CASES["mixtral"].values, "head_dim": 16, "intermediate_size": 96})
    compare(tmp_path, write_codes(model_of(case.config, case.values), tmp_path, "gptq"), case)


def test_gpt_oss_is_read_in_no_other_layout(tmp_path):
    folder = save(model_of(GPT_OSS.config, GPT_OSS.values), tmp_path)
    rewrite(folder, load_file(folder / "model.safetensors"), LAYOUTS["gptq"][0])
    with pytest.raises(ConfigError, match="architecture are not supported in this layout"):
        Engine(folder)


def test_int8_experts_of_qwen3_moe(tmp_path):
    """Products outside the experts take their inputs in bf16: close calls may go the other way."""
    same = write_codes(model_of(WHOLE_WORDS.config, WHOLE_WORDS.values), tmp_path, "compressed-int8")
    prompt = [5, 9, 200, 33, 7]
    engine = Engine(tmp_path)
    uid = engine.submit(prompt, 1, logprobs=20)
    engine.run()
    expected = logits_reference(same, prompt)[-1].log_softmax(-1).topk(20).values
    assert float((torch.tensor(engine.logprobs[uid][0].top_logprobs) - expected).abs().max()) < 0.05


def test_reordered_inputs_of_experts_are_refused_by_name(tmp_path):
    write_codes(model_of(WHOLE_WORDS.config, WHOLE_WORDS.values), tmp_path, "gptq-desc-act")
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_proj: experts with reordered inputs \(desc_act\)"):
        Engine(tmp_path)


def test_mxfp4_of_gpt_oss(tmp_path):
    same = write_mxfp4(model_of(GPT_OSS.config, GPT_OSS.values), tmp_path)
    compare(tmp_path, same, GPT_OSS)


@pytest.mark.parametrize("missing", ["gate_up_proj_blocks", "down_proj_scales"])
def test_a_missing_tensor_is_named(missing, tmp_path):
    write_mxfp4(model_of(GPT_OSS.config, GPT_OSS.values), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{missing}"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        Engine(tmp_path)


def test_a_missing_expert_is_named(tmp_path):
    tensors = load_file(save(model_of(QWEN3_MOE.config, QWEN3_MOE.values), tmp_path) / "model.safetensors")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        Engine(tmp_path)


@pytest.mark.parametrize(("scheme", "nearness"), [("fp8", 0.07), ("int8", 0.01), ("int4", 0.12)])
def test_experts_are_rounded_when_they_are_loaded(scheme, nearness, tmp_path):
    case = Case("MixtralConfig", {**BARE, **EXPERTS, "num_local_experts": 4})
    save(model_of(case.config, case.values), tmp_path)
    prompt = [5, 9, 200, 33, 7]
    plain = Engine(tmp_path).generate([prompt], 4)
    rounded = Engine(tmp_path, model={"quantization": scheme}).generate([prompt], 4)
    assert len(plain[0]) == len(rounded[0]) == 4
    weight = torch.randn(20, 40)
    codes = EXPERT_CODES[scheme](weight)
    torch.testing.assert_close(expert_numbers(codes), weight, rtol=nearness, atol=2 * nearness)


def test_mxfp4_codes_are_the_nearest():
    weight = torch.randn(7, 64)
    codes = mxfp4_codes(weight)
    found = mxfp4_numbers(codes.codes, codes.scales)
    assert float((found - weight).abs().max()) <= 2.0 * float(weight.abs().max()) / 4.0
    again = mxfp4_codes(found)
    assert torch.equal(mxfp4_numbers(again.codes, again.scales), found)
