"""ONNX Runtime computes what torch computes, from an export that is kept and trusted only while it is whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from inferengine import LLM, SamplingParams
from inferengine.config import Config
from inferengine.engine.process import build_executor
from inferengine.errors import ConfigError
from inferengine.executor.onnx import export
from inferengine.executor.onnx import model as onnx_model
from inferengine.executor.onnx.export import MANIFEST, WEIGHTS, export_folder
from inferengine.executor.onnx.model import (
    Binding,
    RunLimit,
    TokenRange,
    in_pieces,
    limit_of,
    resolve,
    runs_of,
    without_drafts,
)
from inferengine.executor.settings import executor_settings
from inferengine.executor.slots import columns_of
from inferengine.kernels.batch import StepColumns
from tests.executor.engine import Engine
from tests.executor.test_isolation import NEVER, POISON, Poisoner
from tests.models.checkpoints import FAMILIES, make_model, model_of, save
from tests.models.families import CASES, Case, compare
from tests.models.test_parity import one_prompt

NAMES = ("llama", "llama-tied-biases", "llama-yarn-rope", "qwen2", "qwen2-mixed-window", "qwen3", "gpt2")
OTHERS = ("gemma2", "olmo2", "cohere", "pythia", "opt", "ministral3")  # of other norms, blocks and rotations


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a cache folder of these tests' own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "inferengine" / "onnx"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("tiny"))


def build_onnx(config: Config) -> Any:
    return build_executor(config.with_values(engine={"executor": "onnx"}))


def onnx_engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, build=build_onnx, **options)


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(10, 300) for _ in range(length)] for length in lengths]


def export_of(folder: Path, **model: Any) -> Path:
    config = Config().with_values(model={"path": str(folder), **model}, engine={"device": "cpu"})
    return export_folder(executor_settings(resolve(config)))


# -- what it computes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_chunks_prefix_hits_preemption_and_draft_tokens_give_the_tokens_of_transformers(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name] if name in OTHERS else Case(*FAMILIES[name])
    model = model_of(case.config, case.values)
    engine = compare(save(model, tmp_path), model, case, build=build_onnx)
    assert engine.core.scheduler.stats.num_cached_tokens > 0
    assert engine.core.scheduler.stats.num_preemptions > 0


def test_a_step_may_have_more_tokens_than_the_model_has_positions(tmp_path: Path) -> None:
    model = make_model("llama", max_position_embeddings=48)
    folder, prompts = save(model, tmp_path), prompts_of(30, 25, 31)
    assert onnx_engine(folder, budget=128).generate(prompts, 6) == Engine(folder, budget=128).generate(prompts, 6)


def test_a_step_beyond_the_memory_of_a_run_takes_several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts behind a context, and decodes beside them, in pieces of a few queries or rows."""
    prompts = [prompt * 2 for prompt in prompts_of(40, 9, 33, 3)]
    expected = Engine(folder, budget=96).generate(prompts, 12)
    shapes: list[tuple[int, int, int]] = []

    def runs(columns: StepColumns, limit: RunLimit, **options: Any) -> Iterator[TokenRange]:
        for run in runs_of(columns, limit, **options):
            part = run.columns
            rows, longest = len(part.row_slot), int(np.diff(part.query_start).max())
            shapes.append((longest * rows, rows, int(part.row_len.max())))
            yield run

    monkeypatch.setattr(onnx_model, "runs_of", runs)
    monkeypatch.setattr(onnx_model, "RUN_BYTES", 50_000)
    engine = onnx_engine(folder, budget=96)
    assert engine.generate(prompts, 12) == expected
    limit = limit_of(engine.executor.model.config)
    assert all(limit.has_room(*shape) for shape in shapes)
    assert any(rows > 1 for _, rows, _ in shapes)
    assert any(queries > rows for queries, rows, _ in shapes)


def step_of(folder: Path, starts: list[int], counts: list[int]) -> StepColumns:
    plan = one_prompt(onnx_engine(folder), [1])
    return columns_of(
        plan._replace(
            slots=list(range(len(starts))),
            starts=starts,
            counts=counts,
            samples=[True] * len(starts),
            num_decodes=0,
            num_tokens=sum(counts),
            num_drafts=[0] * len(starts),
        )
    )


