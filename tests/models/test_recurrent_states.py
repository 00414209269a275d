"""Models with states beside keys and values (convolutions, state-space models, linear attention), with transformers'
modules: against transformers in fp32, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferengine.config import Config
from inferengine.core.executor import Capacity, KVGroup
from inferengine.core.sequence import RowFailure
from inferengine.core.speculation import speculation_method
from inferengine.engine.options import scheduler_options, unused_features
from inferengine.errors import ConfigError
from inferengine.executor.load import dry_run
from inferengine.executor.memory.plan import make_plan, plan_figures, plan_lines
from inferengine.executor.settings import executor_settings
from inferengine.models.recurrent import pieces_of
from inferengine.models.transformers_fallback import _read
from tests.executor.engine import Engine
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, logits_reference, model_of, save
from tests.models.families import DELTA, EVEN, TIE, Case, compare, prompts_of

SMALL = {**EVEN, "num_hidden_layers": 3, "initializer_range": 0.25}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 12, "mamba_d_head": 10, "mamba_n_groups": 2, "mamba_d_state": 16,
                          "mamba_d_conv": 3, "mamba_chunk_size": 16}  # fmt: skip
MIXED = ["mamba", "attention", "mamba"]
BARE_MAMBA: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 16, "initializer_range": 0.25,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
GRANITE = {**SMALL, **MAMBA2, "layer_types": MIXED, "shared_intermediate_size": 56}
CASES = {
    "qwen3-next": Case("Qwen3NextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3.5": Case("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": True}),
    "qwen3.5-moe": Case("Qwen3_5MoeTextConfig", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 24}),
    "granite-4-hybrid": Case("GraniteMoeHybridConfig", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3,
                                                        "embedding_multiplier": 3.0, "logits_scaling": 1.7}),
    "granite-4-hybrid, dense": Case("GraniteMoeHybridConfig", {**GRANITE, "num_local_experts": 0,
                                                               "position_embedding_type": "rope"}),
    "lfm2": Case("Lfm2Config", {**SMALL, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}),
    "lfm2-moe": Case("Lfm2MoeConfig", {**SMALL, **EXPERTS, "layer_types": ["conv", "full_attention", "conv"],
                                       "num_dense_layers": 1}),
    "nemotron-h, experts without a gate": Case("NemotronHConfig", {
        **SMALL, "num_hidden_layers": 5, "head_dim": 10, "mamba_num_heads": 12, "mamba_head_dim": 10, "n_groups": 2,
        "time_step_min": 0.3,
        "ssm_state_size": 16, "chunk_size": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 20,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]}),
    "falcon-h1, both in each layer": Case("FalconH1Config", {**SMALL, **MAMBA2, "num_hidden_layers": 2,
                                                             "mamba_d_ssm": 120}),
    "bamba": Case("BambaConfig", {**SMALL, **MAMBA2, "attn_layer_indices": [1]}),
    "jamba, token by token": Case("JambaConfig", {**SMALL, "num_hidden_layers": 2, "attn_layer_period": 2,
                                                  "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 5,
                                                  "mamba_d_state": 8},
                                 within=1e-3),  # a last digit of the weights moves the reference by 1.2e-4
    "mamba2, no attention": Case("Mamba2Config", {**BARE_MAMBA, "num_heads": 12, "head_dim": 8, "n_groups": 2,
                                                  "chunk_size": 16}),
    "mamba2, limited time steps": Case("Mamba2Config", {**BARE_MAMBA, "num_heads": 12, "head_dim": 8, "n_groups": 2,
                                                        "chunk_size": 16, "time_step_limit": (0.05, 0.5)}),
    "falcon-h1, limited time steps": Case("FalconH1Config", {**SMALL, **MAMBA2, "num_hidden_layers": 2,
                                                             "mamba_d_ssm": 120, "time_step_limit": (0.5, 1.0),
                                                             "ssm_multipliers": [0.3, 1.0, 1.5, 0.7, 2.0]}),
    "mamba, no attention, token by token": Case("MambaConfig", BARE_MAMBA),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_transformers(name, tmp_path):
    case = CASES[name]
    model = model_of(case.config, case.values)
    engine = compare(save(model, tmp_path), model, case)
    assert engine.executor.implementation == "transformers"
    assert engine.capacity.has_states
    assert engine.core.scheduler.stats.num_preemptions > 0
    caches_prefixes = engine.core.scheduler.stats.num_cached_tokens > 0
    assert caches_prefixes is not ("token by token" in name)


def test_weights_are_as_they_are_stored_where_training_rescaled_them(tmp_path):
    """transformers' own loading divides them by the root of the number of layers."""
    model = model_of("Mamba2Config", {**CASES["mamba2, no attention"].values, "rescale_prenorm_residual": True})
    compare(save(model, tmp_path), model, CASES["mamba2, no attention"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> tuple[Any, Path]:
    """Return (transformers' model, the folder of its checkpoint)."""
    model = model_of("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": False})
    return model, save(model, tmp_path_factory.mktemp("qwen"))


def expected_of(model: Any, engine: Engine, prompt: list[int], uid: int) -> list[int]:
    return greedy_reference(model, prompt, engine.outputs[uid])


@pytest.mark.parametrize(("name", "is_divided"), [("mamba, no attention, token by token", True), ("lfm2", False)])
def test_a_module_that_begins_anew_after_each_chunk_is_found_in_16_bits(name, is_divided, tmp_path):
    """Where rounding is as large as what is missing."""
    case = CASES[name]
    engine = Engine(save(model_of(case.config, case.values), tmp_path), model={"dtype": "bfloat16"})
    assert engine.executor.model.states.one_by_one is is_divided


def test_a_slot_that_had_another_request_begins_anew(qwen):
    model, folder = qwen
    engine = Engine(folder, max_num_seqs=1)
    for prompt in prompts_of(Case("", {}, lengths=(19, 1, 5))):
        (output,) = engine.generate([prompt], 6)
        assert output == greedy_reference(model, prompt, output)


def test_requests_join_and_leave_while_others_decode(qwen):
    model, folder = qwen
    engine, requests = Engine(folder, budget=12, max_num_seqs=3), []
    for number, prompt in enumerate(prompts_of(Case("", {}, lengths=(9, 30, 1, 17, 5, 12)))):
        requests.append((prompt, engine.submit(prompt, 3 + 4 * (number % 3))))
        engine.step()
        engine.step()
    engine.run()
    for prompt, uid in requests:
        assert engine.outputs[uid] == expected_of(model, engine, prompt, uid)


def test_choices_of_one_prompt_begin_from_its_state(qwen):
    model, folder = qwen
    engine, prompt = Engine(folder), list(range(40, 57))
    first = engine.submit(prompt, 8)
    others = [engine.submit(prompt, 8, fork_of=first) for _ in range(2)]
    engine.run()
    assert engine.outputs[first] == expected_of(model, engine, prompt, first)
    assert [engine.outputs[uid] for uid in others] == [engine.outputs[first]] * 2


def test_steps_under_way_beside_each_other_keep_the_order_of_states(qwen):
    model, folder = qwen
    engine = Engine(folder, budget=12, overlap=True)
    prompts = prompts_of(Case("", {}, lengths=(9, 30, 17)))
    for prompt, output in zip(prompts, engine.generate(prompts, 8), strict=True):
        assert output == greedy_reference(model, prompt, output)


def test_a_request_of_bad_numbers_leaves_its_neighbours_states_as_they_are(tmp_path):
    model = model_of("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": False})
    prompts = prompts_of(Case("", {}, lengths=(20, 9)))
    sound = Engine(save(model, tmp_path / "sound"), budget=8).generate(prompts, 12, logit_bias=((250, -100.0),))
    model.get_input_embeddings().weight.data[250] = float("nan")
    engine = Engine(save(model, tmp_path / "broken"), budget=8)
    uids = [engine.submit(prompt, 12, logit_bias=((250, -100.0),)) for prompt in prompts]
    for _ in range(6):
        engine.step()
    culprit = engine.submit([3, 4, 250, 5], 12)
    engine.run()
    assert engine.finished[culprit].detail == RowFailure.NOT_A_NUMBER.value
    assert [engine.outputs[uid] for uid in uids] == sound


