"""Steps whose rows share prefixes, padded as captured graphs hold them: the real rows are as in the plain step.

Graphs themselves need a card; what a graph replays is computed here by Triton's interpreter.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from inferengine.core.executor import StepPlan
from inferengine.executor.cuda_graphs import DecodeGraphs
from inferengine.executor.memory import prefix_groups
from inferengine.executor.memory.prefix_groups import PrefixGroups
from inferengine.executor.sampler import StepDraws
from inferengine.executor.slots import columns_of
from tests.executor.engine import Engine
from tests.kernels.llama_engine import VOCAB, make_llama_engine, save_llama, unpadded_states


@pytest.fixture(autouse=True)
def any_prefix_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_TOKENS", 16)
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # padded rows read what is there
def test_a_padded_step_gives_the_logits_of_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    engine = make_llama_engine(tmp_path, monkeypatch, device, heads, budget=64, max_num_seqs=8, num_blocks=64)
    executor, slots = engine.executor, engine.executor.slots
    groups = PrefixGroups(slots.num_slots, slots.max_blocks, slots.block_size, group=0, token_bytes=1)
    parts = executor.model, executor.ops, slots, executor.kv.group_caches
    decode = DecodeGraphs(*parts, max_rows=8, prefix_groups=groups)
    plain = executor._compute
    seen = set()

    def compare(plan: StepPlan) -> StepDraws:
        decode.begin(plan)
        columns = columns_of(plan)
        shared = decode.shared_prefixes(columns) if plan.num_decodes == len(plan.slots) else None
        if shared is None:
            return plain(plan)
        count = len(columns.row_slot)
        decode.upload(columns, 8, shared)
        logits = decode.compute(8, None, has_shared=True)[0][:count].clone()
        expected = executor.model.logits(unpadded_states(executor, plan, columns)[1])
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        seen.update((count, *group) for group in shared.groups.T[:, 1:].tolist() if group[0])
        return plain(plan)

    executor._compute = compare
    tokens = random.Random(1)
    trunk = [tokens.randrange(VOCAB) for _ in range(32)]
    engine.submit([*trunk, 1], 1)
    engine.run()  # fills the prefix cache
    for number in range(5):
        own = [tokens.randrange(VOCAB) for _ in range(3)]
        engine.submit(own if number == 4 else [*trunk[: 16 if number == 3 else 32], *own], 2 + number // 2)
    engine.run()
    assert seen == {(5, 3, 32), (3, 2, 16)}


@pytest.mark.gpu
def test_captured_steps_of_shared_prefixes_give_the_tokens_of_rows_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_llama(
        tmp_path,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    tokens = random.Random(3)
    trunks = [[tokens.randrange(VOCAB) for _ in range(length)] for length in (700, 300)]
    prompts = [
        [*trunk, *(tokens.randrange(VOCAB) for _ in range(1 + 3 * number))] for trunk in trunks for number in range(12)
    ]
    outputs = []
    for least in (1, 1 << 60):
        monkeypatch.setattr(prefix_groups, "LEAST_SAVED", least)
        sizes = {"budget": 2048, "max_num_seqs": 32, "num_blocks": 256, "block_size": 64}
        engine = Engine(tmp_path, device="cuda", overlap=True, model={"dtype": "float32"}, **sizes)
        engine.executor.warm_up(lambda phase, share: None)
        for trunk in trunks:
            engine.submit(trunk, 1)
        engine.run()
        for prompt in prompts:
            engine.submit(prompt, 40)
        launched = set()
        while engine.core.has_work:
            engine.step()
            launched.add(engine.executor.launched)
        assert any("shared prefixes" in how for how in launched) == (least == 1)
        assert engine.executor.compilations.count == 0
        outputs.append([engine.outputs[uid] for uid in sorted(engine.outputs)])
        engine.executor.close()
    assert outputs[0] == outputs[1]
