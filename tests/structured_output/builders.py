"""A model with random weights, as a grammar sees one: it draws any allowed token."""

from __future__ import annotations

import dataclasses
import random

from tokenizers import Tokenizer as FastTokenizer

from inferengine.config import LimitsConfig
from inferengine.structured_output.compiler import CACHE_BYTES, GrammarCompiler
from inferengine.structured_output.spec import GrammarSpec
from tests.text.vocabularies import byte_level, sentencepiece

VOCABULARIES = {"byte_level": byte_level, "sentencepiece": sentencepiece}
EOS = "</s>"


class Vocabulary:
    """A tokenizer with a compiler for it; ids above the tokenizer's own are padding, as checkpoints have."""

    def __init__(
        self, name: str, *, cache_bytes: int = CACHE_BYTES, max_lexers: int = 1, eos: str = EOS, **limits: float
    ) -> None:
        self.fast: FastTokenizer = VOCABULARIES[name]()
        self.eos = int(self.fast.token_to_id(eos))
        self.size = self.fast.get_vocab_size() + 5
        self.compiler = GrammarCompiler(
            self.fast.to_str(),
            vocab_size=self.size,
            eos_token_ids=[self.eos],
            limits=dataclasses.replace(LimitsConfig(), **limits),
            cache_bytes=cache_bytes,
            max_lexers=max_lexers,
        )

    def generate(self, spec: GrammarSpec, seed: int, *, max_tokens: int = 4000) -> str:
        """Return the text that a random model gives under a grammar. Half of the draws prefer the end where it is
        allowed, so that outputs without a bound of their own come to one."""
        draw = random.Random(seed)
        matcher = self.compiler.compile(spec)
        mask = bytearray(4 * -(-self.size // 32))
        tokens: list[int] = []
        while not matcher.is_terminated():
            forced = matcher.forced()
            for token in forced:
                assert matcher.accept(token)
            tokens += forced
            if matcher.is_terminated():
                break
            matcher.fill_bitmask(memoryview(mask))
            allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
            assert allowed, "nothing may follow, and the grammar has not ended"
            assert max(allowed) < self.size
            ends = self.eos in allowed and draw.random() < 0.5
            token = self.eos if ends else draw.choice(allowed)
            assert matcher.accept(token)
            if token == self.eos:
                break
            tokens.append(token)
            assert len(tokens) < max_tokens, "no end in sight"
        return str(self.fast.decode(tokens))
