"""Tokenizer, chat template, detokenizer, stop strings, parsers of outputs. Imports neither torch nor transformers."""

from inferengine.text.chat_template import ChatTemplate, check_messages
from inferengine.text.tokenizer import TOKENIZER_FILES, TextDelta, TextStream, Tokenizer, fingerprint

__all__ = ["TOKENIZER_FILES", "ChatTemplate", "TextDelta", "TextStream", "Tokenizer", "check_messages", "fingerprint"]
