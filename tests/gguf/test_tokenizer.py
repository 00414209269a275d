"""The tokenizer of a GGUF file gives the ids of the one that it was made of, and its chat template is rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from inferengine.errors import ConfigError
from inferengine.gguf.reader import read_gguf
from inferengine.gguf.tokenizer import DEEPSEEK3, RULES, tokenizer_files
from inferengine.text import ChatTemplate, Tokenizer

TEXTS = (
    "Hello, world! It's 1234567 o'clock.",
    "  two spaces,\n\n\ttabs and\r\nlines  ",
    "Ünïcode: 你好，世界 — ½ €20 🙂🙃",
    "def f(x):\n    return x**2  # I'LL",
    "HTTPServer camelCase <|end|>done",
    "",
)
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog " * 3, "hello world hello there, there their 12 123"]


def byte_level(rule: str | tuple[str, ...]) -> FastTokenizer:
    """Return a small byte-level BPE whose texts are cut by a regular expression."""
    tokenizer = FastTokenizer(models.BPE())
    rules = (rule,) if isinstance(rule, str) else rule
    split = [pre_tokenizers.Split(Regex(each), "isolated") for each in rules if each]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentence_piece(*, begins: bool) -> FastTokenizer:
    """Return a small BPE with bytes for what it lacks, as SentencePiece's of Llama 2 and Gemma."""
    steps: list[Any] = [normalizers.Prepend("▁")] if begins else []
    tokenizer = FastTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if begins else [])])
    first = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=first, limit_alphabet=40, show_progress=False)
    tokenizer.train_from_iterator(["hello there, the quick brown fox", "hello world hello there"] * 3, trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = [each for each in document["added_tokens"] if not each["content"].startswith("<0x")]
    return FastTokenizer.from_str(json.dumps(document))


def save(tokenizer: FastTokenizer, path: Path, **values: Any) -> Path:
    """Return a file without tensors that has the tokenizer. `values` are further metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer, **values)
    finish(writer)
    return path


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: FastTokenizer, **values: Any) -> None:
    """Write a tokenizer's metadata, with a chat template."""
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_token_list(tokens)
    types = [3 if token in SPECIAL else 2 if token == "<unk>" else 6 if token[:3] == "<0x" else 1 for token in tokens]
    writer.add_token_types(types)
    if values.get("model", "gpt2") in ("gpt2", "gemma4"):
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        writer.add_token_scores([0.0 if kind != 1 else -float(index) for index, kind in enumerate(types)])
    writer.add_tokenizer_model(values.pop("model", "gpt2"))
    writer.add_bos_token_id(values.pop("bos_token_id", vocab["<|begin|>"]))
    writer.add_eos_token_id(vocab["<|end|>"])
    writer.add_eot_token_id(vocab["<|turn|>"])
    writer.add_chat_template(TEMPLATE)
    for key, value in values.items():
        getattr(writer, f"add_{key}")(value)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "seed-coder"])
def test_byte_level_ids_are_the_originals(name: str, tmp_path: Path) -> None:
    original = byte_level(RULES[name])
    path = save(original, tmp_path / "t.gguf", tokenizer_pre=name, add_bos_token=False)
    ours = Tokenizer.from_files(tokenizer_files(path))
    if name in ("llama-bpe", "tekken"):  # which take a whole word before they merge: with these merges the same
        original.model.ignore_merges = True
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)


def test_deepseek_v3_splits_numbers_then_chinese_and_japanese_then_words() -> None:
    text = "It's x1234567 (foo.bar) 你好，世界かなカナ né\n\n  end"
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated") for rule in DEEPSEEK3])
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == [
        "It", "'s", " x", "123", "456", "7", " (", "foo", ".bar", ")", " ", "你好", "，", "世界かなカナ", " né", "\n\n",
        " ", " end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "begins"), [("llama", True), ("llama", False), ("gemma4", False)], ids=["Llama 2", "Gemma", "Gemma 4"]
)
def test_sentence_piece_ids_are_the_originals(model: str, begins: bool, tmp_path: Path) -> None:
    original = sentence_piece(begins=begins)
    path = save(original, tmp_path / "t.gguf", model=model, add_space_prefix=begins, add_bos_token=False)
    ours = Tokenizer.from_files(tokenizer_files(path))
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)


def test_a_text_begins_and_ends_as_the_file_says(tmp_path: Path) -> None:
    original = byte_level("")
    path = save(original, tmp_path / "t.gguf", tokenizer_pre="gpt-2", add_bos_token=True, add_eos_token=True)
    ours = Tokenizer.from_files(tokenizer_files(path))
    assert ours.encode("hello") == [0, *original.encode("hello").ids, 1]
    assert ours.encode("hello", add_special_tokens=False) == original.encode("hello").ids
    assert ours.decode([0, *original.encode("hello").ids, 1]) == "hello"


def test_the_chat_template_and_the_ends_of_an_answer_are_the_files(tmp_path: Path) -> None:
    files = tokenizer_files(save(byte_level(""), tmp_path / "t.gguf", tokenizer_pre="gpt-2"))
    template = ChatTemplate.from_files(files)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<|begin|>user: hi"
    assert files["generation_config.json"] == b'{"eos_token_id": [1, 2]}'


def test_a_tokenizer_json_in_the_file_is_taken(tmp_path: Path) -> None:
    original = byte_level(r"\p{L}+|\p{N}|\s+|[^\p{L}\p{N}\s]+")  # which has no name
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.huggingface.json", original.to_str())
    finish(writer)
    ours = Tokenizer.from_files(tokenizer_files(path))
    assert [ours.encode(text) for text in TEXTS] == [original.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer_pre": "of-another-world"}, "tokenizer.ggml.pre = of-another-world is no rule that is known here"),
        ({"model": "t5"}, "tokenizer.ggml.model = t5 is not read; gpt2, llama and gemma4 are"),
        ({"bos_token_id": 999_999}, "tokenizer.ggml.bos_token_id = 999999 is no token of its 4"),
    ],
)
def test_what_is_not_read_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(byte_level(""), tmp_path / "t.gguf", **values)
    with pytest.raises(ConfigError) as error:
        tokenizer_files(path)
    assert message in error.value.message
    assert "t.gguf" in error.value.message
    assert read_gguf(path).tensors == {}
