"""Experts from published layouts of quantized checkpoints, and rounded when they are loaded."""

from __future__ import annotations

import copy
import json
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
from tests.models.checkpoints import model_of, save
from tests.models.families import BARE, CASES, EXPERTS, Case, compare
from tests.quantization.checkpoints import LAYOUTS

QWEN3_MOE = CASES["qwen3-moe"]
GPT_OSS = Case("GptOssConfig", {**CASES["gpt-oss"].values, "hidden_size": 64, "intermediate_size": 96})


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "quantization_config": quantization}))


def write_fp8_blocks(model: Any, folder: Path) -> Any:
    """A checkpoint whose products are FP8 in blocks, a tensor for each expert as Qwen publishes them; the model that
    it equals."""
    values, to_codes, to_tensors = LAYOUTS["fp8-blocks"]
    tensors = load_file(save(model, folder) / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        codes = to_codes(tensors.pop(name))
        tensors |= {name.replace("weight", suffix): value for suffix, value in to_tensors(codes).items()}
        tensors[f"{name}.numbers"] = dequantize(codes)
    plain = {name.removesuffix(".numbers"): tensors.pop(name) for name in [*tensors] if name.endswith(".numbers")}
    rewrite(folder, tensors, {**values, "modules_to_not_convert": ["mlp.gate"]})
    same, beside = copy.deepcopy(model), folder / "plain"
    floats = load_file(save(same, beside) / "model.safetensors") | plain
    save_file(floats, beside / "model.safetensors", metadata={"format": "pt"})
    return same.from_pretrained(beside, attn_implementation="eager").eval()


def write_mxfp4(model: Any, folder: Path) -> Any:
    """A checkpoint as GPT-OSS is published; the model that it equals."""
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


def test_fp8_blocks_of_qwen3_moe(tmp_path):
    same = write_fp8_blocks(model_of(QWEN3_MOE.config, QWEN3_MOE.values), tmp_path)
    compare(tmp_path, same, QWEN3_MOE)


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


def test_experts_are_rounded_to_fp8_when_they_are_loaded(tmp_path):
    case = Case("MixtralConfig", {**BARE, **EXPERTS, "num_local_experts": 4})
    save(model_of(case.config, case.values), tmp_path)
    prompt = [5, 9, 200, 33, 7]
    plain = Engine(tmp_path).generate([prompt], 4)
    rounded = Engine(tmp_path, model={"quantization": "fp8"}).generate([prompt], 4)
    assert len(plain[0]) == len(rounded[0]) == 4
    weight = torch.randn(20, 40)
    codes = EXPERT_CODES["fp8"](weight)
    torch.testing.assert_close(expert_numbers(codes), weight, rtol=0.07, atol=0.02)


def test_int4_of_experts_is_refused_by_name(tmp_path):
    save(model_of(QWEN3_MOE.config, QWEN3_MOE.values), tmp_path)
    with pytest.raises(ConfigError, match="int4 is not supported for a mixture of experts; fp8"):
        Engine(tmp_path, model={"quantization": "int4"})


def test_mxfp4_codes_are_the_nearest():
    weight = torch.randn(7, 64)
    codes = mxfp4_codes(weight)
    found = mxfp4_numbers(codes.codes, codes.scales)
    assert float((found - weight).abs().max()) <= 2.0 * float(weight.abs().max()) / 4.0
    again = mxfp4_codes(found)
    assert torch.equal(mxfp4_numbers(again.codes, again.scales), found)
