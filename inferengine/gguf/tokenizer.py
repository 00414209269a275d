"""Converts the tokenizer of a GGUF file to a checkpoint's files: tokenizer.json, tokenizer_config.json with the chat
template, and generation_config.json.

`tokenizer.ggml.model` is gpt2 (byte-level BPE with merges; `tokenizer.ggml.pre` names the rule that splits a text
first), llama (SentencePiece's BPE, whose merges follow from scores) or gemma4 (the same with a list of merges). If the
file contains a tokenizer.json, under the
key `tokenizer.huggingface.json`, that is used unchanged.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from inferengine.gguf.checkpoint import eos_token_ids
from inferengine.gguf.reader import GgufFile, read_gguf, refused

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT2 = ""  # the rule that is built into ByteLevel
DIGITS = "digits"  # splits off each digit, then as GPT2
THREE = f"{_WORDS}\\p{{N}}{{1,3}}{_REST}"
ONE = f"{_WORDS}\\p{{N}}{_REST}"
DEEPSEEK3 = (  # one after the other
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
RULES: dict[str, str | tuple[str, ...]] = {  # by tokenizer.ggml.pre
    "default": GPT2, "gpt-2": GPT2, "phi-2": GPT2, "olmo": GPT2, "jais": GPT2, "trillion": GPT2, "mpt": GPT2,
    "llama-bpe": THREE, "llama3": THREE, "llama-v3": THREE, "falcon3": THREE, "dbrx": THREE, "smaug-bpe": THREE,
    "glm4": THREE, "chatglm-bpe": THREE, "lfm2": THREE, "pixtral": THREE,
    "qwen2": ONE, "deepseek-r1-qwen": ONE, "stablelm2": ONE, "kormo": ONE,
    "starcoder": DIGITS, "refact": DIGITS, "command-r": DIGITS, "smollm": DIGITS, "codeshell": DIGITS,
    "tekken": _CASED % ("", "") + r"\p{N}" + _SLASH,
    "gpt-4o": _CASED % (_ENDING, _ENDING) + r"\p{N}{1,3}" + _SLASH,
    "llama4": _CASED % (_ENDING, _ENDING) + r"\p{N}{1,3}" + _SLASH,
    "deepseek-v3": DEEPSEEK3,
    "seed-coder": _WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # fmt: skip
# A whole word that is a token is taken before merges are applied; these tokenizers also add bos.
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
COMPOSED = ("qwen2", "deepseek-r1-qwen", "command-r")  # normalized to NFC


@lru_cache(maxsize=2)
def tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the files of the tokenizer by name. Raises ConfigError naming what is missing or not supported."""
    file = read_gguf(path)
    document = _given(file) or _made(file)
    files = {"tokenizer.json": document, "tokenizer_config.json": _dump(_config(file))}
    if ids := eos_token_ids(file):
        files["generation_config.json"] = _dump({"eos_token_id": ids})
    return files


