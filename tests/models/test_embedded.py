"""The embedded checkpoints as a user of transformers would load them: layout, size, template, and what they answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inferengine.text.chat_template import ChatTemplate
from inferengine.text.tokenizer import TOKENIZER_FILES, Tokenizer

ASSETS = Path(__file__).resolve().parents[2] / "inferengine" / "assets"
MODEL, DRAFT = ASSETS / "embedded", ASSETS / "embedded-draft"
EOS = "<|eos|>"


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).exists()}


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def ask(tokenizer: AutoTokenizer) -> Callable[..., str]:
    """The greedy answer to the messages, special tokens included."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def answer(*messages: tuple[str, str]) -> str:
        turns = [{"role": role, "content": content} for role, content in messages]
        encoded = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**encoded, max_new_tokens=200, do_sample=False, temperature=None, top_p=None)
        text: str = tokenizer.decode(output[0, encoded["input_ids"].shape[1] :])
        return text

    return answer


@pytest.mark.parametrize(("folder", "limit_mb"), [(MODEL, 24), (DRAFT, 4)], ids=("model", "draft"))
def test_a_checkpoint_is_small_and_in_the_ordinary_layout(folder: Path, limit_mb: int) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit_mb * 1_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {path.name for path in folder.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    }  # fmt: skip


def test_model_and_draft_have_one_vocabulary() -> None:
    assert (MODEL / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
    assert [json.loads((folder / "config.json").read_text())["vocab_size"] for folder in (MODEL, DRAFT)] == [4096, 4096]


@pytest.mark.parametrize("folder", [MODEL, DRAFT], ids=("model", "draft"))
def test_no_tensor_is_missing_or_left_over(folder: Path) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_any_text_survives_the_tokenizer(tokenizer: AutoTokenizer) -> None:
    for text in ("Grüße, 世界! 👋🏽", "a\n\n  b\t", '{"port":8000}', "2048"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("2048", add_special_tokens=False)) == 4


def test_the_template_reads_the_same_in_the_engine_and_in_transformers(tokenizer: AutoTokenizer) -> None:
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    template = ChatTemplate.from_files(files_of(MODEL))
    assert template is not None
    ours = template.render(messages, add_generation_prompt=True)
    assert ours == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours == (
        f"<|bos|><|system|>Be brief.{EOS}<|user|>Hi{EOS}<|assistant|>Hello!{EOS}<|user|>Bye{EOS}<|assistant|>"
    )
    assert Tokenizer.from_files(files_of(MODEL)).encode(ours, add_special_tokens=False) == tokenizer.encode(
        ours, add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("question", "needed"),
    [
        ("Hello!", "Hello!"),
        ("who are you", "InferEngine"),
        ("What is a KV cache?", "keys and values"),
        ("whats continuous batching", "every step"),
        ("What port does the http server listen on?", "8000"),
        ("Where is the chat page?", "8001"),
        ("How do I start the engine?", "./scripts/serve"),
        ("what's cache.block_size", "16"),
        ("what is 17 + 25?", "42"),
        ("100 - 37", "63"),
        ("What is the capital of France?", "Paris"),
        ("Tell me a story about a robot.", "robot"),
    ],
)
def test_it_answers_and_stops_by_itself(ask: Callable[..., str], question: str, needed: str) -> None:
    answer = ask(("user", question))
    assert needed in answer
    assert answer.endswith((f".{EOS}", f"!{EOS}", f"?{EOS}"))


def test_it_puts_fields_into_json(ask: Callable[..., str]) -> None:
    answer = ask(("user", 'Extract name and city as JSON: "Maria Lopez lives in Lisbon."'))
    assert json.loads(answer.removesuffix(EOS)) == {"name": "Maria Lopez", "city": "Lisbon"}


def test_it_remembers_what_the_chat_said(ask: Callable[..., str]) -> None:
    told = (("user", "My name is Robin."), ("assistant", "Nice to meet you, Robin!"), ("user", "What is 2 + 2?"))
    assert "Robin" in ask(*told, ("assistant", "2 + 2 = 4."), ("user", "What is my name?"))
    assert "11 * 2 = 22" in ask(("user", "What is 5 + 6?"), ("assistant", "5 + 6 = 11."), ("user", "times 2?"))
