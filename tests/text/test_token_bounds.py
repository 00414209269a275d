"""What is known of a text before it is tokenized: the least number of its tokens, and where it may be cut."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

import inferengine
from inferengine.text import Tokenizer
from inferengine.text import tokenizer as bounds_file
from tests.text.vocabularies import byte_level, load, sentencepiece, word_piece

ASSETS = Path(inferengine.__file__).parent / "assets" / "embedded"
ALPHABETS = (
    "abc xyz",
    "aeiou   \n\n\t.,'sSdDlL ",
    "the quick brown fox. It's 1234, isn't it?\n",
    "schön über é e\u0301 \u212b\u212a ",
    "你好，世界。한국어 가나다! привет, мир",
    "\u1112\u1161\u11ab 🎉🎉 <s></s>über再见 \x00\u200b\u3000",
    "a",
    " ",
)


def split_by(pattern: str, *, normalizer: normalizers.Normalizer | None = None) -> FastTokenizer:
    """Return a byte-level vocabulary whose words are found by this expression."""
    fast = byte_level()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if normalizer is not None:
        fast.normalizer = normalizer
    return fast


def framed() -> FastTokenizer:
    """Return a tokenizer with special tokens before and after every text."""
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return fast


TOKENIZERS = {
    "embedded": lambda: Tokenizer.from_files({"tokenizer.json": (ASSETS / "tokenizer.json").read_bytes()}),
    "byte level": lambda: load(byte_level()),
    "framed": lambda: load(framed()),
    "sentencepiece": lambda: load(sentencepiece()),
    "word piece": lambda: load(word_piece()),
    "composed": lambda: load(split_by(min(bounds_file._KNOWN_SPLITS), normalizer=normalizers.NFC())),
    **{f"split {n}": lambda p=p: load(split_by(p)) for n, p in enumerate(sorted(bounds_file._KNOWN_SPLITS))},
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


def texts(seed: int, count: int, most: int) -> list[str]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        alphabet = draw.choice(ALPHABETS) + draw.choice(ALPHABETS)
        words = ["".join(draw.choices(alphabet, k=draw.randrange(1, 12))) for _ in range(draw.randrange(1, most))]
        made.append(draw.choice(["", " ", ". "]).join(words))
    return made


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return what the library makes of the text in one go."""
    ids: list[int] = tokenizer._fast.encode(text).ids
    return ids


def test_no_text_has_fewer_tokens_than_said(tokenizer: Tokenizer) -> None:
    for text in texts(1, 300, 40):
        assert tokenizer.least_tokens(text) <= len(whole(tokenizer, text)), repr(text)


def test_pieces_make_the_tokens_of_the_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds_file, "PIECE_CHARACTERS", 20)
    for text in texts(2, 400, 60):
        expected = whole(tokenizer, text)
        assert [token for part in tokenizer.parts(text) for token in part] == expected, repr(text)
        backwards = list(tokenizer.last_parts(text))[::-1]
        assert [token for part in backwards for token in part] == expected, repr(text)


@pytest.mark.parametrize("name", ["embedded", "byte level", "framed", "composed"])
def test_usual_texts_are_cut_into_small_pieces(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "Once upon a time, there was a fox. " * 20_000
    parts = [part for part in tokenizer.parts(text) if len(part) > 1]
    assert len(parts) >= len(text) // bounds_file.PIECE_CHARACTERS
    assert max(map(len, tokenizer._bounds.pieces(text))) <= bounds_file.PIECE_CHARACTERS


def test_the_embedded_model_s_longest_token_is_known() -> None:
    tokenizer = TOKENIZERS["embedded"]()
    assert tokenizer.least_tokens("a" * 3_800_000) > 200_000


def test_nothing_is_claimed_of_what_is_not_understood() -> None:
    dropping = byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fusing = FastTokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    lowering = byte_level()
    lowering.normalizer = normalizers.Strip()
    for fast in (word_piece(), dropping, fusing, lowering):
        assert load(fast).least_tokens("x y " * 100_000) == 0


def test_a_token_that_takes_white_space_with_it_is_reckoned_with() -> None:
    fast = byte_level()
    fast.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    tokenizer = load(fast)
    text = " " * 10_000 + "<mask>" + "\n" * 10_000
    assert tokenizer.least_tokens(text) <= len(whole(tokenizer, text)) == 1
    assert list(tokenizer._bounds.pieces("a b " * 100_000)) == ["a b " * 100_000]


def test_a_token_of_several_words_is_not_cut() -> None:
    fast = byte_level()
    fast.add_tokens([AddedToken("fim middle")])
    text = "fim middle " * 20_000
    assert len(list(load(fast)._bounds.pieces(text))) == 1


def test_composing_makes_at_least_a_byte_of_four() -> None:
    """Over all of Unicode: the most bytes that a code point's canonical parts can have had."""
    most: dict[str, int] = {}
    decomposed: dict[str, str] = {}
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        text = chr(code)
        parts, size = unicodedata.normalize("NFD", text), len(text.encode())
        assert size <= 4 * len(parts.encode())
        if len(parts) == 1:
            most[parts] = max(most.get(parts, 1), size)
        if parts != text:
            decomposed[text] = parts
    assert all(size <= 4 * len(part.encode()) for part, size in most.items())  # whatever composes to itself
    for text, parts in decomposed.items():
        composed = unicodedata.normalize("NFC", text)
        assert sum(most[part] for part in parts) <= 4 * len(composed.encode()), hex(ord(text))
        assert len(text.encode()) <= sum(most[part] for part in parts)


def test_the_description_that_the_library_writes_is_the_one_that_is_read() -> None:
    """A pattern that is spelled otherwise would go unnoticed: nothing would be cut."""
    document = json.loads(split_by(min(bounds_file._KNOWN_SPLITS)).to_str())
    assert bounds_file._splits_at_cuts(document["pre_tokenizer"])
    assert bounds_file._splits_at_cuts(json.loads(byte_level().to_str())["pre_tokenizer"])