def test_a_row_is_split_only_where_it_is_beyond_the_limit(folder: Path) -> None:
    columns = step_of(folder, [0, 10, 100], [8, 1, 5])
    assert in_pieces(columns, RunLimit(most=10_000, score=1, key=8)) is columns
    pieces = in_pieces(columns, RunLimit(most=1050, score=1, key=8))  # behind 105 keys two queries have room
    assert pieces.row_slot.tolist() == [0, 1, 2, 2, 2]
    assert pieces.row_start.tolist() == [0, 10, 100, 102, 104]
    assert pieces.row_len.tolist() == [8, 11, 102, 104, 105]
    assert np.diff(pieces.query_start).tolist() == [8, 1, 2, 2, 1]


def test_decodes_behind_long_contexts_are_divided_among_runs(folder: Path) -> None:
    columns = step_of(folder, [99, 99, 99, 99, 9], [1] * 5)
    runs = runs_of(columns, RunLimit(most=2 * 100 * 9, score=1, key=8))
    assert [(run.first, run.last) for run in runs] == [(0, 2), (2, 4), (4, 5)]


def test_on_a_card_a_graph_begins_when_torch_has_made_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: calls.append("torch is done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    session: Any = SimpleNamespace(
        io_binding=lambda: None, run_with_iobinding=lambda io: calls.append("the graph runs")
    )
    Binding(session, torch.device("cuda", 0)).run()
    assert calls == ["torch is done", "the graph runs"]


def test_every_filter_and_penalty_draws_what_torch_draws(folder: Path) -> None:
    asked = {
        "temperature": 0.9, "seed": 7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.5, "min_tokens": 4, "eos": (5,), "logit_bias": ((9, 2.0),),
        "bad_words_ids": ((11, 12),),
    }  # fmt: skip
    prompts = prompts_of(20, 7, 31, 12)
    assert onnx_engine(folder).generate(prompts, 24, **asked) == Engine(folder).generate(prompts, 24, **asked)


def test_log_probabilities_and_embeddings_are_those_of_torch(folder: Path) -> None:
    prompt = prompts_of(40)[0]
    engines = [Engine(folder), onnx_engine(folder)]
    for engine in engines:
        engine.submit(prompt, 6, logprobs=3, prompt_logprobs=2)
        engine.embed(prompt)
        engine.embed(prompt, "mean")
        engine.run()
    torch_engine, engine = engines
    for kind in ("logprobs", "prompt_logprobs"):
        expected, found = getattr(torch_engine, kind)[1], getattr(engine, kind)[1]
        assert [(item.rank, item.top_ids) for item in found] == [(item.rank, item.top_ids) for item in expected]
        values = [[[item.logprob, *item.top_logprobs] for item in items] for items in (found, expected)]
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    for uid in (2, 3):
        np.testing.assert_allclose(engine.embeddings[uid], torch_engine.embeddings[uid], atol=1e-5)


def test_a_swapped_sequence_goes_on_where_it_was(folder: Path) -> None:
    options = {"num_blocks": 12, "preemption": "swap", "swap_is_cheap": True}
    prompts = prompts_of(20, 7, 31, 12)
    engine = onnx_engine(folder, **options)
    assert engine.generate(prompts, 24) == Engine(folder, **options).generate(prompts, 24)
    assert engine.core.scheduler.snapshot().num_blocks_swapped_in > 0


def test_a_row_that_is_no_number_disturbs_neither_its_neighbours_nor_its_own_verification(
    folder: Path, tmp_path: Path
) -> None:
    broken = make_model("llama")
    broken.get_input_embeddings().weight.data[POISON] = float("nan")
    prompts = prompts_of(20, 18, 25)
    expected = onnx_engine(folder, budget=64).generate(prompts, 12, **NEVER)
    engine = onnx_engine(save(broken, tmp_path), budget=64, proposer=Poisoner(), max_drafts=3, max_running_to_draft=4)
    uids = [engine.submit(prompt, 12, **NEVER) for prompt in prompts]
    engine.step()
    culprit = engine.submit([POISON, *prompts[0]], 12)
    engine.run()
    assert [engine.outputs[uid] for uid in uids] == expected
    assert engine.finished[culprit].reason == "error"


