"""The model that ships with the engine, loaded like any other."""

from __future__ import annotations

import random

from inferengine.config.model_path import EMBEDDED
from tests.executor.engine import Engine
from tests.models.checkpoints import greedy_reference, load


def test_the_embedded_model_generates_what_transformers_does():
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 4096) for _ in range(length)] for length in (2, 37, 90, 11)]
    outputs = Engine(EMBEDDED, budget=32, max_num_seqs=3, block_size=16).generate(prompts, 64)
    model = load(EMBEDDED)
    assert [greedy_reference(model, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)] == outputs
