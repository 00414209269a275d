"""Bounds on a text's tokens without tokenizing it: the least possible number, and places where it can be cut.

Both follow from the tokenizer's own description, and only from parts whose meaning is known exactly. For anything else
nothing is claimed: a text that would be served is never refused, and the pieces give exactly the tokens of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

PIECE_CHARACTERS = 64 * 1024  # 60 ms of tokenizing, and 10 MB

# The expressions that byte-level vocabularies split a text by (GPT-2's is in the library). In all of them a letter
# belongs to a run of letters, perhaps with an apostrophe's ending, which ends before every character of _CUT, and the
# next match does not depend on what is before it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s+(?!\S)|\s+"
_KNOWN_SPLITS = frozenset(
    {
        # Llama 3, cl100k; Qwen 2 and 3
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        rf"|\s*[\r\n]+|{_TAIL}",
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_TAIL}",
        # this repository's own
        rf"{_CONTRACTIONS}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_TAIL}",
        # GPT-2, written out
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_TAIL}",
        # o200k
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# A letter of scripts that are in every version of Unicode, then a character that ends a run of letters in all of them.
_CUT = re.compile(r"[A-Za-zа-яА-Я぀-ゖァ-ヺ一-龥가-힣](?=[ \n.,;:!?。，、！？；：])")
# Normalizers, with the factor by which they may shrink a text in bytes: an ASCII text, and any text. Canonical
# composition shrinks at most four bytes to one (U+1FBE, U+0308, U+0301: seven to two).
_SHRINKS = {"NFC": (1, 4), "NFD": (1, 4), "Prepend": (1, 1)}


class TokenBounds:
    """The bounds of one tokenizer, from its `tokenizer.json`."""

    def __init__(self, document: dict[str, Any], vocabulary: dict[str, int]) -> None:
        """`vocabulary`: token to id, added tokens included."""
        added = [token for token in document.get("added_tokens") or () if isinstance(token, dict)]
        self._strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
        self._shrinks = _shrinks(document.get("normalizer"))
        self._longest = 0  # bytes of text that one token may stand for; 0: unknown
        if self._shrinks and _keeps_all(document.get("pre_tokenizer")):
            self._longest = _longest_token(document, vocabulary, added)
        self._can_cut = (
            _splits_at_cuts(document.get("pre_tokenizer"))
            and (document.get("normalizer") or {}).get("type") in (None, "NFC")
            and (document.get("model") or {}).get("type") == "BPE"
            and not self._strips
            and not any(token.get("single_word") or _CUT.search(str(token.get("content"))) for token in added)
        )

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that no tokenization of `text` can be below; 0 where nothing is known."""
        if not self._longest:
            return 0
        if self._strips:  # such a token includes any amount of white space around it
            text = "".join(text.split())
        ascii_factor, factor = self._shrinks or (1, 1)
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
        return -(-num_bytes // (self._longest * (ascii_factor if text.isascii() else factor)))

    def pieces(self, text: str) -> Iterator[str]:
        """Cut a text into pieces whose tokens, joined, are those of the whole. A piece is longer than PIECE_CHARACTERS
        only where there is no known place to cut it."""
        start = 0
        while self._can_cut and len(text) - start > PIECE_CHARACTERS:
            end = self._cut_before(text, start, start + PIECE_CHARACTERS)
            if not end:
                found = _CUT.search(text, start + PIECE_CHARACTERS - 1)
                end = found.end() if found else 0
            if not end:
                break
            yield text[start:end]
            start = end
        yield text[start:]

    def last_pieces(self, text: str) -> Iterator[str]:
        """Cut a text as `pieces` does, but from its end: the last piece comes first."""
        end = len(text)
        while self._can_cut and end > PIECE_CHARACTERS:
            start = self._cut_before(text, 0, end - PIECE_CHARACTERS)
            if not start:
                break
            yield text[start:end]
            end = start
        yield text[:end]

    @staticmethod
    def _cut_before(text: str, start: int, end: int) -> int:
        """The last place to cut in text[start:end], searched in growing windows; 0 where there is none."""
        window = 256
        while True:
            first = max(start, end - window)
            places = [found.end() for found in _CUT.finditer(text, first, end + 1) if found.end() <= end]
            if places and places[-1] > start:
                return places[-1]
            if first == start:
                return 0
            window *= 8


def _shrinks(normalizer: Any) -> tuple[int, int] | None:
    """How many bytes of text may become one byte by normalizing: of an ASCII text, and of any. None: unknown."""
    if normalizer is None:
        return (1, 1)
    kind = normalizer.get("type")
    if kind == "Sequence":
        ascii_factor = factor = 1
        for item in normalizer.get("normalizers") or ():
            found = _shrinks(item)
            if found is None:
                return None
            ascii_factor, factor = ascii_factor * found[0], factor * found[1]
        return (ascii_factor, factor)
    if kind == "Replace":
        old, new = (normalizer.get("pattern") or {}).get("String"), normalizer.get("content")
        longer = isinstance(old, str) and isinstance(new, str) and 0 < len(old.encode()) <= len(new.encode())
        return (1, 1) if longer else None
    return _SHRINKS.get(kind)


def _keeps_all(pre_tokenizer: Any) -> bool:
    """Whether it splits the text and drops none of it."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(_keeps_all(item) for item in pre_tokenizer.get("pretokenizers") or ())
    if kind == "Split":
        return pre_tokenizer.get("behavior") in ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
    return kind in ("ByteLevel", "Digits", "Metaspace")


def _longest_token(document: dict[str, Any], vocabulary: dict[str, int], added: list[dict[str, Any]]) -> int:
    """The most bytes of normalized text that one token stands for; 0 where characters may be dropped, or many of them
    become one unknown token."""
    model = document.get("model") or {}
    if model.get("type") not in ("BPE", "Unigram"):
        return 0
    if _is_byte_level(document.get("pre_tokenizer")) and model.get("type") == "BPE":
        if not all(character in vocabulary for character in BYTE_CHARACTERS):
            return 0
        lengths = [len(token) for token in vocabulary]  # a character for each byte
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        lengths = [len(token.encode()) for token in vocabulary]
    else:
        return 0
    contents = (len(str(token.get("content")).encode()) for token in added)
    return max(max(lengths, default=0), max(contents, default=0))


def _is_byte_level(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    items = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return any(item.get("type") == "ByteLevel" for item in items)


def _splits_at_cuts(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in _KNOWN_SPLITS
    return False


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character that stands for one in GPT-2's vocabulary (Radford et al. 2019,
    encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + rank): byte for rank, byte in enumerate(hidden)})
    return table


BYTE_CHARACTERS = byte_alphabet()
