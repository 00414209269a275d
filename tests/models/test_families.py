"""Every dense family through the whole engine, in unusual configurations, against transformers in fp32."""

from __future__ import annotations

import pytest

from inferengine.errors import ConfigError
from inferengine.models.registry import config_of, family
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


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_more_experts_of_a_token_than_there_are_is_refused(name):
    case = CASES[name]
    values = model_of(case.config, case.values).config.to_dict() | {"num_experts_per_tok": 9}
    with pytest.raises(ConfigError, match=r"num_experts_per_tok = 9 is more than its \d experts"):
        config_of(values, family(values))
