"""On a card the output head has rows of zeros behind the vocabulary. Nobody sees them: tokens, ranks and
log-probabilities are those of the vocabulary alone.

The head is padded here by the reference operations, which leave it unpadded otherwise.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from inferengine.config import Config
from inferengine.core.speculation import DraftModelProposer, Proposer
from inferengine.errors import ConfigError
from inferengine.executor import tune
from inferengine.executor.settings import executor_settings
from inferengine.executor.torch_executor import build_executor
from inferengine.kernels import ops
from inferengine.kernels.cuda.dispatch import Operands, Product, ProductKey
from inferengine.layers.parallel import VOCABULARY_UNIT, vocabulary_rows
from inferengine.models import registry, weights
from inferengine.models.decoder import DecoderModel
from inferengine.models.parallel import pad_vocabulary
from tests.core.builders import ThirdsGrammar
from tests.executor.engine import Engine, Foreknowledge
from tests.lora.adapters import write_adapter
from tests.models.checkpoints import greedy_reference, logits_reference, make_model, model_of, save
from tests.models.families import CASES
from tests.models.test_gguf import CASES as GGUF
from tests.models.test_gguf import make as make_gguf
from tests.models.test_loading import edit_tensors


class Checkpoint(NamedTuple):
    """A model of transformers, where it is saved, and its vocabulary."""

    model: Any
    folder: Path
    vocab_size: int

    def prompts(self, lengths: tuple[int, ...] = (3, 37, 17), seed: int = 1) -> list[list[int]]:
        tokens = random.Random(seed)
        return [[tokens.randrange(self.vocab_size) for _ in range(length)] for length in lengths]


def saved(name: str, vocab_size: int, folder: Path) -> Checkpoint:
    if name in CASES:
        model = model_of(CASES[name].config, {**CASES[name].values, "vocab_size": vocab_size})
    else:
        model = make_model(name, vocab_size=vocab_size)
    return Checkpoint(model, save(model, folder), vocab_size)


@pytest.fixture(scope="module", autouse=True)
def padding() -> Iterator[None]:
    """Let every engine pad its vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "REFERENCE", dataclasses.replace(ops.REFERENCE, pads_vocabulary=True))
        yield


