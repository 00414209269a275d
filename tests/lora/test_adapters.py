"""LoRA through the whole engine: each request's tokens equal transformers' with its adapter's weights merged."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferengine.errors import ConfigError, InferEngineError
from inferengine.kernels import ops
from inferengine.kernels.reference import ops as reference
from tests.executor.engine import Engine
from tests.lora.adapters import GPT2_TARGETS, LLAMA_TARGETS, write_adapter
from tests.models.checkpoints import FAMILIES, greedy_reference, logits_reference, make_model, model_of, save
from tests.models.families import CASES
from tests.models.test_text_of_multimodal import model_of as seeing_model

PROMPTS = [[5, 9, 200, 31, 7], [77, 3] * 9, [11, 250, 4]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = make_model("llama-tied-biases")
    return model, save(model, tmp_path_factory.mktemp("llama"))


def make_engine(checkpoint: Path, adapters: Path, **values: Any) -> Engine:
    adapters.mkdir(exist_ok=True)
    return Engine(checkpoint, model={"adapters": str(adapters)}, **values)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", LLAMA_TARGETS),
        ("qwen3", ("q_proj", "v_proj")),
        ("gemma3", LLAMA_TARGETS),
        ("gpt2", GPT2_TARGETS),
        ("mixtral", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("glm4", LLAMA_TARGETS),  # heads that turn in part, reordered
        ("pythia", ("query_key_value", "dense", "dense_h_to_4h")),  # q, k and v stored head by head
    ],
)
def test_tokens_equal_those_of_merged_weights(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model(family) if family in FAMILIES else model_of(CASES[family].config, CASES[family].values)
    checkpoint = save(model, tmp_path / "model")
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, targets=targets)
    engine = make_engine(checkpoint, tmp_path / "adapters")
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, 24, adapter=1), strict=True):
        assert output == greedy_reference(merged, prompt, output)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama-tied-biases", {"targets": LLAMA_TARGETS, "ranks": {"q_proj": 7, "layers.1.mlp.up_proj": 2}}),
        ("llama-tied-biases", {"targets": LLAMA_TARGETS, "alphas": {"down_proj": 3.0, "k_proj": 20.0},
                               "ranks": {"down_proj": 6}, "rslora": True}),
        ("llama-tied-biases", {"targets": LLAMA_TARGETS, "dora": True}),
        ("gemma3", {"targets": ("q_proj", "o_proj", "up_proj"), "dora": True}),
        ("gpt2", {"targets": GPT2_TARGETS, "dora": True, "rslora": True}),
        ("glm4", {"targets": LLAMA_TARGETS, "dora": True}),  # heads that turn in part, reordered
    ],
)  # fmt: skip
def test_ranks_and_lengths_may_be_set_for_each_module(family: str, values: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(family) if family in FAMILIES else model_of(CASES[family].config, CASES[family].values)
    checkpoint = save(model, tmp_path / "model")
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, **values)
    engine = make_engine(checkpoint, tmp_path / "adapters")
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, 16, adapter=1), strict=True):
        assert output == greedy_reference(merged, prompt, output)


@pytest.mark.parametrize(
    ("family", "targets", "whole"),
    [
        ("llama", ("q_proj",), ("lm_head", "embed_tokens")),
        ("gemma3", ("up_proj",), ("embed_tokens", "lm_head")),  # rows times a factor
        ("qwen3", ("q_proj",), ("embed_tokens",)),  # tied: the head keeps the model's own weight
        ("gemma3-softcap", (), ("lm_head",)),
        ("gpt2", ("c_attn",), ("wte", "lm_head")),
        ("cohere", (), ("lm_head",)),  # a norm with means, and a factor of the logits
    ],
)
def test_an_adapter_may_bring_an_embedding_and_a_head(
    family: str, targets: tuple[str, ...], whole: tuple[str, ...], tmp_path: Path
) -> None:
    model = make_model(family) if family in FAMILIES else model_of(CASES[family].config, CASES[family].values)
    checkpoint = save(model, tmp_path / "model")
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, targets=targets, whole=whole)
    engine = make_engine(checkpoint, tmp_path / "adapters", budget=9)
    rows = [(1, merged), (0, model), (1, merged)]
    uids = [engine.submit(prompt, 16, adapter=of) for prompt, (of, _) in zip(PROMPTS, rows, strict=True)]
    engine.run()
    for prompt, uid, (_, expected) in zip(PROMPTS, uids, rows, strict=True):
        assert engine.outputs[uid] == greedy_reference(expected, prompt, engine.outputs[uid])
    engine.executor.adapters.remove(1)
    assert not any(engine.executor.adapters.bank._whole.values())


def test_a_prompts_logprobs_are_of_the_adapters_own_head(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    merged = write_adapter(tmp_path / "adapters" / "a", model, targets=(), whole=("lm_head",))
    engine = make_engine(checkpoint, tmp_path / "adapters", budget=9)
    uids = {engine.submit(PROMPTS[1], 1, adapter=of, prompt_logprobs=0): what for of, what in ((1, merged), (0, model))}
    engine.run()
    for uid, of in uids.items():
        ids = torch.tensor(PROMPTS[1][1:])[:, None]
        expected = logits_reference(of, PROMPTS[1])[:-1].log_softmax(-1).gather(1, ids)[:, 0]
        found = torch.tensor([item.logprob for item in engine.prompt_logprobs[uid] if item is not None])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_an_adapters_embedding_is_also_the_tied_head(tmp_path: Path) -> None:
    model = make_model("qwen3")
    merged = write_adapter(
        tmp_path / "adapters" / "a", model, targets=(), whole=("embed_tokens",), ensure_weight_tying=True
    )
    merged.lm_head.weight = merged.model.embed_tokens.weight
    engine = make_engine(save(model, tmp_path / "model"), tmp_path / "adapters")
    (output,) = engine.generate(PROMPTS[:1], 16, adapter=1)
    assert output == greedy_reference(merged, PROMPTS[0], output)


def test_lengths_of_one_adapter_leave_other_rows_alone(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    plain = Engine(checkpoint).generate(PROMPTS, 12)
    merged = [
        write_adapter(tmp_path / "adapters" / "first", model, dora=True),
        write_adapter(tmp_path / "adapters" / "second", model, seed=2),
    ]
    engine = make_engine(checkpoint, tmp_path / "adapters")
    uids = [engine.submit(PROMPTS[number], 12, adapter=number) for number in range(3)]
    engine.run()
    assert engine.outputs[uids[0]] == plain[0]
    for number in (1, 2):
        output = engine.outputs[uids[number]]
        assert output == greedy_reference(merged[number - 1], PROMPTS[number], output)


def test_the_magnitudes_of_a_quantized_layer_are_those_of_its_own_weight(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    """With magnitudes that are the lengths of the changed weight's rows, nothing is scaled."""
    model, checkpoint = llama
    write_adapter(tmp_path / "adapters" / "plain", model, targets=("q_proj", "down_proj"))
    engine = Engine(checkpoint, model={"adapters": str(tmp_path / "adapters"), "quantization": "int8"})
    bank = engine.executor.adapters.bank
    place, factors = next((place, factors) for place, factors in bank.adapters[1].factors.items())
    linear, table = bank._linears[place.linear]
    weight = table.linear(torch.eye(linear.in_features), linear.packed, None).t()
    first = sum(linear.parts[: place.part or 0])
    rows = weight[first : first + len(factors.up)] + factors.scaling * factors.up @ factors.down
    gain = bank._gain(place.linear, first, factors._replace(magnitude=rows.norm(dim=1)))
    assert torch.allclose(gain, torch.ones(len(gain)), atol=1e-5)


