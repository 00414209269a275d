"""`check --compare`: agreement where there is agreement, and the layer's name where there is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inferengine.cli import check
from inferengine.config import Config
from inferengine.errors import ExitCode
from inferengine.executor.tools import compare_hf
from inferengine.executor.tools.compare_hf import Probe
from inferengine.layers.attention import Attention
from tests.executor.engine import Engine
from tests.models.checkpoints import logits_reference, make_model, save

ENGINE = {"device": "cpu", "max_num_batched_tokens": 24}


def config_of(folder: Path, **model: str) -> Config:
    return Config().with_values(model={"path": str(folder), **model}, engine=ENGINE, cache={"num_blocks": 64})


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_every_family_agrees_layer_by_layer(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    found = compare_hf.compare(config_of(save(model, tmp_path)))
    layers = model.config.num_hidden_layers
    assert [row.place for row in found.rows] == ["embedding", *(f"layer {index}" for index in range(layers)), "logits"]
    assert found.parted is None
    assert found.same_tokens == 1.0


def test_the_layer_where_they_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model("llama"), tmp_path)
    finish = Attention.finish

    seen: list[Attention] = []

    def finish_wrongly(self: Attention) -> None:
        finish(self)
        seen.append(self)
        if len(seen) == 2:
            self.scale *= 1.1

    monkeypatch.setattr(Attention, "finish", finish_wrongly)
    found = compare_hf.compare(config_of(folder))
    assert found.parted == "layer 1"
    assert "the two part at layer 1" in compare_hf.table(found)[-1]


def test_quantization_shows_as_growing_error(tmp_path: Path) -> None:
    found = compare_hf.compare(config_of(save(make_model("llama"), tmp_path), quantization="int4"))
    assert found.parted == "layer 0"
    assert 1e-3 < found.rows[1].relative < 0.5


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(make_model("qwen3"), tmp_path)
    arguments = [str(folder), "--compare", "--engine.device", "cpu", "--cache.num_blocks", "64"]
    assert check.run(arguments) == ExitCode.OK
    assert "the two agree" in capsys.readouterr().out
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "rms_norm_eps": 0.3}))
    assert check.run([*arguments, "--model.dtype", "none"]) == ExitCode.USAGE


def test_a_probe_sees_every_position_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = make_model("gemma3")
    engine = Engine(save(model, tmp_path))
    probe, prompt = Probe(engine.executor), [(5 * index) % 301 for index in range(60)]
    logits, expected = probe.logits(prompt), logits_reference(model, prompt)
    probe.close()
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    output = engine.generate([prompt[:9]], 12)[0]
    assert output == Engine(tmp_path).generate([prompt[:9]], 12)[0]