def test_the_library_takes_it_by_name() -> None:
    """The embedded model, with its draft model."""
    answers = []
    for name in ("onnx", "torch"):
        llm = LLM(engine={"executor": name, "device": "cpu"}, cache={"num_blocks": 64})
        answers.append(llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=24))[0].choices[0])
        llm.close()
    assert answers[0].token_ids == answers[1].token_ids


def test_int8_is_near_to_fp32_in_a_fraction_of_the_bytes(folder: Path) -> None:
    prompt = prompts_of(53)[0]
    logits = []
    for quantization in ("none", "int8_w8a8"):
        engine = onnx_engine(folder, budget=64, model={"quantization": quantization})
        hidden: list[torch.Tensor] = []
        head = engine.executor.model.logits
        engine.executor.model.logits = lambda x, head=head, hidden=hidden: hidden.append(head(x)) or hidden[-1].clone()
        engine.executor.execute(one_prompt(engine, prompt)).result()
        logits.append(hidden[0])
    assert 0.0 < float((logits[1] - logits[0]).norm() / logits[0].norm()) < 0.1
    sizes = [(export_of(folder, quantization=name) / WEIGHTS).stat().st_size for name in ("none", "int8_w8a8")]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize(
    ("machine", "flags", "most"),
    [
        ("x86_64", "avx2 fma", 64), ("x86_64", "avx2 avx512_vnni", 127), ("x86_64", "avx2 avx_vnni", 127),
        ("x86_64", None, 64), ("aarch64", "asimd", 127),
    ],
)  # fmt: skip
def test_codes_are_as_large_as_the_processor_can_add(
    machine: str, flags: str | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(export, "CPU_INFO", info)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert export.most_code() == most


# -- a step's runs -----------------------------------------------------------------------------------------------------


def test_decodes_share_a_run_with_short_rows_and_long_prompts_have_one_each(folder: Path) -> None:
    plan = one_prompt(onnx_engine(folder), [1])._replace(
        slots=[0, 1, 2, 3, 0], starts=[5, 9, 4, 0, 8], counts=[1, 1, 3, 60, 40], samples=[True] * 5,
        num_decodes=2, num_tokens=105, num_drafts=[0, 0, 2, 0, 0],
    )  # fmt: skip
    columns = columns_of(plan)
    limit = RunLimit(most=1 << 20, score=4, key=4)
    assert [(run.first, run.last) for run in runs_of(columns, limit)] == [(0, 5), (5, 105)]
    assert [(run.first, run.last) for run in runs_of(columns, limit, alone=True)] == [
        (0, 1),
        (1, 2),
        (2, 5),
        (5, 65),
        (65, 105),
    ]
    apart = without_drafts(columns)
    assert apart.query_start.tolist() == [0, 1, 2, 3, 4, 5, 65, 105]
    assert apart.row_start.tolist() == [5, 9, 4, 5, 6, 0, 8]
    assert apart.row_len.tolist() == [6, 10, 5, 6, 7, 60, 48]


# -- the export --------------------------------------------------------------------------------------------------------


def test_an_export_is_made_once(folder: Path) -> None:
    onnx_engine(folder)
    before = {file: file.stat().st_ino for file in export_of(folder).iterdir()}
    onnx_engine(folder)
    assert {file: file.stat().st_ino for file in export_of(folder).iterdir()} == before


def cut_weights(kept: Path) -> None:
    os.truncate(kept / WEIGHTS, 4096)


def change_graph(kept: Path) -> None:
    (kept / "head.onnx").write_bytes((kept / "norm.onnx").read_bytes())


def forge_graph(kept: Path) -> None:
    """Write a graph that is none, with which the manifest agrees."""
    (kept / "head.onnx").write_bytes(b"\xff" * 64)
    manifest = json.loads((kept / MANIFEST).read_text())
    manifest["files"]["head.onnx"] = {"bytes": 64, "sha256": ""}
    (kept / MANIFEST).write_text(json.dumps(manifest))


def lose_graph(kept: Path) -> None:
    (kept / "body.onnx").unlink()


def leave_folder(kept: Path) -> None:
    manifest = json.loads((kept / MANIFEST).read_text())
    manifest["files"]["../weights.bin"] = {"bytes": 0, "sha256": ""}
    (kept / MANIFEST).write_text(json.dumps(manifest))


def break_manifest(kept: Path) -> None:
    (kept / MANIFEST).write_text("[1, 2")


@pytest.mark.parametrize(
    "damage",
    [cut_weights, change_graph, forge_graph, lose_graph, leave_folder, break_manifest],
    ids=lambda f: f.__name__,
)
def test_a_damaged_export_is_made_anew(folder: Path, damage: Any) -> None:
    prompts = prompts_of(9)
    expected = onnx_engine(folder).generate(prompts, 6)
    damage(export_of(folder))
    assert onnx_engine(folder).generate(prompts, 6) == expected


def test_a_changed_checkpoint_is_exported_anew_and_its_older_export_removed(
    folder: Path, tmp_path: Path, cache: Path
) -> None:
    copied = tmp_path / "changing"
    shutil.copytree(folder, copied)
    onnx_engine(copied)
    first = export_of(copied)
    other = make_model("llama")
    other.get_input_embeddings().weight.data.add_(0.5)
    save(other, copied)
    os.utime(copied / "model.safetensors", ns=(1, 1))  # files of one size, written within one tick of the clock
    engine = onnx_engine(copied)
    assert engine.generate(prompts_of(9), 6) == Engine(copied).generate(prompts_of(9), 6)
    assert export_of(copied).is_dir()
    assert not first.exists()
    assert not list(cache.glob(".unfinished-*"))


def test_of_engines_that_start_at_once_one_exports(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = tmp_path / "shared"
    shutil.copytree(folder, copied)
    left = cache / ".unfinished-by-a-process-that-was-killed"
    left.mkdir(parents=True)
    made: list[Path] = []
    write = export._export
    monkeypatch.setattr(export, "_export", lambda *each: (made.append(each[2]), write(*each)))
    settings = executor_settings(resolve(Config().with_values(model={"path": str(copied)})))
    engines = [threading.Thread(target=export.open_export, args=(settings, lambda *each: None)) for _ in range(3)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join()
    assert len(made) == 1
    assert not list(cache.glob(".unfinished-*"))


def test_random_weights_are_exported_too(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    assert onnx_engine(tmp_path, model={"load_format": "dummy"}).generate(prompts_of(9), 6)


def test_a_cache_that_cannot_be_written_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME") as refusal:
        onnx_engine(folder)
    assert refusal.value.field == "engine.executor"


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "dtype", "bfloat16"),
        ("model", "quantization", "int4"),
        ("model", "adapters", "adapters"),
        ("cache", "dtype", "fp8"),
        ("engine", "deterministic", True),
        ("engine", "tensor_parallel", 2),
    ],
)
def test_what_it_cannot_do_is_refused_by_its_key(section: str, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="onnx") as refusal:
        build_onnx(Config().with_values(**{section: {key: value}}))
    assert refusal.value.field == f"{section}.{key}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        build_onnx(Config().with_values(engine={"device": "cuda"}))
    assert refusal.value.field == "engine.device"


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    case = CASES["mixtral"]
    with pytest.raises(ConfigError, match=r"mixture of experts.*torch") as refusal:
        onnx_engine(save(model_of(case.config, case.values), tmp_path))
    assert refusal.value.field == "engine.executor"


def test_nothing_is_collected_for_its_makers(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    program = "import inferengine.executor.onnx, onnxruntime"
    subprocess.run([sys.executable, "-c", program], env={**environment, **home}, check=True)
    assert not list(tmp_path.rglob("*onnxruntime*"))


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("inferengine.executor.onnx.model", "inferengine.executor.onnx.export"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"inferengine\[onnx\]"):
        build_onnx(Config())
