"""plan-memory: figures that can be checked by hand, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shapes import LLAMA_3_1_8B
from inferengine.cli.main import main
from inferengine.config import Config
from inferengine.errors import ExitCode
from inferengine.executor import cuda_graphs
from inferengine.executor.memory.plan import (
    COMMUNICATOR_BYTES,
    GRAPH_BYTES,
    MemoryPlan,
    activation_bytes,
    graph_bytes,
    held_budget,
    make_plan,
)
from inferengine.executor.settings import executor_settings
from inferengine.models import registry
from tests.models.published import PUBLISHED_V2_LITE


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    return tmp_path


def figure(output: str, name: str) -> float:
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return float(line.split(name)[1].split()[0].replace(",", ""))


def test_an_8b_model_on_an_80_gib_card(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", str(llama), "--memory", "80"]) == ExitCode.OK
    output = capsys.readouterr().out
    assert figure(output, "weights") == pytest.approx(8_030_261_248 * 2 / 2**30, abs=0.01)
    assert figure(output, "KV per token") == 2 * 32 * 8 * 128 * 2 / 1024
    kv_tokens = figure(output, "tokens in the KV cache")
    assert kv_tokens == pytest.approx(figure(output, "KV cache") * 2**30 / (128 * 1024), rel=1e-3)
    at_8k = next(line.split() for line in output.splitlines() if line.strip().startswith("8,192 "))
    assert int(at_8k[1]) == kv_tokens // 8192


def test_the_cache_is_as_large_as_the_blocks_that_are_asked_for(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan-memory", str(llama), "--memory", "80", "--cache.num_blocks", "1000", "--cache.block_size", "32"]
    assert main(asked) == ExitCode.OK
    output = capsys.readouterr().out
    assert figure(output, "tokens in the KV cache") == 32_000
    assert figure(output, "KV cache") == pytest.approx(32_000 * 128 / 2**20, abs=0.01)
    assert figure(output, "without cache.num_blocks") > 40
    assert main([*asked, "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["bytes"]["kv_cache"] == 32_000 * 128 * 1024


@pytest.mark.parametrize("memory", ["24", "80"])
def test_the_cache_is_no_larger_than_all_sequences_could_use(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a small model most of the card stays free: its tokens times the bytes of each are what is told."""
    assert main(["plan-memory", "--memory", memory, "--engine.device", "cuda", "--json"]) == ExitCode.OK
    figures = json.loads(capsys.readouterr().out)
    assert figures["kv_tokens"] == 512 * 2048
    assert figures["bytes"]["kv_cache"] == figures["kv_tokens"] * figures["kv_bytes_per_token"]
    assert figures["bytes"]["kv_budget"] > 4 * figures["bytes"]["kv_cache"]
    assert main(["plan-memory", "--memory", memory, "--engine.device", "cuda"]) == ExitCode.OK
    assert figure(capsys.readouterr().out, "KV cache") == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_more_blocks_than_memory_do_not_fit(llama: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    asked = ["plan-memory", str(llama), "--memory", "80", "--engine.device", device, "--cache.block_size", "32"]
    for num_blocks, fits in ((15_000, True), (100_000, False)):  # 59 and 391 GiB, beside 15 of weights
        flags = [*asked, "--model.dtype", "bfloat16", "--cache.num_blocks", str(num_blocks)]
        assert main(flags) == (ExitCode.OK if fits else ExitCode.MEMORY)
        assert ("It does not fit: cache.num_blocks asks for 390.62 GiB" in capsys.readouterr().out) == (not fits)
        assert main([*flags, "--json"]) == (ExitCode.OK if fits else ExitCode.MEMORY)
        assert json.loads(capsys.readouterr().out)["fits"] == fits


def test_the_blocks_that_are_asked_for_are_a_draft_models_too(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draft = ["--speculation.method", "draft", "--speculation.draft_model", str(llama)]
    sizes = []
    for more in ([], draft):
        assert main(["plan-memory", str(llama), "--memory", "80", "--cache.num_blocks", "1000", "--json", *more]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["bytes"]["kv_cache"])
    assert sizes[1] == 2 * sizes[0] > 0


def test_deepseek_v2_lite_holds_latents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """15.7 billion weights; 576 numbers of a token in each of 27 layers."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_V2_LITE))
    assert main(["plan-memory", str(tmp_path), "--memory", "80"]) == ExitCode.OK
    output = capsys.readouterr().out
    assert figure(output, "weights") == pytest.approx(15_706_484_224 * 2 / 2**30, abs=0.01)
    assert figure(output, "KV per token") == pytest.approx(27 * 576 * 2 / 1024, abs=0.05)


def test_each_of_two_cards_holds_half_of_the_model_and_of_the_cache(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*arguments: str) -> dict[str, Any]:
        assert main(["plan-memory", str(llama), "--memory", "80", "--json", *arguments]) == ExitCode.OK
        figures: dict[str, Any] = json.loads(capsys.readouterr().out)
        return figures

    one, two = planned(), planned("--tensor-parallel", "2")
    assert (one["tensor_parallel"], two["tensor_parallel"]) == (1, 2)
    assert two["bytes"]["weights"] == pytest.approx(one["bytes"]["weights"] / 2, rel=1e-4)  # norms are on both
    assert two["kv_bytes_per_token"] == one["kv_bytes_per_token"] / 2
    assert two["kv_tokens"] > 2 * one["kv_tokens"]
    assert planned("--engine.tensor_parallel", "2") == two
    inbox = 2 * 8192 * (8192 + 8) + 2 * 64 * 2 * 8192  # even and odd; whole rows with flags, packets of 64
    assert two["bytes"]["context"] - one["bytes"]["context"] == COMMUNICATOR_BYTES + inbox


def test_more_cards_than_divide_the_heads_are_refused(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {**LLAMA_3_1_8B, "num_attention_heads": 4, "num_key_value_heads": 2}
    (llama / "config.json").write_text(json.dumps(values))
    assert main(["plan-memory", str(llama), "--tensor-parallel", "8"]) == ExitCode.USAGE
    assert "engine.tensor_parallel" in capsys.readouterr().err


def test_every_graph_that_is_captured_counts_those_of_steps_with_prompts_among_them(llama: Path) -> None:
    config = Config().with_values(model={"path": str(llama)}, engine={"max_num_seqs": 256})
    settings = executor_settings(config, torch.device("cuda"))
    shape, _ = registry.read_model_config(llama)
    shapes = cuda_graphs.shapes_to_capture(256, 8192, 15e-6)  # at most 400 prompt tokens
    # Four numbers of decodes, six of prompt tokens; two of them are the same without 448. Six more without decodes.
    assert len(shapes) == 23 + 6
    buffers = activation_bytes(shape, 256 + 384, 256 + cuda_graphs.PROMPT_ROWS, torch.bfloat16)
    size = graph_bytes(shape, settings, torch.bfloat16, shapes)
    assert len(cuda_graphs.shared_sizes(256)) == 10  # of steps whose rows share prefixes
    assert size == (35 + 10 + 23 + 6) * GRAPH_BYTES + buffers
    apart = executor_settings(config.with_values(cache={"prefix_caching": False}), torch.device("cuda"))
    assert graph_bytes(shape, apart, torch.bfloat16, shapes) == (35 + 23 + 6) * GRAPH_BYTES + buffers
    plan = make_plan(settings, 80 << 30)  # for a device that is not here: every shape counts
    assert len(plan.prompt_shapes) > 23 + 6
    assert plan.graphs == graph_bytes(shape, settings, torch.bfloat16, plan.prompt_shapes) > size


@pytest.mark.parametrize("memory", ["0", "1e300"])
def test_memory_that_no_device_has_is_refused(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--memory", memory]) == ExitCode.USAGE
    assert "--memory: must be above 0 and at most 1,000,000" in capsys.readouterr().err


def plan_on_a_card(folder: Path) -> MemoryPlan:
    config = Config().with_values(model={"path": str(folder)})
    return make_plan(executor_settings(config, torch.device("cuda")), 80 << 30)


def test_the_share_of_a_card_is_divided_without_rest(llama: Path) -> None:
    plan = plan_on_a_card(llama)
    parts = (plan.weights, plan.activations, plan.slots, plan.graphs, plan.context, plan.kv_budget)
    assert sum(parts) == int(0.92 * (80 << 30))
    assert min(parts) > 0


def test_the_cache_is_as_large_as_planned_where_less_is_taken(llama: Path) -> None:
    plan = plan_on_a_card(llama)
    free = (80 << 30) - plan.weights - plan.context
    step = plan.activations + plan.slots
    assert budget_left(plan, free=free, step=step) == plan.kv_budget
    assert budget_left(plan, free=free + (1 << 30), step=step // 2) == plan.kv_budget


def test_memory_that_others_hold_is_taken_from_the_cache_never_from_the_graphs(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_on_a_card(llama)
    free = (80 << 30) - plan.weights - plan.context - (3 << 30)
    assert budget_left(plan, free=free, step=plan.activations + plan.slots) == plan.kv_budget - (3 << 30)
    assert "than planned" in caplog.text


def budget_left(plan: MemoryPlan, *, free: int, step: int) -> int:
    return held_budget(plan, 0.0, total=80 << 30, free=free, step=step)


def test_a_draft_model_has_its_weights_and_its_part_of_the_cache_in_the_plan() -> None:
    alone = Config().with_values(engine={"device": "cpu"}, speculation={"method": "none"})
    speculating = Config().with_values(engine={"device": "cpu"}, speculation={"method": "draft"})
    without, plan = (make_plan(executor_settings(config), 1 << 28) for config in (alone, speculating))
    draft = Path(__file__).parents[2] / "inferengine/assets/embedded-draft/model.safetensors"
    assert without.draft_weights == 0
    assert plan.draft_weights == pytest.approx(draft.stat().st_size * 2, rel=0.01)
    assert plan.num_kv_tokens < without.num_kv_tokens


def test_without_graphs_none_count(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan-memory", str(llama), "--memory", "80", "--engine.cuda_graphs", "false"])
    assert figure(capsys.readouterr().out, "captured graphs") == 0.0


def test_a_bare_config_file_is_enough(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", str(llama / "config.json")]) == ExitCode.OK
    assert "80 GiB" in capsys.readouterr().out


def test_what_does_not_fit_is_said_and_told_by_the_exit_code(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", str(llama), "--memory", "12"]) == ExitCode.MEMORY
    assert "does not fit" in capsys.readouterr().out


def test_the_embedded_model_ties_its_embeddings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--engine.device", "cpu", "--memory", "4"]) == ExitCode.OK
    weights = (Path(__file__).parents[2] / "inferengine/assets/embedded/model.safetensors").stat().st_size
    assert figure(capsys.readouterr().out, "weights") == pytest.approx(weights * 2 / 2**30, abs=0.01)


def test_a_window_bounds_what_a_long_sequence_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistral = {**LLAMA_3_1_8B, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_scaling": None,
               "vocab_size": 32_000, "sliding_window": 4096, "max_position_embeddings": 32_768}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    assert main(["plan-memory", str(tmp_path)]) == ExitCode.OK
    output = capsys.readouterr().out
    assert figure(output, "weights") == pytest.approx(7_241_732_096 * 2 / 2**30, abs=0.01)
    assert figure(output, "sliding windows per sequence") == (4096 + 64) * 128 / 1024  # and a block that is cut
    at = {
        words[0]: int(words[1]) for line in output.splitlines() if len(words := line.split()) == 2 and "," in words[0]
    }
    assert at["1,024"] > 4 * at["8,192"] - 8
    assert at["8,192"] == at["32,768"] > 100


def test_a_context_that_windows_leave_no_room_for_fits_when_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gemma_27b = {"head_dim": 128, "hidden_size": 5376, "intermediate_size": 21_504, "num_attention_heads": 32,
                 "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
                 "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    document = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                "text_config": gemma_27b, "torch_dtype": "bfloat16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert main(["plan-memory", str(tmp_path)]) == ExitCode.OK
    *_, at_full_length, hint = capsys.readouterr().out.splitlines()
    assert at_full_length.split() == ["131,072", "0"]
    assert "model.max_model_len" in hint
    assert main(["plan-memory", str(tmp_path), "--model.max_model_len", "131072"]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-1].split() == ["131,072", "1"]


def test_a_context_beyond_the_models_own_is_refused_under_the_key_that_asks_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not under the draft model's, of which whoever asked may know nothing."""
    assert main(["plan-memory", "--engine.device", "cpu", "--model.max_model_len", "5000"]) == ExitCode.USAGE
    assert "model.max_model_len: the model was made for 2048 tokens; 5000 are too many" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--memory"], ["--memory", "much"], ["--memory", "0"]])
def test_a_bad_size_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", *words]) == ExitCode.USAGE
    assert "--memory" in capsys.readouterr().err


def test_the_engine_logs_the_plan_before_it_loads(caplog: pytest.LogCaptureFixture) -> None:
    from inferengine.config import Config
    from inferengine.engine.process import build_executor

    with caplog.at_level("INFO", logger="inferengine.engine.process"):
        build_executor(Config().with_values(engine={"device": "cpu"}))
    assert "memory plan:" in caplog.text
    assert figure(caplog.text, "weights") == pytest.approx(0.04, abs=0.005)
    assert "sequences at once" in caplog.text


def test_a_configuration_under_any_name_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama-8b.json").write_text(json.dumps(LLAMA_3_1_8B))
    assert main(["plan-memory", str(tmp_path / "llama-8b.json"), "--json"]) == ExitCode.OK
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["fits"], plan["bytes"]["weights"]) == ("llama-8b", True, 8_030_261_248 * 2)
    assert plan["sequences_at_once"]["8192"] == plan["kv_tokens"] // 8192
    assert list(tmp_path.iterdir()) == [tmp_path / "llama-8b.json"], "nothing is left beside it"
