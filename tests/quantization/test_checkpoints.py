"""Quantized checkpoints through the whole engine: tokens equal transformers' with the same weights as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine.errors import ConfigError
from inferengine.executor.load import dry_run
from inferengine.models.weights import ALIGNMENT
from inferengine.quantization.cpu import Int8Weight, Numbers
from tests.executor.engine import Engine
from tests.models.checkpoints import greedy_reference, make_model, model_of, save
from tests.models.families import CASES
from tests.quantization.checkpoints import LAYOUTS, edit_tensors, misalign, write

PROMPTS = [[5, 9, 200, 31, 7], [77, 3] * 9]
SHAPES = {"intermediate_size": 96, "head_dim": 16}  # whole words and groups


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_tokens_equal_those_of_the_weights_as_numbers(layout: str, tmp_path: Path) -> None:
    same = write(
        make_model("qwen2-mixed-window", hidden_size=64, head_dim=16, **{"intermediate_size": 96}), layout, tmp_path
    )
    dry_run(tmp_path)
    engine = Engine(tmp_path)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, 16), strict=True):
        expected = greedy_reference(same, prompt, output)
        if layout.startswith("compressed-int8"):  # its kernel takes its input in bf16: close calls may go the other way
            assert sum(a == b for a, b in zip(output, expected, strict=True)) >= 12
        else:
            assert output == expected


@pytest.mark.parametrize(("family", "layout"), [("glm4", "fp8-blocks"), ("glm4", "awq"), ("phi3", "gptq")])
def test_reordered_heads_and_fused_projections(family: str, layout: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "head_dim": 16, "intermediate_size": 96}
    same = write(model_of(CASES[family].config, CASES[family].values | sizes), layout, tmp_path)
    dry_run(tmp_path)
    for prompt, output in zip(PROMPTS, Engine(tmp_path).generate(PROMPTS, 12), strict=True):
        assert output == greedy_reference(same, prompt, output)


@pytest.mark.parametrize("layout", ["awq", "compressed-int4", "compressed-int8", "fp8-blocks", "float"])
def test_where_a_file_puts_its_tensors_does_not_matter(layout: str, tmp_path: Path) -> None:
    model = make_model("qwen2-mixed-window", hidden_size=64, head_dim=16, **{"intermediate_size": 96})
    save(model, tmp_path) if layout == "float" else write(model, layout, tmp_path)
    plain = Engine(tmp_path)
    expected = [plain.generate([prompt], 6) for prompt in PROMPTS]  # one is short enough for the product of few rows
    misalign(tmp_path)
    engine = Engine(tmp_path)
    assert [engine.generate([prompt], 6) for prompt in PROMPTS] == expected
    packed = [
        module.packed for module in engine.executor.model.modules() if getattr(module, "packed", None) is not None
    ]
    codes = [weight.codes for weight in packed if isinstance(weight, Int8Weight)]
    codes += [weight.weight.codes for weight in packed if isinstance(weight, Numbers)]
    assert all(each.data_ptr() % ALIGNMENT == 0 for each in codes)


def test_modules_named_as_exceptions_stay_floats(tmp_path: Path) -> None:
    model, plain = make_model("llama", **SHAPES), ("0.mlp.down_proj", "1.self_attn.o_proj")
    same = write(
        model, "fp8-blocks", tmp_path, plain=plain, modules_to_not_convert=[f"model.layers.{x}" for x in plain]
    )
    engine = Engine(tmp_path)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, 12), strict=True):
        assert output == greedy_reference(same, prompt, output)


def test_parts_of_one_projection_must_agree(tmp_path: Path) -> None:
    names = ["model.layers.0.self_attn.q_proj"]
    write(
        make_model("llama", **SHAPES),
        "fp8-blocks",
        tmp_path,
        plain=("0.self_attn.q_proj",),
        modules_to_not_convert=names,
    )
    with pytest.raises(ConfigError, match="some are quantized and some are not"):
        Engine(tmp_path)


def mixed(named: str) -> dict[str, Any]:
    """Return groups of a checkpoint whose modules of one name are INT4, and all others FP8."""
    groups = [LAYOUTS[layout][0]["config_groups"]["group_0"] for layout in ("compressed-int4", "compressed-fp8")]
    return {
        "group_0": {**groups[0], "format": "pack-quantized", "targets": [f"re:.*{named}$"]},
        "group_1": {**groups[1], "format": "float-quantized"},
    }


def test_two_layouts_in_one_checkpoint(tmp_path: Path) -> None:
    same = write(
        make_model("llama", **SHAPES),
        "compressed-fp8",
        tmp_path,
        other=("compressed-int4", "down_proj"),
        format="mixed-precision",
        config_groups=mixed("down_proj"),
    )
    dry_run(tmp_path)
    engine = Engine(tmp_path)
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, 12), strict=True):
        assert output == greedy_reference(same, prompt, output)
    kinds = {str(layer.mlp.down.packed.weight.kind) for layer in engine.executor.model.layers}
    assert kinds == {"int4"}


def test_targets_that_leave_modules_as_they_are(tmp_path: Path) -> None:
    groups = LAYOUTS["compressed-fp8"][0]["config_groups"]["group_0"]
    same = write(
        make_model("llama", **SHAPES),
        "compressed-fp8",
        tmp_path,
        plain=("o_proj",),
        config_groups={"group_0": {**groups, "targets": ["re:.*[qkv]_proj", "re:.*mlp.*"]}},
    )
    for prompt, output in zip(PROMPTS, Engine(tmp_path).generate(PROMPTS, 12), strict=True):
        assert output == greedy_reference(same, prompt, output)


def int4_groups_of(size: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("gptq", {"desc_act": "yes"}, "desc_act = 'yes' is not supported"),
        ("gptq", {"bits": 3}, "bits = 3 is not supported"),
        ("awq", {"version": "gemv"}, "version = 'gemv' is not supported"),
        ("awq", {"zero_point": False}, "zero_point = False is not supported"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported"),
        ("fp8-blocks", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8-blocks", {"rotation": "hadamard"}, "rotation = hadamard is not supported"),
        ("compressed-fp8", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("compressed-fp8", {"config_groups": {}}, "config_groups must hold a group"),
        ("compressed-fp8", {"format": "marlin-24"}, "format = 'marlin-24' is not supported"),
        (
            "compressed-fp8",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format = 'sparse-24-bitmask' is not supported",
        ),
        ("gptq", {"quant_method": "bitsandbytes"}, "'bitsandbytes' is not supported: its blocks of 64 weights"),
        ("gptq", {"quant_method": "modelopt"}, "'modelopt' is not supported: the nearest that is: compressed-tensors"),
        (
            "gptq",
            {"quant_method": "none of them"},
            "is not supported: fp8, compressed-tensors, gptq, awq, mxfp4 are read",
        ),
        ("gptq", {"quant_method": ["gptq"]}, "quant_method = ['gptq'] is not supported"),
        ("gptq", {"group_size": 0}, "group_size must be at least 1, or -1; got 0"),
        ("awq", {"modules_to_not_convert": ["re:("]}, "'(' is not a valid pattern"),
        ("compressed-fp8", {"config_groups": {"group_0": 1}}, "config_groups.group_0 must be an object"),
        (
            "compressed-fp8",
            {"config_groups": mixed("q_proj")},
            "q_proj, model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj: each has a layout of its own",
        ),
        ("compressed-int4", {"config_groups": int4_groups_of("32")}, "group_size must be a whole number; got '32'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    layout: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(make_model("llama", **SHAPES), layout, tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        Engine(tmp_path)
    assert message in error.value.message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(make_model("llama", **SHAPES), "awq", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.scales"))
    for look in (Engine, dry_run):
        with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.up_proj\.scales is missing"):
            look(tmp_path)


def test_a_misshaped_tensor_is_named(tmp_path: Path) -> None:
    write(make_model("llama", **SHAPES), "gptq", tmp_path)

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.self_attn.v_proj.qzeros"
        tensors[name] = tensors[name][:-1].contiguous()

    edit_tensors(tmp_path, cut)
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.v_proj \(gptq\): qzeros has shape"):
        Engine(tmp_path)


def test_a_reordered_checkpoint_is_refused_though_its_config_is_silent(tmp_path: Path) -> None:
    write(make_model("llama", **SHAPES), "gptq", tmp_path)

    def reorder(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.o_proj.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()

    edit_tensors(tmp_path, reorder)
    with pytest.raises(ConfigError, match="g_idx reorders the inputs"):
        Engine(tmp_path)


def test_projections_of_one_input_must_be_reordered_alike(tmp_path: Path) -> None:
    write(make_model("llama", **SHAPES), "gptq-desc-act", tmp_path)

    def reorder(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.k_proj.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()

    edit_tensors(tmp_path, reorder)
    with pytest.raises(ConfigError, match=r"k_proj.*: their inputs are reordered each in its own way"):
        Engine(tmp_path)


def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    write(make_model("llama", **SHAPES), "gptq-desc-act", tmp_path)
    name = "model.layers.0.self_attn.o_proj.g_idx"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros_like(tensors[name])}))
    with pytest.raises(ConfigError, match=r"o_proj \(gptq\): the groups of its inputs are not"):
        Engine(tmp_path)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    write(make_model("llama", **SHAPES), "awq", tmp_path)
    with pytest.raises(ConfigError, match="quantized already"):
        Engine(tmp_path, model={"quantization": "fp8"})
