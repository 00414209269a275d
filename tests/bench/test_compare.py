"""`inferengine bench compare`: processes of both sides, how their figures are joined, and what failed."""

from __future__ import annotations

import ast
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from inferengine.bench import compare
from inferengine.cli.main import main
from inferengine.errors import ExitCode
from inferengine.text.tokenizer import Tokenizer

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 500, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip

FIGURE = {"workload": "short", "unit": "s", "value": 1.0}

# Completes at once, and {missing} tokens too few.
PEER = """
import os
import time
from pathlib import Path
from types import SimpleNamespace as Object

def SamplingParams(max_tokens, **other):
    return max_tokens

class LLM:
    def __init__(self, model, **other):
        assert other["load_format"] == "dummy" and not other["enable_prefix_caching"]

        assert ("kv_cache_memory_bytes" in other) == ("gpu_memory_utilization" in other)
        self.log = Path(os.environ["PEER_LOG"])
        self.note("loaded")
        asked = {name: value for name, value in other.items() if name.startswith(("max_", "tensor", "kv_"))}
        names = "CUDA_VISIBLE_DEVICES", "NCCL_NVLS_ENABLE"
        self.log.with_name("asked").write_text(repr((asked, [os.environ.get(name) for name in names])))
        if Path(model).name == "hangs" or "/hangs" in str(model):
            time.sleep(60)

    def note(self, what):
        with self.log.open("a") as log:
            log.write(f"{what} {os.getpid()}\\n")

    def generate(self, requests, params, use_tqdm):
        self.note("generates")
        assert all(max(request["prompt_token_ids"]) < 500 for request in requests)
        return [Object(outputs=[Object(token_ids=[1] * (length - {missing}))]) for length in params]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 500, "max_position_embeddings": 8192}))
    return shape


@pytest.fixture
def run(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setenv("PEER_LOG", str(tmp_path / "peer.log"))

    def run(*words: str, missing: int = 0, models: bool = True) -> int:
        peer = tmp_path / "peer"
        peer.mkdir()
        (peer / "vllm.py").write_text(PEER.replace("{missing}", str(missing)))
        model = ["--model", str(folder)] if models else []
        command = ["bench", "compare", *model, "--sides", "peer", "--peer-path", str(peer)]
        command += ["--json", str(tmp_path / "found.json"), *words]
        return main(command)

    return run


def test_a_peer_is_measured_in_a_process_of_its_own(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--rows", "1,3", "--workloads", "decode,first-token") == ExitCode.OK
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["workload"] for row in found["rows"]] == ["load and warm-up", "decode 1", "decode 3", "first token"]
    assert {row["model"] for row in found["rows"]} == {"shape"}
    assert "enable_prefix_caching False" in found["settings"]["peer"]
    assert found["environment"]["command"]


def test_outputs_of_another_length_are_a_failure_and_no_figure(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--workloads", "prefill", missing=1) == ExitCode.CRASH
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["workload"] for row in found["rows"]] == ["load and warm-up"]
    (failure,) = found["failures"]
    assert "instead of" in failure["output"]


def test_several_cards_and_the_same_room_are_given_to_a_process(run: Callable[..., int], tmp_path: Path) -> None:
    """NVLink multicast stays off there."""
    words = ["--tensor-parallel", "2", "--cards", "4,5", "--context", "4096", "--kv-tokens", "4096", "--sequences", "8"]
    shapes = shapes_in(tmp_path, "a")
    assert run(*shapes, *words, "--batched-tokens", "512", "--workloads", "first-token", models=False) == ExitCode.OK
    asked, (cards, multicast) = ast.literal_eval((tmp_path / "asked").read_text())
    each = 2 * 2 * 2 * 16 * 2 // 2  # keys and values of 2 layers, 2 heads of 16, 2 bytes, over 2 cards
    sizes = {"max_model_len": 4096, "max_num_batched_tokens": 512, "max_num_seqs": 8}
    assert asked == {**sizes, "tensor_parallel_size": 2, "kv_cache_memory_bytes": 4096 * each}
    assert (cards, multicast) == ("4,5", "0")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tensor_parallel"] == 2
    assert {row["workload"] for row in found["rows"]} == {"load and warm-up", "first token"}


def test_a_quick_comparison_asks_once_for_what_it_times(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--quick", "--rows", "2", "--workloads", "decode,short-greedy") == ExitCode.OK
    lines = (tmp_path / "peer.log").read_text().splitlines()
    generated = len([line for line in lines if line.startswith("generates")])
    assert generated == 3 + 3 + 2, "3 to warm up, 3 of 2 rows, the load once before it is timed"
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["workload"] for row in found["rows"]] == ["load and warm-up", "decode 2", "short"]


def test_a_load_runs_once_before_it_is_timed() -> None:
    """What an engine compiles or caches when it first meets a load is not part of the figure."""
    asked: list[tuple[int, float]] = []

    class Counting:
        def generate_s(
            self, prompts: Sequence[list[int]], outputs: Sequence[int], drawing: compare.Drawing = compare.GREEDY
        ) -> float:
            asked.append((len(prompts), drawing.top_p))
            return 60.0 if (len(prompts), drawing.top_p) not in asked[:-1] else 1.0

    found: dict[str, float] = {}
    compare.measure(
        Counting(), 500, ["short"], [], 4096, lambda name, unit, value: found.update({name: value}), quick=True
    )
    assert asked[-4:] == [(400, 1.0), (400, 1.0), (400, 0.95), (400, 0.95)]
    assert all(value > 25_000 for value in found.values()), found


def test_drawn_decodes_are_a_workload_of_their_own(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--rows", "2", "--workloads", "decode-drawn") == ExitCode.OK
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["workload"] for row in found["rows"]] == ["load and warm-up", "decode drawn 2"]


def test_processes_that_load_together_measure_one_after_the_other(run: Callable[..., int], tmp_path: Path) -> None:
    shapes = [tmp_path / name for name in ("a", "b", "c")]
    for shape in shapes:
        shape.mkdir()
        (shape / "config.json").write_text(json.dumps(TINY))
    words = [word for shape in shapes for word in ("--model", str(shape))]
    assert run(*words, "--load-together", "--workloads", "first-token", models=False) == ExitCode.OK
    lines = [line.split() for line in (tmp_path / "peer.log").read_text().splitlines()]
    assert [what for what, _ in lines[:3]] == ["loaded"] * 3, "all have loaded before the first measures"
    measured = [process for _, process in lines[3:]]
    assert len(set(measured)) == 3
    assert measured == sorted(measured, key=measured.index), "no process measures between another's requests"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loaded_together"]
    assert {row["workload"] for row in found["rows"]} == {"first token"}, "loading beside others is no figure"


def shapes_in(folder: Path, *names: str) -> list[str]:
    """Return folders of small models: their flags."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(TINY))
        (folder / name / "tokenizer.json").write_text("{}")  # else a copy of the folder is loaded
    return [word for name in names for word in ("--model", str(folder / name))]


