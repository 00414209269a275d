"""How many cores a process may use, and how many workers of a front end they feed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inferengine.process.system import usable_cores
from inferengine.process.workers import choose_num_workers

BOUND_TO = 16


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a machine on which this process is bound to 16 cores, in a control group below another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(BOUND_TO)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (tmp_path / "sys/fs/cgroup/pod/container").mkdir(parents=True)
    return tmp_path


def limit(root: Path, folder: str, text: str) -> None:
    (root / "sys/fs/cgroup" / folder / "cpu.max").write_text(text + "\n")


def test_without_a_limit_the_cores_are_those_of_the_affinity_mask(root: Path) -> None:
    limit(root, "pod/container", "max 100000")
    assert usable_cores(root) == BOUND_TO


@pytest.mark.parametrize("folder", ["pod", "pod/container"])
def test_a_limit_of_any_group_above_counts(root: Path, folder: str) -> None:
    limit(root, folder, "250000 100000")
    assert usable_cores(root) == 2.5


def test_a_limit_above_the_affinity_mask_changes_nothing(root: Path) -> None:
    limit(root, "pod", "3200000 100000")
    assert usable_cores(root) == BOUND_TO


def test_a_machine_without_control_groups_has_none(root: Path) -> None:
    (root / "proc/self/cgroup").unlink()
    assert usable_cores(root) == BOUND_TO


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_every_four_cores_feed_a_worker(cores: float, workers: int) -> None:
    assert choose_num_workers(0, cores) == workers


def test_a_configured_number_is_taken() -> None:
    assert choose_num_workers(7, 2) == 7
    assert choose_num_workers(1, 128) == 1
