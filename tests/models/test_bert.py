"""BERT and its like: vectors are transformers', in every pooling, and what a checkpoint may hold besides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from inferengine import LLM
from inferengine.config import Config
from inferengine.config.model_path import EMBEDDED
from inferengine.engine.model_info import pooling_of
from inferengine.engine.options import unused_features
from inferengine.errors import ConfigError, InvalidRequest
from inferengine.executor.load import dry_run
from inferengine.sampling_params import POOLINGS
from tests.executor.engine import Engine
from tests.executor.test_embeddings import prompts_of
from tests.models.checkpoints import make_model, save

SHAPES = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
}
# name -> (transformers' classes of config and model, what differs)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", {}),
    "bert, one token type": ("BertConfig", "BertModel", {"type_vocab_size": 1, "hidden_act": "gelu_new"}),
    "roberta": ("RobertaConfig", "RobertaModel", {"pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel", {"pad_token_id": 1, "type_vocab_size": 1}),
}


def change(folder: Path, values: dict[str, Any]) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def make(name: str, folder: Path) -> Any:
    """Save transformers' model with seeded random weights; its biases and norms are random too."""
    config_class, model_class, values = CASES[name]
    config = getattr(transformers, config_class)(**{**SHAPES, **values})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def reference(model: Any, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    vector = {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]
    return vector / vector.norm()


def ids(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Return prompts without the padding's token, behind which RoBERTa's positions would not move on."""
    return [[token if token > 1 else 7 for token in prompt] for prompt in prompts_of(lengths, seed)]


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_transformers(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path)
    engine = Engine(tmp_path, budget=96, chunked_prefill=False, prefix_caching=False)
    longest = engine.capacity.max_model_len
    assert longest == 64 - (2 if "roberta" in name else 0)
    wanted = {
        engine.embed(prompt, pooling): (prompt, pooling)
        for prompt in ids((3, 41, 17, 1, 30, longest))
        for pooling in POOLINGS
    }
    engine.run()
    for uid, (prompt, pooling) in wanted.items():
        vector = torch.tensor(engine.embeddings[uid])
        assert (vector - reference(model, prompt, pooling)).norm() < 1e-4, (len(prompt), pooling)


@pytest.mark.parametrize("budget", [64, 7])
def test_the_first_tokens_state_of_a_causal_model_is_kept_over_chunks(budget: int, tmp_path: Path) -> None:
    model = make_model("qwen3")
    engine = Engine(save(model, tmp_path), budget=budget)
    prompts = prompts_of((41, 3, 17))
    uids = [engine.embed(prompt, "cls") for prompt in prompts * 2]
    engine.run()
    for uid, prompt in zip(uids, prompts * 2, strict=True):
        with torch.inference_mode():
            state = model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, 0]
        assert (torch.tensor(engine.embeddings[uid]) - state / state.norm()).norm() < 1e-4
        assert engine.finished[uid].num_cached == 0, "the first token is part of any prefix"


def make_reranker(folder: Path, kind: str = "XLMRoberta", labels: int = 1) -> Any:
    """Save a cross-encoder with seeded random weights."""
    values = {} if kind == "Bert" else {"pad_token_id": 1, "type_vocab_size": 1}
    config = getattr(transformers, f"{kind}Config")(**{**SHAPES, **values})
    config.num_labels, config._attn_implementation = labels, "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


SEPARATOR = 3


def pair(first: int, second: int, seed: int) -> tuple[list[int], list[int]]:
    """Return the tokens and token types of a pair of texts of these lengths, as BERT's tokenizer joins them."""
    one, other = ([token if token > 3 else 7 for token in text] for text in prompts_of((first, second), seed))
    tokens = [2, *one, SEPARATOR, *other, SEPARATOR]
    return tokens, [0] * (first + 2) + [1] * (second + 1)


@pytest.mark.parametrize("kind", ["XLMRoberta", "Roberta", "Bert"])
def test_scores_of_a_cross_encoder_are_transformers(kind: str, tmp_path: Path) -> None:
    model = make_reranker(tmp_path, kind)
    engine = Engine(tmp_path, budget=96, chunked_prefill=False, prefix_caching=False)
    assert (engine.capacity.scores, engine.capacity.embedding_size) == (True, 1)
    assert unused_features(engine.capacity)[:2] == ("embeddings", "generation")
    pairs = [pair(*lengths, seed) for seed, lengths in enumerate([(3, 5), (1, 1), (20, 31), (8, 2), (30, 28)])]
    wanted = {engine.embed(tokens, "cls"): (tokens, types) for tokens, types in pairs}
    engine.run()
    assert engine.core.scheduler.stats.max_batch > 1
    for uid, (tokens, types) in wanted.items():
        more = {"token_type_ids": torch.tensor([types])} if kind == "Bert" else {}
        with torch.inference_mode():
            expected = float(model(torch.tensor([tokens]), **more).logits[0, 0])
        assert abs(engine.embeddings[uid][0] - expected) < 1e-4
    assert pooling_of(Config(), tmp_path) == "cls"


def test_what_a_cross_encoder_cannot_is_refused_with_what_it_can(tmp_path: Path) -> None:
    make_reranker(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    with LLM(str(tmp_path), engine={"device": "cpu"}, cache={"num_blocks": 64}) as llm:
        for ask in (llm.generate, llm.embed):
            with pytest.raises(InvalidRequest, match="/v1/rerank"):
                ask([5, 6, 7], progress=False)


def test_a_score_of_other_states_than_the_first_tokens_is_refused(tmp_path: Path) -> None:
    make_reranker(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Engine(tmp_path, model={"pooling": "mean"})
    assert caught.value.field == "model.pooling"


@pytest.mark.parametrize("kind", ["XLMRoberta", "Bert"])
def test_classifiers_of_several_labels_are_refused(kind: str, tmp_path: Path) -> None:
    make_reranker(tmp_path, kind, labels=3)
    with pytest.raises(ConfigError, match="one label"):
        dry_run(tmp_path)


@pytest.mark.parametrize(
    ("values", "is_served"),
    [
        ({"num_labels": 1}, True),
        ({"num_labels": 1, "id2label": {"0": "no", "1": "yes"}}, True),
        ({"num_labels": 2, "id2label": {"0": "score"}}, False),
        ({}, False),
    ],
)
def test_num_labels_counts_the_labels_before_their_names(
    values: dict[str, Any], is_served: bool, tmp_path: Path
) -> None:
    make_reranker(tmp_path)
    change(tmp_path, {"id2label": None, "label2id": None, **values})
    assert transformers.AutoConfig.from_pretrained(tmp_path).num_labels == (1 if is_served else 2)
    if is_served:
        assert dry_run(tmp_path) > 0
    else:
        with pytest.raises(ConfigError, match="one label"):
            dry_run(tmp_path)


def test_num_labels_of_a_model_without_a_head_is_passed_over(tmp_path: Path) -> None:
    make("bert", tmp_path)
    change(tmp_path, {"num_labels": 3})
    assert dry_run(tmp_path) > 0


def test_a_pooler_old_buffers_and_a_prefix_are_passed_over(tmp_path: Path) -> None:
    make("bert", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("pooler.") for name in tensors)
    counted = {name: value for name, value in tensors.items() if not name.startswith("pooler.")}
    stored = {f"bert.{name}": value for name, value in tensors.items()}
    stored["bert.embeddings.position_ids"] = torch.arange(64)[None]
    save_file(stored, tmp_path / "model.safetensors")
    assert dry_run(tmp_path) == sum(value.numel() for value in counted.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "silu"}, "hidden_act"),
        ({"num_attention_heads": 5}, "does not divide"),
        ({"model_type": "electra"}, "none of bert, roberta, xlm-roberta"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    make("bert", tmp_path)
    change(tmp_path, values)
    with pytest.raises(ConfigError, match=words):
        dry_run(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"pad_token_id": None}, "pad_token_id is null"),
        ({"pad_token_id": 63}, "max_position_embeddings = 64 leaves none"),
    ],
)
def test_robertas_positions_need_a_padding_to_begin_behind(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    make("roberta", tmp_path)
    change(tmp_path, values)
    with pytest.raises(ConfigError, match=words):
        dry_run(tmp_path)