def peer_that(folder: Path, does: str) -> str:
    """Return a program in place of the peer's Python, which prints a figure first."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{compare.MARK}{json.dumps(FIGURE)}'\n{does}\n")
    program.chmod(0o700)
    return str(program)


def plan_of(folders: list[Path], peer: str, **values: Any) -> compare.Plan:
    environment = {"PATH": os.environ["PATH"]}
    return compare.Plan(folders, ["0", "1"], ["peer"], ["short"], [1], peer, "", 60.0, environment, **values)


def test_cards_share_the_models_that_load_together(tmp_path: Path) -> None:
    shapes_in(tmp_path, "a", "b", "c")
    folders = [tmp_path / name for name in ("a", "b", "c")]
    plan = plan_of(
        folders, peer_that(tmp_path, "exit 0"), needs=dict.fromkeys(folders, compare.Need(1, 1)), card_bytes=9
    )
    comparison = compare.Comparison(plan, progress=lambda line: None, measured=lambda comparison: None)
    comparison.run()
    assert {row["model"]: row["card"] for row in comparison.rows} == {"a": "0", "b": "1", "c": "0"}


def test_a_process_that_hangs_while_it_loads_is_ended_and_the_others_measure(
    run: Callable[..., int], tmp_path: Path
) -> None:
    words = shapes_in(tmp_path, "a", "hangs")
    limited = ("--load-together", "--workloads", "first-token", "--limit", "1")
    assert run(*words, *limited, models=False) == ExitCode.CRASH
    document = json.loads((tmp_path / "found.json").read_text())
    assert [failure["model"] for failure in document["failures"]] == ["hangs"]
    assert {row["model"] for row in document["rows"]} == {"a"}


def test_a_peer_that_cannot_be_started_is_a_failure(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--peer-python", "/nowhere/python") == ExitCode.CRASH
    (failure,) = json.loads((tmp_path / "found.json").read_text())["failures"]
    assert "/nowhere/python" in failure["output"]


def test_what_is_raised_ends_the_processes_and_is_raised(tmp_path: Path) -> None:
    """As Ctrl-C, and a report that cannot be written: nothing may go on measuring for nobody."""
    shapes_in(tmp_path, "shape")
    plan = plan_of([tmp_path / "shape"], peer_that(tmp_path, "exec sleep 60"))

    def progress(line: str) -> None:
        raise OSError("No space left on device")

    begin = time.monotonic()
    with pytest.raises(OSError, match="No space left"):
        compare.Comparison(plan, progress=progress, measured=lambda comparison: None).run()
    assert time.monotonic() - begin < 30


def test_two_models_of_one_name_are_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shapes_in(tmp_path, "one/shape", "other/shape")
    assert run(*words, models=False) == ExitCode.USAGE
    assert "several folders are named shape" in capsys.readouterr().err


def test_a_process_that_ends_early_keeps_no_other_waiting(tmp_path: Path) -> None:
    (tmp_path / "ended-0").touch()
    compare.await_turn(tmp_path, 1, 2)
    assert (tmp_path / "loaded-1").exists()


def test_what_does_not_fit_beside_the_others_forms_the_next_group() -> None:
    jobs = [compare.Job(Path(name), side, Path(name)) for name in ("large", "small") for side in compare.SIDES]
    needs = {Path("large"): compare.Need(70, 10), Path("small"): compare.Need(30, 10)}
    plan = compare.Plan([], ["0"], compare.SIDES, [], [], "", "", 1.0, {}, needs=needs, card_bytes=100)
    found = compare.groups(jobs, plan)
    assert [[(job.folder.name, job.side) for job in group] for group in found] == [
        [("large", "peer"), ("small", "peer")],
        [("large", "ours"), ("small", "ours")],
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--workloads", "decode,sleep"], "--workloads"),
        (["--sides", "theirs"], "--sides"),
        (["--rows", "0"], "--rows"),
        (["--cards", "0,1,2", "--tensor-parallel", "2"], "--cards"),
        (["--model", "/nowhere"], "--model"),
    ],
)
def test_a_bad_value_names_its_flag(
    run: Callable[..., int], words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == ExitCode.USAGE
    assert named in capsys.readouterr().err


def test_a_ratio_above_one_is_ours_whether_more_or_less_is_better() -> None:
    rows = [
        {"model": "m", "workload": "decode 1", "unit": "ms per step", "side": "ours", "value": 4.0},
        {"model": "m", "workload": "decode 1", "unit": "ms per step", "side": "peer", "value": 5.0},
        {"model": "m", "workload": "short", "unit": "output tokens/s", "side": "peer", "value": 1000.0},
        {"model": "m", "workload": "short", "unit": "output tokens/s", "side": "ours", "value": 900.0},
        {"model": "m", "workload": "load and warm-up", "unit": "s", "side": "ours", "value": 9.0},
    ]
    found = compare.joined(rows)
    assert [row.get("ratio") for row in found] == [1.25, 0.9, None]
    table = compare.markdown({"rows": found})
    assert "4 (1.25)" in table
    assert "900 (0.90)" in table, "what is lost is shown"


def test_a_folder_without_a_tokenizer_gets_one(folder: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    usable = compare.with_tokenizer(folder, scratch)
    files = {name: (usable / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    assert Tokenizer.from_files(files).encode("abc")


def test_a_folder_of_its_own_gets_a_tokenizer_beside_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    assert compare.with_tokenizer(tmp_path, tmp_path) == tmp_path
    assert (tmp_path / "tokenizer.json").exists()
    assert (tmp_path / "config.json").read_text() == '{"vocab_size": 300}'
