"""Every dense family through the whole engine, in unusual configurations, against transformers in fp32."""

from __future__ import annotations

import pytest

from tests.models.checkpoints import model_of, save
from tests.models.families import CASES, compare


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_transformers(name, tmp_path):
    case = CASES[name]
    model = model_of(case.config, case.values)
    engine = compare(save(model, tmp_path), model, case)
    if engine.capacity.groups[0].window is None:  # a model of windows alone holds a few blocks at any length
        assert engine.core.scheduler.stats.num_preemptions > 0
        assert engine.core.scheduler.stats.num_cached_tokens > 0
