"""The default of scheduler.itl_target_ms, in virtual time: what it bounds, and whom it does not touch."""

from __future__ import annotations

import pytest

from benchmarks.itl_target import Load, run
from inferengine.config import Config
from inferengine.engine.options import scheduler_options
from inferengine.simulation.cost_model import load_profile
from tests.core.builders import make_capacity

PROFILE = load_profile("h200-llama-3.1-8b")
BURST = Load([(512, 40)] * 96, 96)


def test_by_default_a_burst_of_prompts_keeps_the_gaps_of_streams_short() -> None:
    bounded, unbounded = run(BURST, PROFILE, -1.0), run(BURST, PROFILE, 0.0)
    assert unbounded["between_tokens_ms_p99"] > 150
    assert bounded["between_tokens_ms_p99"] < 90
    assert bounded["output_tokens_per_s"] > 0.95 * unbounded["output_tokens_per_s"]


def test_a_target_of_0_is_none() -> None:
    assert scheduler_options(Config().with_values(scheduler={"itl_target_ms": 0}), make_capacity()).itl_target_s == 0


def test_a_target_that_was_set_holds_whatever_a_step_without_prompts_takes() -> None:
    options = scheduler_options(Config().with_values(scheduler={"itl_target_ms": 25}), make_capacity())
    assert (options.itl_target_s, options.itl_target_factor) == (pytest.approx(0.025), 0.0)


def test_where_nobody_reads_tokens_as_they_come_there_is_no_default_target() -> None:
    assert scheduler_options(Config(), make_capacity()).itl_target_s > 0
    assert scheduler_options(Config(), make_capacity(), is_service=False).itl_target_s == 0
