"""Loading a checkpoint: what cannot be loaded is refused in a sentence that names the tensor, the key or the file."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferengine.cli import check
from inferengine.config import Config
from inferengine.config.model_path import EMBEDDED
from inferengine.errors import ConfigError
from inferengine.executor.load import dry_run
from inferengine.executor.torch_executor import build_executor
from inferengine.kernels.ops import REFERENCE
from inferengine.layers.decoder_config import DecoderConfig
from inferengine.layers.linear import Linear
from inferengine.models import registry, table, weights
from inferengine.models.hf_config import ConfigReader, read_json
from inferengine.models.weights import INDEX
from inferengine.text.output_parser import FORMATS
from tests.executor.engine import Engine
from tests.models.checkpoints import FAMILIES, GEMMA3, LLAMA3, YARN, greedy_reference, make_model, model_of, save
from tests.models.families import CASES


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(make_model("llama"), tmp_path)


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; dots are written as double underscores."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


def edit_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Engine(folder)
    return caught.value.message


def test_a_missing_tensor(folder):
    edit_tensors(folder, model__layers__1__self_attn__k_proj__weight=None)
    assert refusal(folder) == "the tensor model.layers.1.self_attn.k_proj.weight is missing from the checkpoint"


def test_an_unexpected_tensor(folder):
    edit_tensors(folder, model__layers__1__self_attn__k_proj__bias=torch.zeros(40))
    assert "model.layers.1.self_attn.k_proj.bias is unexpected" in refusal(folder)


def test_a_layer_that_the_config_lacks_is_refused(folder):
    edit_config(folder, num_hidden_layers=2)
    assert "model.layers.2." in refusal(folder)


def test_a_misshaped_tensor(folder):
    edit_tensors(folder, model__norm__weight=torch.zeros(47))
    assert refusal(folder) == "the tensor model.norm.weight has shape [47] where config.json asks for [48]"


def test_a_tensor_of_integers_is_refused(folder):
    edit_tensors(folder, model__norm__weight=torch.zeros(48, dtype=torch.int8))
    assert "model.norm.weight is stored as torch.int8" in refusal(folder)


def test_a_tensor_in_two_files(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, folder / "second.safetensors")
    assert refusal(folder) == "the tensor model.norm.weight stands in model.safetensors and again in second.safetensors"


def test_a_file_cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors is no whole safetensors file" in refusal(folder)


def test_a_file_that_cannot_be_opened(folder):
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to(folder / "gone")  # a hub cache that was cleared by hand
    assert refusal(folder).startswith("model.safetensors cannot be read")


def test_a_model_larger_than_memory_is_said_to_be_so(folder):
    edit_config(folder, intermediate_size=10**12)
    with pytest.raises(MemoryError, match=r"no memory for a parameter of \[2000000000000, 48\]"):
        Engine(folder, model={"load_format": "dummy"})


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_layer_is_packed_before_the_next_takes_memory(
    folder: Path, load_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model that is quantized at load would need the memory of its numbers as a whole: 131 GiB for a 70B in FP8,
    which takes 68."""
    held: list[int] = []
    with_numbers: set[int] = set()
    finish, allocated = Linear.finish, weights._allocated

    def counting(parameter: torch.nn.Parameter, *where: Any) -> torch.nn.Parameter:
        made = allocated(parameter, *where)
        if made.dim() == 2 and 301 not in made.shape:  # neither embedding nor head
            with_numbers.add(id(made))
            held.append(len(with_numbers))
        return made

    def finishing(self: Linear) -> None:
        with_numbers.discard(id(self.weight))
        finish(self)

    monkeypatch.setattr(weights, "_allocated", counting)
    monkeypatch.setattr(Linear, "finish", finishing)
    engine = Engine(folder, model={"load_format": load_format, "quantization": "int8"})
    assert len(held) == 12
    assert max(held) <= 2, "gate and up, or queries, keys and values, come one after the other"
    assert len(engine.generate([[5, 6, 7]], 4)[0]) == 4


def test_a_folder_without_safetensors_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no *.safetensors files" in refusal(folder)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    folder = save(make_model("qwen3"), tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, lm_head__weight=embedding.clone())
    Engine(folder)
    edit_tensors(folder, lm_head__weight=embedding + 1)
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(folder)


