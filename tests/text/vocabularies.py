"""Vocabularies of the three kinds that checkpoints have, each trained here in milliseconds."""

from __future__ import annotations

import json

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from inferengine.text import Tokenizer

SENTENCES = ["the quick brown fox jumps over the lazy dog", "ein schöner Tag", "你好世界", "emoji 🎉 and more"] * 4
CONFIG = json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}}).encode()


def byte_level() -> FastTokenizer:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    fast.add_tokens([AddedToken("über", special=False), AddedToken("再见", special=False)])
    return fast


def sentencepiece() -> FastTokenizer:
    """Return a tokenizer like those of Llama 2 and Mistral: spaces as U+2581, bytes that the vocabulary lacks as
    <0xNN>."""
    letters = sorted({letter for text in SENTENCES[:2] for letter in text.replace(" ", "▁")} | {"▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    fast = FastTokenizer(
        models.BPE({token: rank for rank, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<s>", "</s>"])
    return fast


def word_piece() -> FastTokenizer:
    fast = FastTokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast.train_from_iterator(SENTENCES, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"]))
    return fast


def load(fast: FastTokenizer) -> Tokenizer:
    return Tokenizer.from_files({"tokenizer.json": fast.to_str().encode(), "tokenizer_config.json": CONFIG})
