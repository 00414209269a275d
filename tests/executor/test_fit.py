"""A model that does not fit is refused before anything of it is read, and one that fits is not."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.shapes import QWEN3_30B_A3B
from inferengine import LLM
from inferengine.config import Config
from inferengine.config.model_path import EMBEDDED
from inferengine.engine.process import build_executor, exit_code_of
from inferengine.errors import ConfigError, DoesNotFit, ExitCode
from inferengine.executor.memory.fit import misfit
from inferengine.executor.memory.plan import free_host_bytes, make_plan, weight_bytes
from inferengine.executor.settings import executor_settings

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {**LLAMA_70B, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def checkpoint(folder: Path, values: dict[str, object], claimed_bytes: int = 0) -> Path:
    """Return a folder with a config.json, the embedded model's tokenizer, and a file with a header and a hole behind
    it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder)
    rows = claimed_bytes // 2 // 8192
    header = json.dumps(
        {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [rows, 8192], "data_offsets": [0, rows * 16384]}}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + rows * 16384)
    return folder


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "llama-70b", LLAMA_70B, 140 * GIB)


def reason(folder: Path, free: int, device: str = "cpu", **sections: dict[str, object]) -> str:
    model = {"path": str(folder), **sections.pop("model", {})}
    config = Config().with_values(**{"speculation": {"method": "none"}, **sections}, model=model)
    settings = executor_settings(config, torch.device(device))
    return misfit(settings, make_plan(settings, free), free)


def test_weights_that_do_not_fit_are_refused_with_both_figures(huge: Path) -> None:
    assert "255.3 GiB while they are loaded, and 24.0 are free" in reason(huge, 24 * GIB)
    assert reason(huge, 300 * GIB) == ""


def test_a_card_is_asked_for_what_it_holds(huge: Path) -> None:
    assert "127.6 GiB while they are loaded, and 80.0 are free" in reason(huge, 80 * GIB, "cuda")
    assert reason(huge, 200 * GIB, "cuda") == ""


def test_what_is_made_low_precision_at_load_takes_what_its_codes_take(huge: Path) -> None:
    """Each layer is rounded before the next one is read: a 70B in FP8 loads on a card of 80 GiB."""
    assert reason(huge, 80 * GIB, "cuda", model={"quantization": "fp8", "max_model_len": 8192}) == ""
    assert "63.9 GiB while they are loaded" in reason(huge, 60 * GIB, "cuda", model={"quantization": "fp8"})


def test_experts_that_are_made_low_precision_at_load_are_there_in_full_before(tmp_path: Path) -> None:
    """29 billion numbers, 54 GiB, in 128 experts of each of 48 layers; the rest is in codes."""
    folder = checkpoint(tmp_path / "qwen", QWEN3_30B_A3B)
    assert "56.0 GiB while they are loaded" in reason(folder, 50 * GIB, "cuda", model={"quantization": "fp8"})


def test_a_cache_that_holds_no_sequence_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small", SMALL)
    weights = weight_bytes(*_described(SMALL), torch.float32)
    assert "(cache.memory_fraction) holds no sequence" in reason(
        folder, weights + 1024, cache={"memory_fraction": 1e-6}
    )
    assert "is asked for (cache.num_blocks)" in reason(folder, 2 * weights, cache={"num_blocks": 10**8})
    assert reason(folder, 2 * weights) == ""


def test_one_block_is_refused_by_its_key(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small", SMALL)
    with pytest.raises(ConfigError, match=r"cache\.num_blocks: one block holds no sequence: ask for at least 2"):
        reason(folder, GIB, cache={"num_blocks": 1})


def test_blocks_that_are_asked_for_are_held_against_what_is_left(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "small", SMALL)
    assert "a KV cache of" in reason(folder, GIB, cache={"num_blocks": 10_000_000})
    assert reason(folder, GIB, cache={"num_blocks": 64}) == ""


def test_the_engine_reads_nothing_of_a_model_that_does_not_fit(huge: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config().with_values(model={"path": str(huge)}, engine={"device": "cpu"})
    with caplog.at_level("INFO", logger="inferengine.engine.process"), pytest.raises(DoesNotFit) as refused:
        build_executor(config)
    assert exit_code_of(refused.value) == ExitCode.MEMORY
    assert "255.2" in caplog.text  # the plan
    assert "engine.check_memory" in str(refused.value)


def test_an_operator_may_load_it_all_the_same(huge: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = Config().with_values(model={"path": str(huge)}, engine={"device": "cpu", "check_memory": False})
    build_executor(config)
    assert "does not fit" in caplog.text


def test_the_library_refuses_it_as_well(huge: Path) -> None:
    with pytest.raises(DoesNotFit):
        LLM(str(huge), engine={"device": "cpu"})


@pytest.mark.parametrize("command", ["engine", "up"])
def test_the_process_ends_with_exit_code_4_and_the_plan(huge: Path, tmp_path: Path, command: str) -> None:
    """`up` starts it once: another try would end the same way."""
    ports = ["--http.port", "0", "--ws.port", "0"] if command == "up" else []
    ran = subprocess.run(
        [sys.executable, "-m", "inferengine.cli", command, str(huge), "--engine.device", "cpu", *ports],
        env={**os.environ, "INFERENGINE_WIRE_SOCKET": f"ipc://{tmp_path}/engine.sock"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == ExitCode.MEMORY, output
    assert output.count("memory plan:") == 1
    assert output.count("llama-70b does not fit: its weights take 255.3 GiB while they are loaded") == 1
    assert "Traceback" not in output


def _described(values: dict[str, object]):  # type: ignore[no-untyped-def]
    from inferengine.models import registry

    return registry.config_of(values, registry.family(values)), values


class TestFreeMemory:
    """What is free of a machine, and of the control groups that hold this process."""

    @staticmethod
    def machine(root: Path, *, available_kib: int, own: str = "/", **groups: dict[str, object]) -> int:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
        (root / "proc/self/cgroup").write_text(f"0::{own}\n")
        for name, files in groups.items():
            folder = root / "sys/fs/cgroup" / name.replace("__", "/").strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / f"memory.{file}").write_text(f"{text}\n")
        return free_host_bytes(root)

    def test_without_a_limit_it_is_what_the_kernel_says(self, tmp_path: Path) -> None:
        assert self.machine(tmp_path, available_kib=4096) == 4 << 20

    def test_page_cache_of_a_group_counts_as_free(self, tmp_path: Path) -> None:
        """A checkpoint that was just read fills a container's page cache."""
        stat = "anon 100\nactive_file 600\ninactive_file 200"
        group = {"max": 1000, "current": 950, "stat": stat}
        assert self.machine(tmp_path, available_kib=4096, __=group) == 1000 - 950 + 800

    def test_the_tightest_group_on_the_way_up_counts(self, tmp_path: Path) -> None:
        outer = {"max": 1000, "current": 400, "stat": "active_file 0"}
        inner = {"max": "max", "current": 400, "stat": "active_file 0"}
        free = self.machine(tmp_path, available_kib=4096, own="/system.slice/e.service", **{
            "system.slice": outer, "system.slice__e.service": inner,
        })  # fmt: skip
        assert free == 600