def test_adapters_on_a_device_that_norms_with_the_sum_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = dataclasses.replace(ops.REFERENCE, linear_add_norm=reference.linear_add_norm)
    monkeypatch.setattr(ops, "REFERENCE", table)
    model = make_model("llama")
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, targets=LLAMA_TARGETS)
    engine = make_engine(save(model, tmp_path / "model"), tmp_path / "adapters")
    (output,) = engine.generate(PROMPTS[:1], 24, adapter=1)
    assert output == greedy_reference(merged, PROMPTS[0], output)


def test_a_batch_mixes_adapters_and_plain_rows(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    first = write_adapter(tmp_path / "adapters" / "a", model, seed=1, rank=4)
    second = write_adapter(
        tmp_path / "adapters" / "b", model, seed=2, rank=7, rslora=True, targets=("q_proj", "up_proj")
    )
    engine = make_engine(checkpoint, tmp_path / "adapters", budget=9)
    assert engine.executor.adapters.names() == {"a": 1, "b": 2}
    rows = [(0, model), (1, first), (2, second), (1, first), (0, model)]
    uids = [engine.submit(PROMPTS[index % 3], 16, adapter=adapter) for index, (adapter, _) in enumerate(rows)]
    engine.run()
    for index, (uid, (_, expected)) in enumerate(zip(uids, rows, strict=True)):
        output = engine.outputs[uid]
        assert output == greedy_reference(expected, PROMPTS[index % 3], output)


def test_prefixes_are_not_shared_between_adapters(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    first = write_adapter(tmp_path / "adapters" / "a", model, seed=1)
    engine = make_engine(checkpoint, tmp_path / "adapters")
    prompt = list(range(20, 60))
    for adapter, expected in ((0, model), (1, first), (1, first)):
        uid = engine.submit(prompt, 8, adapter=adapter)
        engine.run()
        assert engine.outputs[uid] == greedy_reference(expected, prompt, engine.outputs[uid])
    assert [engine.finished[uid].num_cached for uid in (1, 2)] == [0, 0]
    assert engine.finished[3].num_cached > 0


def test_adapters_come_and_go_between_steps(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    engine = make_engine(checkpoint, tmp_path / "adapters")
    merged = write_adapter(tmp_path / "adapters" / "late", model, seed=5)
    folder = engine.executor.adapters
    number = folder.bank.add(folder.read("late"))
    output = engine.generate([PROMPTS[0]], 12, adapter=number)[0]
    assert output == greedy_reference(merged, PROMPTS[0], output)
    folder.bank.remove(number)
    plain = engine.generate([PROMPTS[0]], 12)[0]
    assert plain == greedy_reference(model, PROMPTS[0], plain)
    assert folder.bank.add(folder.read("late")) == number + 1  # an old number's KV is never found again


def test_a_preempted_sequence_keeps_its_adapter(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    merged = write_adapter(tmp_path / "adapters" / "a", model)
    engine = make_engine(checkpoint, tmp_path / "adapters", num_blocks=9)
    prompts = [[index + 3] * 12 for index in range(4)]
    for prompt, output in zip(prompts, engine.generate(prompts, 20, adapter=1), strict=True):
        assert output == greedy_reference(merged, prompt, output)
    assert engine.core.scheduler.stats.num_preemptions > 0


def test_an_adapter_beside_quantized_weights(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    write_adapter(tmp_path / "adapters" / "a", model)
    (tmp_path / "adapters").mkdir(exist_ok=True)
    values = {"adapters": str(tmp_path / "adapters"), "quantization": "int8_w8a8"}
    engine = Engine(checkpoint, model=values)
    adapted, plain = engine.generate([PROMPTS[1]], 8, adapter=1), engine.generate([PROMPTS[1]], 8)
    assert adapted != plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "has no lora_magnitude_vector, though use_dora is true"),
        ({"dora": True, "use_dora": False}, "lora_magnitude_vector is unexpected"),
        ({"rank_pattern": {"(": 4}}, "rank_pattern has what is no regular expression"),
        (
            {"rank_pattern": {"(.+)+x": 4}},
            "rank_pattern has '(.+)+x': at most 4 repeats are supported, and none of groups",
        ),
        ({"alpha_pattern": {"(?:[a-z.]+){2,}x": 4}}, "none of groups"),
        ({"alpha_pattern": {".*" * 5: 4}}, "at most 4 repeats"),
        ({"rank_pattern": {"x" * 501: 4}}, "rank_pattern has 'xxx"),
        ({"rank_pattern": {"q_proj": 65}}, "r = 65 is not supported: at most 64"),
        ({"rank_pattern": {"q_proj": 3}}, "has shape [4, 48] where [3, 48] is due"),
        ({"bias": "all"}, "bias = all is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names the head, of which adapter_model.safetensors has no"),
        (
            {"modules_to_save": ["norm"]},
            "modules_to_save has 'norm', which is not supported: embed_tokens, lm_head are",
        ),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names"),
        ({"alpha_pattern": {"q_proj": "4"}}, "q_proj must be a positive number"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa"),
        ({"lora_alpha": None}, "lora_alpha must be a positive number"),
        ({"rank": 65}, "at most 64"),
        ({"r": 5}, "has shape [4, 48] where [5, 48] is due"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], message: str, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, checkpoint = llama
    write_adapter(tmp_path / "adapters" / "odd", model, targets=("q_proj",), **changes)
    with pytest.raises(ConfigError) as error:
        make_engine(checkpoint, tmp_path / "adapters")
    assert message in error.value.message
    assert "odd" in error.value.message


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_numbers_of_a_type_that_is_not_read_are_refused(
    dtype: torch.dtype, llama: tuple[Any, Path], tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapters" / "odd", llama[0], targets=("q_proj",))
    path = tmp_path / "adapters" / "odd" / "adapter_model.safetensors"
    tensors = load_file(path)
    key = min(tensors)
    save_file({**tensors, key: tensors[key].to(dtype)}, path)
    with pytest.raises(ConfigError) as error:
        make_engine(llama[1], tmp_path / "adapters")
    assert f"the tensor {key} is stored as {dtype}" in error.value.message


def test_files_that_are_overwritten_change_nothing_before_they_are_loaded_again(
    llama: tuple[Any, Path], tmp_path: Path
) -> None:
    model, checkpoint = llama
    merged = write_adapter(tmp_path / "adapters" / "a", model, seed=1)
    engine = make_engine(checkpoint, tmp_path / "adapters")
    path = tmp_path / "adapters" / "a" / "adapter_model.safetensors"
    with path.open("r+b") as file:  # as `cp` does
        file.write(bytes(path.stat().st_size))
    write_adapter(tmp_path / "adapters" / "b", model, seed=2)
    engine.executor.adapters.add(engine.executor.adapters.read("b"))
    (output,) = engine.generate([PROMPTS[0]], 12, adapter=1)
    assert output == greedy_reference(merged, PROMPTS[0], output)


def test_an_adapter_that_there_is_no_memory_for_leaves_the_others_as_they_were(
    llama: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = llama
    merged = write_adapter(tmp_path / "adapters" / "a", model, seed=1)
    engine = make_engine(checkpoint, tmp_path / "adapters")
    write_adapter(tmp_path / "adapters" / "b", model, seed=2)
    adapters, adapter = engine.executor.adapters, engine.executor.adapters.read("b")
    with monkeypatch.context() as patch:
        calls = itertools.count()
        cat = torch.cat
        patch.setattr(torch, "cat", lambda *args: cat(*args) if next(calls) < 5 else no_memory())
        with pytest.raises(MemoryError):
            adapters.add(adapter)
    assert adapters.names() == {"a": 1}
    (output,) = engine.generate([PROMPTS[0]], 12, adapter=1)
    assert output == greedy_reference(merged, PROMPTS[0], output)
    with monkeypatch.context() as patch:
        number = adapters.add(adapter)
        patch.setattr(torch, "cat", lambda *args: no_memory())
        adapters.remove(number)  # the memory is freed with the next one
    assert adapters.names() == {"a": 1}
    (again,) = engine.generate([PROMPTS[0]], 12, adapter=1)
    assert again == output


def no_memory() -> None:
    raise MemoryError


def test_an_adapter_for_another_model_names_the_tensor(llama: tuple[Any, Path], tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapters" / "odd", make_model("gpt2"), targets=("c_attn",))
    with pytest.raises(ConfigError, match=r"transformer\.h\.0\.attn\.c_attn\.lora_A\.weight is unexpected"):
        make_engine(llama[1], tmp_path / "adapters")


@pytest.mark.parametrize("name", ["../model", "/etc", "nothing", "", ".", "a/b"])
def test_a_name_is_no_path(name: str, llama: tuple[Any, Path], tmp_path: Path) -> None:
    engine = make_engine(llama[1], tmp_path / "adapters")
    with pytest.raises(InferEngineError, match="no adapter of that name"):
        engine.executor.adapters.read(name)


def test_rows_without_an_adapter_are_the_model_to_the_bit(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    write_adapter(tmp_path / "adapters" / "a", model)
    with_bank, without = make_engine(checkpoint, tmp_path / "adapters"), Engine(checkpoint)
    found = [[item.logprob for item in engine.logprobs[uid]] for engine in (with_bank, without)
             for uid in [engine.submit(PROMPTS[0], 8, logprobs=0)] if engine.run()]  # fmt: skip
    assert torch.equal(torch.tensor(found[0]), torch.tensor(found[1]))


def test_an_embedding_is_made_by_the_adapter_that_its_request_names(llama: tuple[Any, Path], tmp_path: Path) -> None:
    model, checkpoint = llama
    merged = write_adapter(tmp_path / "adapters" / "pirate", model)
    engine = make_engine(checkpoint, tmp_path / "adapters", budget=9)
    uids = {engine.embed(PROMPTS[1], adapter=adapter): of for adapter, of in ((1, merged), (0, model), (1, merged))}
    engine.run()
    for uid, of in uids.items():
        with torch.inference_mode():
            state = of.base_model(torch.tensor([PROMPTS[1]]), use_cache=False).last_hidden_state[0, -1]
        assert (torch.tensor(engine.embeddings[uid]) - state / state.norm()).norm() < 1e-4


def test_an_adapter_of_experts_or_their_router_is_refused_by_name(tmp_path: Path) -> None:
    model = model_of(CASES["mixtral"].config, CASES["mixtral"].values)
    checkpoint = save(model, tmp_path / "model")
    write_adapter(tmp_path / "adapters" / "a", model, targets=("gate",))
    with pytest.raises(
        (ConfigError, InferEngineError), match=r"mlp\.gate\.lora_A\.weight adapts what is no linear layer"
    ):
        make_engine(checkpoint, tmp_path / "adapters")


def test_what_an_adapter_changes_in_the_part_that_sees_is_left_out(tmp_path: Path) -> None:
    """PEFT adapts every layer of a name: those of the vision model too."""
    model = seeing_model("Gemma3")
    folder = tmp_path / "model"
    folder.mkdir()
    merged = write_adapter(tmp_path / "adapters" / "pirate", model, targets=("q_proj", "v_proj"))
    engine = Engine(save(model, folder), model={"adapters": str(tmp_path / "adapters")})
    prompt = list(range(20, 41))
    (output,) = engine.generate([prompt], 12, adapter=1)
    assert output == greedy_reference(merged, prompt, output)
    text_alone = make_engine(save(make_model("llama"), tmp_path / "text"), tmp_path / "others")
    shutil.copytree(tmp_path / "adapters", tmp_path / "others", dirs_exist_ok=True)
    with pytest.raises(InferEngineError, match="is unexpected"):
        text_alone.executor.adapters.read("pirate")
