"""`inferengine bench compare`: processes of both sides, how their figures are joined, and what failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from inferengine.bench import compare
from inferengine.cli.main import main
from inferengine.errors import ExitCode
from inferengine.text.tokenizer import Tokenizer

# Completes at once, and {missing} tokens too few.
PEER = """
from types import SimpleNamespace as Object

def SamplingParams(max_tokens, **other):
    return max_tokens

class LLM:
    def __init__(self, model, **other):
        assert other["load_format"] == "dummy" and not other["enable_prefix_caching"]

    def generate(self, requests, params, use_tqdm):
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
def run(tmp_path: Path, folder: Path) -> Callable[..., int]:
    def run(*words: str, missing: int = 0) -> int:
        peer = tmp_path / "peer"
        peer.mkdir()
        (peer / "vllm.py").write_text(PEER.replace("{missing}", str(missing)))
        command = ["bench", "compare", "--model", str(folder), "--sides", "peer", "--peer-path", str(peer)]
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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--workloads", "decode,sleep"], "--workloads"),
        (["--sides", "theirs"], "--sides"),
        (["--rows", "0"], "--rows"),
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