def _dump(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode(errors="replace")


def _given(file: GgufFile) -> bytes:
    """Return the tokenizer.json that the file contains; empty if it contains none."""
    text = file.value("tokenizer.huggingface.json", str, "")
    try:
        if text and not isinstance(json.loads(text), dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise refused(file.path, "tokenizer.huggingface.json holds no JSON object") from None
    return str(text).encode()


def _made(file: GgufFile) -> bytes:
    kind = file.value("tokenizer.ggml.model", str)
    if kind is None:
        raise refused(file.path, "its metadata has no tokenizer", "take a conversion that has its vocabulary")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise refused(file.path, f"tokenizer.ggml.model = {kind[:80]} is not read; gpt2, llama and gemma4 are")
    tokens = _texts(file, "tokenizer.ggml.tokens")
    types = file.value("tokenizer.ggml.token_type", list) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise refused(file.path, f"it has {len(tokens)} tokens and {len(types)} types of them")
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if vocab.setdefault(token, number) != number:
            raise refused(file.path, f"the token {token[:40]!r} stands in its vocabulary twice")
    added = [
        {
            "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": types[number] in (CONTROL, UNKNOWN),
        }
        for number, token in enumerate(tokens)
        if types[number] in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]  # fmt: skip
    rules = _byte_level(file, vocab) if kind == "gpt2" else _sentence_piece(file, vocab, types)
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        **rules, "post_processor": _frame(file, tokens, kind),
    }  # fmt: skip
    return _dump(document)


def _texts(file: GgufFile, key: str) -> list[str]:
    found: list[str] | None = file.value(key, list)
    if not found or not isinstance(found[0], str):
        raise refused(file.path, f"its metadata has no {key}", "take a conversion that has its vocabulary")
    return found


def _bpe(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    plain = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {**plain, **changes, "vocab": vocab, "merges": merges}


def _byte_level(file: GgufFile, vocab: dict[str, int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for byte-level BPE: bytes as characters, merged in the list's order."""
    name = _rule(file)
    if name not in RULES:
        known = ", ".join(RULES)
        remedy = f"{known} are; another one would cut texts otherwise than the model was trained with"
        raise refused(file.path, f"tokenizer.ggml.pre = {name[:80]} is no rule that is known here", remedy)
    merges, rule = _listed_merges(file, vocab), RULES[name]
    before: list[dict[str, Any]] = []
    if rule == DIGITS:
        before.append({"type": "Digits", "individual_digits": True})
    elif rule:
        splits = (rule,) if isinstance(rule, str) else rule
        before += [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
        ]
    by_itself = rule in (GPT2, DIGITS)
    before.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_itself})
    return {
        "normalizer": {"type": "NFC"} if name in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=name in WHOLE_WORDS_FIRST),
    }


def _listed_merges(file: GgufFile, vocab: dict[str, int]) -> list[list[str]]:
    """Return the pairs of tokens that are merged, in the file's order."""
    merges = []
    for line in _texts(file, "tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise refused(file.path, f"the merge {line[:40]!r} is of tokens that its vocabulary lacks")
        merges.append([left, right])
    return merges


def _rule(file: GgufFile) -> str:
    return str(file.value("tokenizer.ggml.pre", str, "default"))


def _sentence_piece(file: GgufFile, vocab: dict[str, int], types: list[int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for SentencePiece's BPE.

    Spaces are characters, and characters that are not in the vocabulary become bytes. Of neighbouring tokens the pair
    that makes the token with the highest score is merged first, or the pair that comes first in the list of a gemma4.
    """
    if file.value("tokenizer.ggml.model", str) == "gemma4":
        merges = _listed_merges(file, vocab)
    else:
        scores = file.value("tokenizer.ggml.scores", list)
        if not scores or len(scores) != len(vocab):
            raise refused(file.path, "its metadata has no score for each token")
        merges = _merges(vocab, scores, types)
    begins = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps: list[dict[str, Any]] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    unknown = next((token for token, number in vocab.items() if types[number] == UNKNOWN), None)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if begins else []), replaced],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [*steps, *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins else [])],
        },
        "model": _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _merges(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[list[str]]:
    """Return all pairs of tokens that make a token: by descending score, then by descending length of the left part."""
    found: list[tuple[float, int, str, str]] = []
    for token, number in vocab.items():
        if types[number] not in (NORMAL, USER_DEFINED, UNUSED) or len(token) > MOST_CHARACTERS:
            continue
        for cut in range(1, len(token)):
            if token[:cut] in vocab and token[cut:] in vocab:
                found.append((-scores[number], -cut, token[:cut], token[cut:]))
    return [[left, right] for *_, left, right in sorted(found)]


MOST_CHARACTERS = 1024  # of a token that merges make; a hostile file may have one of megabytes


def _frame(file: GgufFile, tokens: list[str], kind: str) -> dict[str, Any] | None:
    """Return the post-processor that adds special tokens before and after every text; None if there are none."""
    has_bos = kind != "gpt2" or _rule(file) in WHOLE_WORDS_FIRST
    first = _special(file, tokens, "bos") if file.value("tokenizer.ggml.add_bos_token", bool, has_bos) else None
    last = _special(file, tokens, "eos") if file.value("tokenizer.ggml.add_eos_token", bool, False) else None
    ends = first, last
    if ends == (None, None):
        return None

    def around(name: str, number: int) -> list[dict[str, Any]]:
        before, after = (
            [] if token is None else [{"SpecialToken": {"id": token, "type_id": number}}] for token in ends
        )
        return [*before, {"Sequence": {"id": name, "type_id": number}}, *after]

    specials = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in ends if token}
    return {
        "type": "TemplateProcessing", "single": around("A", 0), "pair": around("A", 0) + around("B", 1),
        "special_tokens": specials,
    }  # fmt: skip


def _special(file: GgufFile, tokens: list[str], name: str) -> str | None:
    """Return a special token by its name; None if the file has none."""
    number: int | None = file.value(f"tokenizer.ggml.{name}_token_id", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise refused(file.path, f"tokenizer.ggml.{name}_token_id = {number} is no token of its {len(tokens)}")
    return tokens[number]


def _config(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens by name, and the chat template."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = _texts(file, "tokenizer.ggml.tokens") if "tokenizer.ggml.tokens" in file.metadata else []
    values: dict[str, Any] = {
        name: text for there, name in names.items() if tokens and (text := _special(file, tokens, there)) is not None
    }
    if template := file.value("tokenizer.chat_template", str, ""):
        values["chat_template"] = template
    return values