def test_shards_load_as_one_file(tmp_path):
    model = make_model("llama")
    whole, shards = save(model, tmp_path / "whole"), save(model, tmp_path / "shards", shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    prompt = [[5, 6, 7]]
    assert Engine(shards).generate(prompt, 16) == Engine(whole).generate(prompt, 16)


def test_an_index_is_held_to_its_word(tmp_path):
    folder = save(make_model("llama"), tmp_path, shard_size="60KB")
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder).startswith(f"the tensor {name} stands in {INDEX} but not in {files[1]}")


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path):
    folder = save(make_model("llama"), tmp_path, shard_size="60KB")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert refusal(folder).startswith(f"{gone.name} stands in {INDEX} but is missing")


def test_a_file_name_in_the_index_that_none_can_have_is_missing(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "x" * 5000}}))
    assert "stands in model.safetensors.index.json but is missing" in refusal(folder)


def test_a_misshaped_bias_of_all_experts(tmp_path):
    case = CASES["gpt-oss"]
    save(model_of(case.config, case.values), tmp_path)
    edit_tensors(tmp_path, model__layers__0__mlp__experts__down_proj_bias=torch.zeros(5, 47))
    assert "experts.down_proj_bias has shape [5, 47] where config.json asks for [5, 48]" in refusal(tmp_path)


def test_a_tensor_that_the_index_lacks_is_named(tmp_path):
    folder = save(make_model("llama"), tmp_path, shard_size="60KB")
    index = json.loads((folder / INDEX).read_text())
    file = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder).startswith(f"the tensor model.norm.weight stands in {file} but not in {INDEX}")