def test_a_prompts_logprobs_and_embeddings_are_transformers(qwen):
    model, folder = qwen
    engine, prompt = Engine(folder, budget=8), list(range(20, 41))
    uid = engine.submit(prompt, 1, prompt_logprobs=0)
    last, mean = engine.embed(prompt), engine.embed(prompt, "mean")
    engine.run()
    expected = logits_reference(model, prompt)[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([item.logprob for item in engine.prompt_logprobs[uid] if item is not None])
    assert torch.allclose(found, expected, atol=1e-4)
    with torch.inference_mode():
        states = model.model(torch.tensor([prompt])).last_hidden_state[0]
    for uid, state in ((last, states[-1]), (mean, states.mean(0))):
        assert torch.allclose(torch.tensor(engine.embeddings[uid]), state / state.norm(), atol=1e-4)


def test_adapters_change_modules_with_states_in_a_step_with_others(qwen, tmp_path):
    model, folder = qwen
    merged = write_adapter(tmp_path / "pirate", model, targets=("in_proj_qkv", "out_proj", "q_proj"), dora=True)
    engine = Engine(folder, budget=10, model={"adapters": str(tmp_path)})
    prompts = prompts_of(Case("", {}, lengths=(9, 22, 9, 14)))
    uids = [engine.submit(prompt, 8, adapter=number % 2) for number, prompt in enumerate(prompts)]
    engine.run()
    for number, (prompt, uid) in enumerate(zip(prompts, uids, strict=True)):
        assert engine.outputs[uid] == expected_of(merged if number % 2 else model, engine, prompt, uid)


def test_a_missing_expert_without_a_gate_is_named(tmp_path):
    case = CASES["nemotron-h, experts without a gate"]
    path = save(model_of(case.config, case.values), tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = "backbone.layers.1.mixer.experts.4.up_proj.weight"
    assert dry_run(tmp_path) == sum(tensor.numel() for tensor in tensors.values())
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(ConfigError, match=f"the tensor {name} is missing"):
        dry_run(tmp_path)


@pytest.mark.parametrize("end", ["", "$"])
def test_a_beginning_of_names_is_renamed_however_transformers_writes_its_pattern(end, tmp_path, monkeypatch):
    case = CASES["qwen3.5"]
    path = save(model_of(case.config, case.values), tmp_path) / "model.safetensors"
    mapping = SimpleNamespace(source_patterns=[rf"^model\.language_model\.(.+){end}"], target_patterns=[r"model.\1"])
    monkeypatch.setattr(transformers.conversion_mapping, "get_checkpoint_conversion_mapping", lambda kind: [mapping])
    _read.cache_clear()  # it keeps what an earlier test read of the same configuration
    tensors = {"model.language_model." + key.removeprefix("model."): value for key, value in load_file(path).items()}
    save_file(tensors, path)
    assert dry_run(tmp_path) == sum(tensor.numel() for tensor in tensors.values())


def test_a_prompt_is_computed_in_chunks_that_fit_it(tmp_path):
    """The recurrence of Mamba 2 would pad each piece to 256 tokens."""
    values = {**CASES["mamba2, no attention"].values, "chunk_size": 256}
    folder = save(model_of("Mamba2Config", values), tmp_path)
    engine, prompt = Engine(folder, budget=128, cache={"prefix_caching": False}), list(range(100))
    mixer = next(module for module in engine.executor.model.base.modules() if hasattr(module, "chunk_size"))
    for count, expected in ((5, 16), (16, 16), (17, 32), (100, 64)):
        engine.generate([prompt[:count]], 1)
        assert mixer.chunk_size == expected


@pytest.mark.parametrize("name", ["qwen3.5", "mamba, no attention, token by token"])
def test_weights_may_be_quantized_at_load(name, tmp_path):
    model = model_of(*CASES[name][:2])
    engine, prompt = Engine(save(model, tmp_path), model={"quantization": "int8"}), list(range(20, 41))
    uid = engine.submit(prompt, 1, logprobs=20)
    engine.run()
    expected = logits_reference(model, prompt)[-1].log_softmax(-1).topk(20).values
    difference = (torch.tensor(engine.logprobs[uid][0].top_logprobs) - expected).abs().max()
    assert 1e-4 < float(difference) < 0.5


# -- the division of a step --------------------------------------------------------------------------------------------


def divided(
    *rows: tuple[int, int, int], one_by_one: bool = False, kept: list[tuple[int, int, int]] | None = None
) -> list[tuple[list[int], int, bool, list[int]]]:
    """Return, of rows (slot, start, tokens), the slots, the length, whether they are fresh, and the tokens of each
    piece."""
    slots, starts, counts = (np.array(column) for column in zip(*rows, strict=True))
    bounds = np.concatenate(([0], np.cumsum(counts)))
    step = pieces_of(slots, starts, bounds, torch.device("cpu"), one_by_one=one_by_one, kept=kept or [])
    places = torch.cat([piece.tokens for piece in step.pieces])
    in_order = places if step.order is None else places[step.order]
    assert in_order.tolist() == list(range(int(counts.sum())))
    return [(p.slots.tolist(), p.length, p.is_fresh, p.tokens.tolist()) for p in step.pieces]


def test_a_step_of_decodes_is_one_piece():
    assert divided((4, 9, 1), (0, 3, 1), (2, 1, 1)) == [([4, 0, 2], 1, False, [0, 1, 2])]


def test_rows_of_equal_length_are_one_piece_unless_one_begins():
    assert divided((4, 9, 1), (0, 3, 2), (2, 0, 2), (1, 5, 2)) == [
        ([4], 1, False, [0]),
        ([0, 1], 2, False, [1, 2, 5, 6]),
        ([2], 2, True, [3, 4]),
    ]


def test_one_by_one_only_what_goes_on_is_divided():
    assert divided((4, 9, 2), (2, 0, 2), (1, 5, 3), one_by_one=True) == [
        ([4, 1], 1, False, [0, 4]),
        ([2], 2, True, [2, 3]),
        ([4, 1], 1, False, [1, 5]),
        ([1], 1, False, [6]),
    ]


def test_rows_are_divided_where_their_state_is_kept_and_no_part_comes_before_the_one_ahead_of_it():
    kept = [(0, 12, 5), (2, 2, 7), (2, 3, 6)]  # (row, tokens of its sequence, place)
    assert divided((4, 9, 5), (0, 3, 2), (2, 0, 5), kept=kept) == [
        ([4], 3, False, [0, 1, 2]),
        ([0], 2, False, [5, 6]),
        ([2], 2, True, [7, 8]),
        ([4], 2, False, [3, 4]),
        ([2], 1, False, [9]),
        ([2], 2, False, [10, 11]),
    ]


def test_one_by_one_what_follows_the_kept_state_of_a_beginning_is_divided_too():
    assert divided((2, 0, 5), one_by_one=True, kept=[(0, 3, 1)]) == [
        ([2], 3, True, [0, 1, 2]),
        ([2], 1, False, [3]),
        ([2], 1, False, [4]),
    ]


# -- prefixes ----------------------------------------------------------------------------------------------------------

PREFIXES = ["granite-4-hybrid", "mamba2, no attention", "lfm2", "qwen3.5", "jamba, token by token"]


def room_for(num_snapshots: int, folder: Path) -> dict[str, Any]:
    """Return the part `cache` of a configuration with so many snapshots."""
    plan = plan_of(folder, 1 << 30, max_num_seqs=1)
    return {"snapshot_gib": (num_snapshots + 0.5) * plan.states / 2 / (1 << 30)}


def assert_is_transformers(model: Any, engine: Engine, prompt: list[int], uid: int, within: float = 2e-4) -> None:
    """Assert that every token and the 20 best log-probabilities of each are those of transformers without a cache."""
    output = engine.outputs[uid]
    logits = logits_reference(model, prompt + output[:-1])[len(prompt) - 1 :]
    behind = logits.amax(-1) - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    assert float(behind.max()) < TIE
    found = torch.tensor([item.top_logprobs for item in engine.logprobs[uid]])
    assert float((found - logits.log_softmax(-1).topk(20).values).abs().max()) < within


@pytest.mark.parametrize(("name", "overlap"), [(name, place % 2 == 0) for place, name in enumerate(PREFIXES)])
def test_conversations_with_one_beginning_go_on_from_snapshots(name, overlap, tmp_path):
    """In chunks, with preemption, some cancelled, and with so few snapshots that they are evicted."""
    case = CASES[name]
    model = model_of(case.config, case.values)
    cache = room_for(6, save(model, tmp_path))
    engine = Engine(tmp_path, budget=20, num_blocks=28, cache=cache, overlap=overlap)
    (beginning, *questions) = prompts_of(Case("", {}, lengths=(27, 9, 14, 5, 11)))
    conversations = [[*beginning, *question] for question in questions]
    for turn in range(3):
        uids = [engine.submit(each, 22, logprobs=20) for each in conversations]
        given_up = engine.submit([*beginning, 7, turn], 30)
        for _ in range(4):
            engine.step()
        engine.core.cancel(given_up)
        engine.run()
        for prompt, uid in zip(conversations, uids, strict=True):
            assert_is_transformers(model, engine, prompt, uid, case.within)
        assert not turn or sum(engine.finished[uid].num_cached for uid in uids) > 0
        asked = zip(conversations, uids, questions, strict=True)
        conversations = [[*each, *engine.outputs[uid], *question] for each, uid, question in asked]
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert engine.capacity.num_snapshots == 6


def test_what_is_cached_is_computed_no_more_until_a_reset(qwen):
    model, folder = qwen
    engine, prompt = Engine(folder), list(range(40, 61))
    for expected in (0, 16, 16):
        uid = engine.submit(prompt, 6, logprobs=20)
        engine.run()
        assert engine.finished[uid].num_cached == expected
        assert_is_transformers(model, engine, prompt, uid)
    engine.core.flush()
    uid = engine.submit(prompt, 6, logprobs=20)
    engine.run()
    assert engine.finished[uid].num_cached == 0
    assert_is_transformers(model, engine, prompt, uid)


def test_adapters_and_salts_keep_their_states_apart(qwen, tmp_path):
    model, folder = qwen
    merged = write_adapter(tmp_path / "pirate", model, targets=("in_proj_qkv", "out_proj", "q_proj"), dora=True)
    engine, prompt = Engine(folder, budget=10, model={"adapters": str(tmp_path)}), list(range(40, 61))
    asked = [(0, b""), (1, b""), (0, b"tenant"), (0, b""), (1, b""), (0, b"tenant")]
    for number, (adapter, salt) in enumerate(asked):
        uid = engine.submit(prompt, 6, logprobs=20, adapter=adapter, salt=salt)
        engine.run()
        assert engine.finished[uid].num_cached == (0 if number < 3 else 16)
        assert_is_transformers(merged if adapter else model, engine, prompt, uid)


def test_a_snapshot_of_a_step_with_bad_numbers_is_of_its_own_row(tmp_path):
    """Such a step is computed twice on a CPU."""
    model = model_of("Qwen3_5TextConfig", {**DELTA, "tie_word_embeddings": False})
    prompt = prompts_of(Case("", {}, lengths=(20,)))[0]
    model.get_input_embeddings().weight.data[250] = float("nan")
    engine = Engine(save(model, tmp_path), budget=40)
    culprit = engine.submit([3, 4, 250, *range(7)], 12)
    for expected in (0, 16):
        uid = engine.submit(prompt, 12, logprobs=20)
        engine.run()
        assert engine.finished[uid].num_cached == expected
        assert_is_transformers(model, engine, prompt, uid)
    assert engine.finished[culprit].detail == RowFailure.NOT_A_NUMBER.value
    again = engine.submit([3, 4, 250, *range(7)], 12)
    engine.run()
    assert engine.finished[again].num_cached == 0


def test_a_model_that_goes_on_token_by_token_caches_prefixes_where_it_is_asked_to(tmp_path):
    case = CASES["mamba, no attention, token by token"]
    folder = save(model_of(case.config, case.values), tmp_path)
    assert Engine(folder).capacity.num_snapshots == 0
    assert Engine(folder, cache=room_for(3, folder)).capacity.num_snapshots == 3


def test_without_the_prefix_cache_no_memory_is_taken_for_snapshots(qwen):
    for cache in ({"prefix_caching": False}, {"layout": "contiguous"}):
        engine = Engine(qwen[1], cache=cache)
        assert engine.capacity.num_snapshots == 0
        assert engine.executor.model.states._tensors[0].shape[0] == 4 + 1
        assert unused_features(engine.capacity) == ("prefix_caching", "speculation", "swap")


# -- memory ------------------------------------------------------------------------------------------------------------


def plan_of(folder: Path, device_bytes: int, cache: dict[str, Any] | None = None, **engine: Any) -> Any:
    config = Config().with_values(model={"path": str(folder)}, engine={"device": "cpu", **engine}, cache=cache or {})
    return make_plan(executor_settings(config), device_bytes)


def test_the_plan_counts_the_states_of_all_slots(qwen):
    plan = plan_of(qwen[1], 1 << 30, max_num_seqs=7)
    of_layer = 4 * 8 * 6 * 4 + (2 * 2 * 8 + 4 * 6) * 3 * 4  # recurrence and convolution, in fp32
    assert plan.states == 8 * 2 * of_layer  # and the scratch slot's
    assert any("states of 7 running requests" in line for line in plan_lines(plan))
    assert plan.sequences(1) == 7


def test_the_plan_counts_the_snapshots_as_configured_or_a_share_of_the_device(qwen):
    (one, usual, none) = (
        plan_of(qwen[1], 1 << 20, cache=cache) for cache in ({"snapshot_gib": 2e-5}, {}, {"prefix_caching": False})
    )
    of_state = usual.snapshots // usual.num_snapshots
    assert one.num_snapshots == int(2e-5 * (1 << 30)) // of_state
    assert usual.num_snapshots == (1 << 16) // of_state
    assert (none.snapshots, none.num_snapshots) == (0, 0)
    assert none.left - usual.left == usual.snapshots
    assert any(f"{usual.num_snapshots} snapshots of states" in line for line in plan_lines(usual))
    assert plan_figures(usual)["bytes"]["snapshots"] == usual.snapshots


def test_a_step_on_a_cpu_takes_a_second_copy_of_the_states_and_keeps_none(qwen):
    few, many = (plan_of(qwen[1], 1 << 30, max_num_seqs=count) for count in (7, 27))
    assert few.left - many.left == 2 * (many.states - few.states)
    engine = Engine(qwen[1])
    engine.generate([[5, 9, 200]], 3)
    assert engine.executor.model.states._old is None


def test_fewer_requests_run_at_once_where_their_states_would_fill_the_device(qwen, caplog):
    plan = plan_of(qwen[1], 8 << 20, max_num_seqs=1000)
    assert 1 < plan.cache.max_num_seqs < 1000
    assert plan.states <= 1.1 * (8 << 20) / 8
    assert "engine.max_num_seqs is" in caplog.text


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_swapping_is_refused(qwen):
    with pytest.raises(ConfigError, match=r"scheduler.preemption: .*set it to preempt"):
        Engine(qwen[1], preemption="swap")


def test_a_draft_model_is_refused(qwen):
    values = {"model": {"path": str(qwen[1])}, "engine": {"device": "cpu"}}
    settings = executor_settings(Config().with_values(**values, speculation={"draft_model": str(qwen[1])}))
    with pytest.raises(ConfigError, match=r"speculation.draft_model: .*set speculation.method to none"):
        make_plan(settings, 1 << 30)


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_draft_tokens_are_refused(method):
    capacity = Capacity(16, [KVGroup(64)], 8, 64, 256, 100, has_states=True)
    config = Config().with_values(speculation={"method": method})
    with pytest.raises(ConfigError, match=r"speculation.method: .*set it to none"):
        scheduler_options(config, capacity)
    assert speculation_method("auto", capacity) == "none"


def test_tokens_that_meet_outside_attention_and_states_are_refused(qwen):
    model = Engine(qwen[1]).executor.model
    block = model.base.layers[0].mlp
    plain = block.forward
    block.forward = lambda x: plain(x) + 0.1 * x.cumsum(1)
    with pytest.raises(ConfigError, match="its tokens reach each other"):
        model.verify()


def test_a_state_that_a_module_keeps_itself_is_refused(qwen):
    model = Engine(qwen[1]).executor.model
    block, kept = model.base.layers[0].mlp, []
    plain = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        kept.append(x[:, -1:])
        return plain(x) + (kept[-2] if len(kept) > 1 else 0.0)

    block.forward = forward
    with pytest.raises(ConfigError, match="its tokens reach each other"):
        model.verify()