@pytest.fixture(
    scope="module",
    params=[
        ("llama", 131),
        ("llama-tied-biases", 4097),
        ("gpt2", 131),  # tied, and with learned positions, which are not padded
        ("gemma3-softcap", 131),
        ("granite", 131),  # logits are scaled
        ("cohere", 131),  # a norm with means before the head
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name, vocab_size = request.param
    return saved(name, vocab_size, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return saved("llama", 131, tmp_path_factory.mktemp("llama"))


def unpadded_engine(folder: Path, **options: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "REFERENCE", dataclasses.replace(ops.REFERENCE, pads_vocabulary=False))
        return Engine(folder, **options)


def test_tokens_and_log_probabilities_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    engine = Engine(checkpoint.folder, budget=16)
    prompts = checkpoint.prompts()
    uids = [engine.submit(prompt, 12, logprobs=5, prompt_logprobs=5) for prompt in prompts]
    engine.run()
    for uid, prompt in zip(uids, prompts, strict=True):
        output = engine.outputs[uid]
        assert output == greedy_reference(checkpoint.model, prompt, output)
        expected = logits_reference(checkpoint.model, prompt + output).log_softmax(-1)
        rows = [*engine.prompt_logprobs[uid], *engine.logprobs[uid]]
        for row, scores, token in zip(rows, expected[:-1], (prompt + output)[1:], strict=True):
            assert row.logprob == pytest.approx(float(scores[token]), abs=1e-3)
            assert row.rank == 1 + int((scores > scores[token]).sum())
            assert row.top_ids == scores.topk(5).indices.tolist()
            assert row.top_logprobs == pytest.approx(scores.topk(5).values.tolist(), abs=1e-3)


def test_logits_are_a_view_of_the_vocabulary_in_aligned_rows(checkpoint: Checkpoint) -> None:
    model = Engine(checkpoint.folder).executor.model
    embedding = checkpoint.model.get_input_embeddings().weight
    logits = model.logits(torch.randn(3, embedding.shape[1]))
    assert logits.shape == (3, checkpoint.vocab_size)
    assert logits.stride() == (vocabulary_rows(checkpoint.vocab_size), 1)
    assert logits.stride(0) % VOCABULARY_UNIT == 0


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases"])
@pytest.mark.parametrize("random_weights", [False, True])
def test_padding_rows_are_zero(
    name: str, random_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved(name, 131, tmp_path)
    monkeypatch.setattr(weights, "_allocated", _of_nan)
    model = padded_model(checkpoint.folder)
    load(model, checkpoint.folder, random_weights=random_weights)
    is_tied = model.head.tied is not None
    assert (model.head.weight is None) == is_tied
    assert model.embed.weight is not None
    assert len(model.embed.weight) == (192 if is_tied else 131), "an embedding that no head reads is not padded"
    padded = model.embed.weight if model.head.weight is None else model.head.weight
    assert padded.shape == (192, 48)
    assert not padded[131:].any()
    assert padded[:131].isfinite().all()


def test_random_weights_are_those_of_the_model_without_padding(llama: Checkpoint) -> None:
    padded, plain = padded_model(llama.folder), padded_model(llama.folder, pads=False)
    for model in (padded, plain):
        load(model, llama.folder, random_weights=True)
    others = dict(plain.named_parameters())
    for name, parameter in padded.named_parameters():
        assert torch.equal(parameter[: len(others[name])], others[name]), name


def padded_model(folder: Path, *, pads: bool = True) -> DecoderModel:
    config, family = registry.read_model_config(folder)
    with torch.device("meta"):
        model = family.build(ops.REFERENCE, config)
    if pads:
        pad_vocabulary(model)
    return model


def load(model: DecoderModel, folder: Path, *, random_weights: bool) -> None:
    cpu = torch.device("cpu")
    if random_weights:
        weights.fill_random(model, dtype=torch.float32, device=cpu)
        return
    config, family = registry.read_model_config(folder)
    weights.load_weights(model, family.weight_map(config), folder, dtype=torch.float32, device=cpu)


def _of_nan(parameter: torch.nn.Parameter, dtype: torch.dtype, device: torch.device) -> torch.nn.Parameter:
    """Allocate as weights.py does, memory that holds no zeros by chance."""
    return torch.nn.Parameter(torch.full(parameter.shape, float("nan"), dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("filters", [{}, {"top_k": 1000}, {"top_p": 0.9999}, {"min_p": 1e-6}])
@pytest.mark.parametrize("name", ["llama", "gemma3-softcap"])
def test_padding_is_never_drawn_though_all_tokens_are_equally_likely(
    name: str, filters: dict[str, float], tmp_path: Path
) -> None:
    """At this temperature a third of the draws from 192 rows would be of padding, where the vocabulary has 131."""
    checkpoint = saved(name, 131, tmp_path)
    engine = Engine(checkpoint.folder, max_num_seqs=4, num_blocks=96)
    flat = {"temperature": 1e6, "logprobs": 1, **filters}
    uids = [engine.submit(checkpoint.prompts()[0], 80, seed=seed, **flat) for seed in range(4)]
    engine.run()
    drawn = [token for uid in uids for token in engine.outputs[uid]]
    assert len(drawn) == 320
    assert max(drawn) < checkpoint.vocab_size
    assert len(set(drawn)) > min(100, checkpoint.vocab_size // 2)
    assert max(row.rank for uid in uids for row in engine.logprobs[uid]) <= checkpoint.vocab_size


def test_padding_does_not_win_where_every_token_has_a_negative_logit(tmp_path: Path) -> None:
    """The logits of padding would be 0."""
    checkpoint, prompt = saved("llama", 131, tmp_path), [5, 17, 99]
    norm, head = checkpoint.model.model.norm.weight.data, checkpoint.model.lm_head.weight.data
    norm.copy_(torch.eye(len(norm))[0])  # the final state is one number
    with torch.inference_mode():
        state = checkpoint.model.model(torch.tensor([prompt])).last_hidden_state[0, -1, 0]
    head[:, 0] = -state.sign() * torch.rand(131).add(1.0)
    save(checkpoint.model, tmp_path)
    logits = logits_reference(checkpoint.model, prompt)[-1]
    assert logits.max() < 0
    engine = Engine(tmp_path)
    greedy = engine.submit(prompt, 1, logprobs=3)
    params = [{"temperature": 1.0, "seed": seed, "top_p": top_p} for seed in range(8) for top_p in (1.0, 0.9)]
    drawn = [engine.submit(prompt, 1, **each) for each in params]
    engine.run()
    assert engine.outputs[greedy] == [int(logits.argmax())]
    assert engine.logprobs[greedy][0].top_ids == logits.topk(3).indices.tolist()
    expected = logits.log_softmax(-1).topk(3).values.tolist()
    assert engine.logprobs[greedy][0].top_logprobs == pytest.approx(expected, abs=1e-4)
    assert max(engine.outputs[uid][0] for uid in drawn) < 131


def test_a_bias_reaches_the_last_token_of_the_vocabulary(checkpoint: Checkpoint) -> None:
    engine, last = Engine(checkpoint.folder), checkpoint.vocab_size - 1
    uid = engine.submit(checkpoint.prompts()[0], 6, logit_bias=((last, 1e4),), logprobs=checkpoint.vocab_size)
    engine.run()
    assert engine.outputs[uid] == [last] * 6
    assert all(sorted(row.top_ids) == list(range(checkpoint.vocab_size)) for row in engine.logprobs[uid])


REQUESTS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 7},
    "penalties": {"temperature": 1.0, "seed": -5, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "repetition": {"repetition_penalty": 1.3, "bad_words_ids": ((5,), (7, 8))},
    "allowed": {"temperature": 1.5, "allowed_token_ids": (3, 64, 130), "min_tokens": 4, "logprobs": 2},
    "prompt": {"prompt_logprobs": 4},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{}, {"model": {"quantization": "int8"}}], ids=["plain", "int8"])
def test_whatever_a_request_asks_for_it_gets_what_it_gets_without_padding(
    overlap: bool, options: dict[str, Any], llama: Checkpoint
) -> None:
    engines = [make(llama.folder, overlap=overlap, max_num_seqs=8, **options) for make in (Engine, unpadded_engine)]
    for engine in engines:
        for length, values in enumerate(REQUESTS.values(), 5):
            engine.submit(llama.prompts((length,))[0], 16, **values)
        engine.submit(llama.prompts((4,))[0], 24, grammar=ThirdsGrammar(), logprobs=3)
        engine.embed(llama.prompts((40,))[0], "mean")
        engine.run()
    padded, plain = engines
    assert [engine.executor.model.logits(torch.zeros(2, 48)).stride(0) for engine in engines] == [192, 131]
    assert padded.outputs == plain.outputs
    for found, expected in ((padded.logprobs, plain.logprobs), (padded.prompt_logprobs, plain.prompt_logprobs)):
        for uid, rows in expected.items():
            assert [row.top_ids for row in found[uid]] == [row.top_ids for row in rows]
            assert [row.logprob for row in found[uid]] == pytest.approx([row.logprob for row in rows], abs=1e-4)
    for uid, vector in plain.embeddings.items():
        assert padded.embeddings[uid] == pytest.approx(vector, abs=1e-5)


@pytest.mark.parametrize("proposer", [Foreknowledge(), DraftModelProposer()], ids=["known", "model"])
def test_draft_tokens_change_no_output(proposer: Proposer, llama: Checkpoint) -> None:
    """The draft model is the model itself."""
    settings = {"method": "draft", "draft_model": str(llama.folder)} if proposer.on_device else {}
    expected = unpadded_engine(llama.folder).generate(llama.prompts(), 16)
    if isinstance(proposer, Foreknowledge):
        proposer.texts += [[*prompt, *output] for prompt, output in zip(llama.prompts(), expected, strict=True)]
    engine = Engine(
        llama.folder,
        build=lambda config: build_executor(config.with_values(speculation=settings)),
        proposer=proposer,
        max_drafts=3,
    )
    if proposer.on_device:
        assert engine.executor.draft._model.logits(torch.zeros(1, 48)).stride(0) == 192
    assert engine.generate(llama.prompts(), 16) == expected
    found = engine.core.scheduler.snapshot()
    assert 10 < found.num_drafts_accepted <= found.num_drafted


@pytest.mark.parametrize("name", ["llama", "llama-tied-biases", "gemma3-softcap", "cohere"])
def test_an_adapter_brings_the_rows_of_the_vocabulary(name: str, tmp_path: Path) -> None:
    """Its own embedding and head are not padded; a step has rows of it, and rows of the model's own head."""
    checkpoint = saved(name, 131, tmp_path / "model")
    whole = ("embed_tokens", "lm_head")
    merged = write_adapter(tmp_path / "adapters" / "pirate", checkpoint.model, targets=(), whole=whole)
    engine = Engine(checkpoint.folder, budget=9, model={"adapters": str(tmp_path / "adapters")})
    prompts, numbers = checkpoint.prompts(), (1, 0, 1)
    uids = [engine.submit(prompt, 12, adapter=of) for prompt, of in zip(prompts, numbers, strict=True)]
    engine.run()
    for prompt, uid, number in zip(prompts, uids, numbers, strict=True):
        expected = merged if number else checkpoint.model
        assert engine.outputs[uid] == greedy_reference(expected, prompt, engine.outputs[uid])


def test_a_tied_head_may_be_stored_without_padding(tmp_path: Path) -> None:
    checkpoint = saved("llama-tied-biases", 131, tmp_path)
    embedding = load_file(checkpoint.folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(checkpoint.folder, lm_head__weight=embedding.clone())
    Engine(checkpoint.folder)
    edit_tensors(checkpoint.folder, lm_head__weight=embedding + 1)
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs"):
        Engine(checkpoint.folder)


@pytest.mark.parametrize("rows", [130, 192])
def test_a_stored_head_has_as_many_rows_as_the_vocabulary(rows: int, tmp_path: Path) -> None:
    checkpoint = saved("llama", 131, tmp_path)
    edit_tensors(checkpoint.folder, lm_head__weight=torch.zeros(rows, 48))
    with pytest.raises(ConfigError, match=rf"shape \[{rows}, 48\] where config.json asks for \[131, 48\]"):
        Engine(checkpoint.folder)


@pytest.mark.parametrize("case", ["llama", "llama, tied, F16", "qwen2"])
def test_a_gguf_file_gives_the_tokens_that_it_gives_without_padding(case: str, tmp_path: Path) -> None:
    """Its head is packed as the file stores it, without padding."""
    path = tmp_path / "model.gguf"
    make_gguf(GGUF[case], path)
    prompts = [[5, 17, 99], [7] * 20]
    assert Engine(path).generate(prompts, 12) == unpadded_engine(path).generate(prompts, 12)


def test_measurements_are_looked_up_by_the_rows_of_the_head(llama: Checkpoint) -> None:
    """They are padded, or of a checkpoint whose head is stored in codes those of the vocabulary."""
    dense, codes = Operands.DENSE, Operands.BLOCK_CODES
    found, other = [(dense, 192), (codes, 131)], [(dense, 256), (codes, 256)]
    keys = [ProductKey(operands, Product.LINEAR, width, 48) for operands, width in found + other]
    config = Config().with_values(model={"path": str(llama.folder)})
    table: Any = SimpleNamespace(entries=dict.fromkeys(keys), choices={})
    assert tune.keys_in(table, executor_settings(config)) == {*keys[: len(found)]}