@pytest.mark.parametrize("weight_map", [None, ["model.safetensors"], {"model.norm.weight": 5}])
def test_an_index_without_files_by_name_is_refused(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(folder).startswith(f"{INDEX} has no weight_map")


def test_an_index_names_no_file_outside_the_folder(tmp_path):
    folder = save(make_model("llama"), tmp_path, shard_size="60KB")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../secrets.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    assert "outside the folder" in refusal(folder)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"hidden_act": "relu"}, 'hidden_act = "relu"'),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "short_factor must be a list of 10 numbers",
        ),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor is missing"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "awesome"}}, "quantization_config"),
        ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 512; got 1000000000"),
        ({"intermediate_size": 10**30}, "intermediate_size must be at most 1099511627776"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_key_value_heads": 4}, "6 heads do not divide among 4 KV heads"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"hidden_size": -48}, "hidden_size must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"head_dim": None, "num_attention_heads": 98}, "head_dim must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0; got NaN"),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "short_factor": [1] * 10, "long_factor": [1] * 10},
                "original_max_position_embeddings": 32,
                "max_position_embeddings": None,
            },
            "max_position_embeddings is missing",
        ),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters differ: keep one"),
        ({"rope_parameters": None, "rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be a finite number above 0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a finite number above 0"),
        (
            {"rope_parameters": {**LLAMA3["rope_parameters"], "low_freq_factor": 4.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
        (
            {"rope_parameters": {**YARN["rope_parameters"], "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be at least 1",
        ),
        ({"sliding_window": 12}, "sliding_window = 12 is not supported"),
        ({"attention_sinks": 4}, "attention_sinks = 4 is not supported"),
        ({"num_experts": 8}, "num_experts = 8 is not supported"),
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is not supported: 'llama' is served as LlamaForCausalLM",
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
        ({"architectures": 5}, "architectures must be a list of names; got 5"),
        ({"rope_parameters": {**YARN["rope_parameters"], "rope_theta": 1.0}}, "rope_theta must be above 1 for yarn"),
        ({"rope_parameters": {**YARN["rope_parameters"], "factor": 1e300}}, "factor = 1e+300 extends the context"),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings must be at least 2 for longrope",
        ),
        ({"dtype": 16}, "dtype = '16'"),
        ({"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
    ],
)
def test_a_config_value_without_support_is_refused_by_name(folder, values, named):
    edit_config(folder, **values)
    assert named in refusal(folder)


def test_a_config_key_that_changes_nothing_computed_is_named_in_a_warning(folder, caplog):
    edit_config(folder, training_run="exp-17", attention_sinks=None)
    document = read_json(folder / "config.json")
    registry.config_of(document, registry.family(document))
    (record,) = caplog.records
    assert "training_run is not known here" in record.getMessage()


MIXED = ["sliding_attention", "full_attention"]
OLD = {"rope_parameters": None}  # as transformers wrote before 5


@pytest.mark.parametrize(
    ("family", "values", "named"),
    [
        ("gemma3", {"query_pre_attn_scalar": -24}, "query_pre_attn_scalar must be a finite number above 0"),
        ("gemma3", {"final_logit_softcapping": 0}, "final_logit_softcapping must be a finite number above 0"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        ("gemma3", {"layer_types": 5}, "layer_types must be a list of names"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 5 layers"),
        ("gemma3", {"rope_parameters": 10_000.0}, "rope_parameters must be an object"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters must hold a rotation each for full_"),
        ("gemma3", {"rope_parameters": {"full_attention": 1e6}}, "full_attention must be an object; got 1000000.0"),
        ("gemma3", OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "name the kind in rope_type"),
        ("gemma3", {"layer_types": None, "_sliding_window_pattern": 2}, "_sliding_window_pattern = 2 is not supported"),
        ("olmo3", {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters must hold a rotation each for full_"),
        ("olmo3", OLD | {"rope_theta": 1e4}, "rope_theta = 10000 is that of full_attention alone"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not supported"),
        ("gpt2", {"n_head": 4}, "n_embd = 54 does not divide among n_head = 4"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
        ("mistral-window", {"sliding_window": -12}, "sliding_window must be at least 1"),
        ("mistral-window", {"sliding_window": 0}, "sliding_window must be at least 1; got 0"),
        ("pythia", {"rope_theta": 500.0}, "rope_theta is not read for this model type: say it as rotary_emb_base"),
        ("pythia", {"partial_rotary_factor": 1.0}, "partial_rotary_factor is not read for this model type"),
        *(
            (name, {"sliding_window": 9, "layer_types": MIXED}, "layer_types is not read for this model type")
            for name in ("ministral3", "mixtral", "starcoder2", "phi3")
        ),
        *(
            (name, OLD | {"partial_rotary_factor": None}, "config.json: partial_rotary_factor is null: leave it out")
            for name in ("glm", "nemotron", "stablelm")
        ),
        ("glm", {"rope_parameters": {"partial_rotary_factor": None}}, "rope_parameters: partial_rotary_factor is null"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window must be true or false"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention'"),
    ],
)
def test_each_family_refuses_by_name(family, values, named):
    with pytest.raises(ConfigError) as caught:
        config_of(family, **values)
    assert named in caught.value.message


def config_of(family: str, **values: object) -> DecoderConfig:
    """Return a family's config.json with some values changed, as the engine reads it."""
    class_name, shapes = FAMILIES[family] if family in FAMILIES else CASES[family][:2]
    config = getattr(transformers, class_name)(**shapes).to_dict() | values
    return registry.config_of(config, registry.family(config))


def test_mistral_slides_where_the_config_says_nothing():
    config = config_of("mistral-window")
    assert config.windows == (12, 12, 12)
    assert config_of("mistral-window", sliding_window=None).windows == (None,) * 3
    class_name, shapes = FAMILIES["mistral-window"]
    silent = getattr(transformers, class_name)(**shapes).to_dict()
    del silent["sliding_window"]
    assert registry.config_of(silent, registry.family(silent)).windows == (4096,) * 3


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2-moe", "qwen3-moe"])
def test_a_window_that_is_turned_on_and_null_is_none(family):
    values = {"use_sliding_window": True, "max_window_layers": int(family == "qwen2-moe"), "sliding_window": None}
    assert set(config_of(family, **values, layer_types=None).windows) == {None}


def test_the_second_name_of_the_window_in_published_gemma_2_is_passed_over():
    assert config_of("gemma2", sliding_window=12, sliding_window_size=4096).windows == (12, None)


def test_gemma_4_whose_layers_are_all_alike_is_read_as_transformers_saves_it():
    name = "gemma4-26b, experts beside a block"
    alike = {"global_head_dim": 20, "num_global_key_value_heads": 4}
    config = getattr(transformers, CASES[name].config)(**CASES[name].values | alike).to_dict()
    assert config["per_layer_config"] == {}
    assert registry.config_of(config, registry.family(config)).full_kv is None


def test_yarn_reaches_as_far_as_it_extends():
    extended = {**YARN["rope_parameters"], "factor": 16.0}  # 64 tokens × 16; max_position_embeddings still says 256
    assert config_of("llama", rope_parameters=extended).max_position == 1024
    assert config_of("llama", rope_parameters=YARN["rope_parameters"]).max_position == 256


def test_the_base_of_a_rotation_may_stand_beside_its_other_keys():
    beside = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e6}
    assert config_of("llama", **beside).rope.theta == 1e6
    within = {"rope_parameters": {**beside["rope_parameters"], "rope_theta": 5e5}, "rope_theta": 1e6}
    assert config_of("llama", **within).rope.theta == 5e5
    kinds = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    by_kind = config_of("gemma3", rope_parameters=kinds, rope_theta=5e5, rope_local_base_freq=2e4)
    assert (by_kind.rope.theta, by_kind.local_rope.theta) == (5e5, 2e4)


@pytest.mark.parametrize("within", [{}, {"original_max_position_embeddings": 64}], ids=["nowhere", "in rope_scaling"])
def test_phi_3_reads_the_length_before_longrope_where_transformers_does(within):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    values = {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 64, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 8192,
        "rope_scaling": {"type": "longrope", **factors, **within},
    }  # fmt: skip
    theirs = transformers.Phi3Config.from_dict(copy.deepcopy(values)).rope_parameters
    rope = registry.config_of(values, registry.family(values)).rope
    assert rope.original_max_position == theirs["original_max_position_embeddings"] == 4096
    assert rope.factor == 2.0


def test_a_rotation_that_the_config_does_not_say_is_that_of_the_family():
    ministral, gpt_oss = config_of("ministral3", **OLD), config_of("gpt-oss", **OLD)
    assert (ministral.rope.kind, ministral.rope.theta, ministral.rope.factor) == ("yarn", 1e6, 16.0)
    assert ministral.query_scaling == (0.1, 16_384)
    assert (gpt_oss.rope.kind, gpt_oss.rope.theta, gpt_oss.rope.truncate) == ("yarn", 150_000.0, False)
    assert (gpt_oss.rope.factor, gpt_oss.rope.original_max_position) == (32.0, 4096)


@pytest.mark.parametrize(("family", "epsilon"), [("llama", 1e-6), ("mixtral", 1e-5), ("phi3", 1e-5), ("olmoe", 1e-5)])
def test_an_epsilon_that_the_config_does_not_say_is_that_of_the_family(family, epsilon):
    assert config_of(family, rms_norm_eps=None).norm_eps == epsilon


GEMMA_3_4B = {  # as published: what is not said is what Gemma3TextConfig says
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "eos_token_id": [1, 106],
    "image_token_index": 262_144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "vision_use_head": False},
}


def test_the_text_of_a_gemma_that_sees_is_read_from_its_text_config():
    config = registry.config_of(GEMMA_3_4B, registry.family(GEMMA_3_4B))
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert (config.windows.count(1024), config.windows.count(None)) == (29, 5)
    assert config.rope is not None
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (1_000_000.0, "linear", 8.0)
    assert config.local_rope is not None
    assert (config.local_rope.theta, config.local_rope.kind) == (10_000.0, "default")
    assert (config.tied_embeddings, config.dtype, config.max_position) == (True, "bfloat16", 131_072)
    unknown = GEMMA_3_4B | {"text_config": GEMMA_3_4B["text_config"] | {"altup_num_inputs": 4}}
    with pytest.raises(ConfigError, match="text_config: altup_num_inputs = 4 is not supported"):
        registry.config_of(unknown, registry.family(unknown))


def test_a_gemma_that_sees_generates_as_transformers_has_it(tmp_path):
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**GEMMA3),
        vision_config={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    folder, prompt = save(model, tmp_path), list(range(10, 50))
    (output,) = Engine(folder).generate([prompt], 24)
    assert output == greedy_reference(model, prompt, output)

    path = folder / "model.safetensors"  # as transformers 4.52 and later may write it
    names = {
        name: name.replace("language_model.model.", "model.language_model.")
        if name.startswith("language_model.model.")
        else name.removeprefix("language_model.")
        for name in load_file(path)
    }
    save_file({names[name]: tensor for name, tensor in load_file(path).items()}, path)
    assert Engine(folder).generate([prompt], 24) == [output]


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "qwen2", "mistral-window"])
def test_a_dry_run_finds_nothing_wrong_with_a_whole_checkpoint(family, tmp_path):
    model = make_model(family)
    assert dry_run(save(model, tmp_path, shard_size="60KB")) == model.num_parameters()


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda folder: edit_tensors(folder, model__norm__weight=None), "model.norm.weight is missing"),
        (lambda folder: edit_tensors(folder, model__norm__weight=torch.zeros(5)), "has shape [5]"),
        (lambda folder: edit_tensors(folder, surplus=torch.zeros(5)), "the tensor surplus is unexpected"),
        (lambda folder: edit_config(folder, residual_multiplier=2.0), "residual_multiplier = 2.0"),
        (
            lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 3}),
            "quantization_config.bits = 3",
        ),
    ],
)
def test_check_says_what_loading_would(break_it, named, folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EMBEDDED / name).read_bytes())
    config = Config().with_values(model={"path": str(folder)})
    assert [finding.grade for finding in check.model(config)] == [check.OK]
    break_it(folder)
    (finding,) = check.model(config)
    assert finding.grade == check.PROBLEM
    assert named in finding.text


def test_a_longer_context_than_the_model_was_made_for(folder):
    config = Config().with_values(model={"path": str(folder), "max_model_len": 257})
    with pytest.raises(ConfigError, match=r"max_model_len.*made for 256"):
        build_executor(config).load(lambda phase, share: None)


@pytest.mark.parametrize(("stored", "expected"), [([3, 9], (3, 9)), (4, (4,))])
def test_eos_comes_from_the_generation_config(folder, stored, expected):
    edit_config(folder, eos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    assert registry.read_model_config(folder)[0].eos_token_ids == expected


@pytest.mark.parametrize("values", [{}, {"eos_token_id": None}], ids=["absent", "null"])
def test_a_generation_config_without_eos_leaves_it_to_the_config(folder, values):
    edit_config(folder, eos_token_id=1)
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert registry.read_model_config(folder)[0].eos_token_ids == (1,)


def test_a_tied_weight_is_held_once():
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    family = registry.family(values)
    with torch.device("meta"):
        model = family.build(REFERENCE, registry.config_of(values, family))
    assert sum(parameter.shape == (100, 16) for parameter in model.parameters()) == 1


def test_an_integer_may_be_written_with_a_decimal_point() -> None:
    assert ConfigReader({"size": 3.0}).integer("size") == 3
    with pytest.raises(ConfigError, match="size must be a whole number"):
        ConfigReader({"size": 3.5}).integer("size")


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"], ids=["cut", "deep", "long"]
)
def test_a_config_that_cannot_be_parsed_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        read_json(tmp_path / "config.json")


def test_a_config_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_json(tmp_path / "config.json")


def test_the_table_of_families_names_formats_that_exist_and_speeds_that_were_measured() -> None:
    named = {name for family in table.FAMILIES for name in family.tools.split(", ") if name}
    assert named <= FORMATS.keys()
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    measured = set()
    for row in json.loads((results / "compare-h200.json").read_text())["rows"]:
        if (found := re.fullmatch(r"(llama-3.1-8b|qwen3-0.6b) decode (\d+)", row["workload"])) is not None:
            measured.add(f"{int(found.group(2)) / row['ours'] * 1e3:,.0f} of {found.group(2)}")
    for name in ("qwen3-30b-a3b", "gpt-oss-20b"):
        rows = json.loads((results / f"{name}-h200.json").read_text())["rows"]
        measured |= {f"{row['tokens_per_s']:,.0f} of {row['batch']}" for row in rows if row["row"] == "decode"}
    claimed = [
        each.strip()
        for family in table.FAMILIES
        for each in re.findall(r"[\d,]+ of \d+", family.speed.partition(":")[2])
    ]
    assert len(claimed) == 8
    assert set(claimed) <= measured
