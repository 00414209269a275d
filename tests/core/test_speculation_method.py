"""The speculation method that `auto` resolves to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from inferengine.config import Config, load
from inferengine.config.model_path import EMBEDDED, EMBEDDED_DRAFT, draft_folder
from inferengine.core.executor import Capacity, KVGroup
from inferengine.core.speculation import build_proposer, speculation_method
from inferengine.engine.options import scheduler_options
from inferengine.errors import ConfigError


def make_config(**sections: dict[str, object]) -> Config:
    return load(environment={}).with_values(**sections)


def make_capacity(*, has_draft_model: bool) -> Capacity:
    return Capacity(16, [KVGroup(None, 64)], 8, 64, 256, 100, has_draft_model=has_draft_model)


@pytest.mark.parametrize("path", ["", str(EMBEDDED)])
def test_the_embedded_model_uses_its_draft_model_on_a_cpu_and_none_on_a_gpu(path: str) -> None:
    config = make_config(model={"path": path})
    assert draft_folder(config, on_cpu=True) == EMBEDDED_DRAFT
    assert draft_folder(config, on_cpu=False) is None


def test_a_model_without_a_draft_model_runs_without_speculation(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED_DRAFT, tmp_path / "model")
    assert draft_folder(make_config(model={"path": str(tmp_path / "model")}), on_cpu=True) is None


def test_random_weights_run_without_speculation() -> None:
    assert draft_folder(make_config(model={"load_format": "dummy"}), on_cpu=True) is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_draft_that_is_named_is_used(tmp_path: Path, on_cpu: bool) -> None:
    shutil.copytree(EMBEDDED_DRAFT, tmp_path / "model")
    config = make_config(model={"path": str(tmp_path / "model")}, speculation={"draft_model": str(EMBEDDED_DRAFT)})
    assert draft_folder(config, on_cpu=on_cpu) == EMBEDDED_DRAFT
    with pytest.raises(ConfigError, match="no folder"):
        draft_folder(make_config(speculation={"draft_model": str(tmp_path / "nothing")}), on_cpu=on_cpu)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_other_methods_load_no_draft(method: str) -> None:
    config = make_config(speculation={"method": method})
    assert draft_folder(config, on_cpu=True) is None
    assert speculation_method(config.speculation.method, make_capacity(has_draft_model=False)) == method


@pytest.mark.parametrize("has_draft_model", [True, False])
def test_auto_is_draft_where_the_executor_has_a_draft_model(has_draft_model: bool) -> None:
    config, capacity = make_config(), make_capacity(has_draft_model=has_draft_model)
    assert speculation_method(config.speculation.method, capacity) == ("draft" if has_draft_model else "none")
    assert (build_proposer(config.speculation.method, capacity) is not None) == has_draft_model
    assert scheduler_options(config, capacity).max_drafts == (config.speculation.max_drafts if has_draft_model else 0)


@pytest.mark.parametrize(("speculation", "expected"), [({}, 2), ({"method": "draft"}, 16), ({"max_running": 7}, 7)])
def test_speculation_by_default_is_for_few_running_sequences(speculation: dict[str, object], expected: int) -> None:
    options = scheduler_options(make_config(speculation=speculation), make_capacity(has_draft_model=True))
    assert options.max_running_to_draft == expected
