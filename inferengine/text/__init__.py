"""Tokenizer, chat template, detokenizer, stop strings, parsers of outputs. Imports neither torch nor transformers."""

from inferengine.text.chat_template import ChatTemplate, check_messages
from inferengine.text.tokenizer import CONTEXT_TOKENS, TOKENIZER_FILES, TextDelta, TextStream, Tokenizer, fingerprint

__all__ = [
    "CONTEXT_TOKENS",
    "TOKENIZER_FILES",
    "ChatTemplate",
    "TextDelta",
    "TextStream",
    "Tokenizer",
    "check_messages",
    "fingerprint",
]
