"""What can be said of a SUBMIT before its text is tokenized or its grammar compiled.

Front ends check as well, for a better place to point at; a direct producer skips them.
"""

from __future__ import annotations

from inferengine.config import LimitsConfig
from inferengine.engine.text_service import num_characters
from inferengine.errors import InvalidRequest
from inferengine.params import POOLINGS, SamplingParams, from_map, validate
from inferengine.structure import grammar_from_list, validate_grammar
from inferengine.wire.messages import Submit


def check_submit(
    message: Submit, limits: LimitsConfig, *, vocab_size: int, has_embeddings: bool, has_text: bool
) -> SamplingParams:
    """The request's parameters. `has_embeddings`, `has_text`: what the engine can give. Raises InvalidRequest."""
    params = from_map(message.params)
    validate(params, vocab_size=vocab_size, limits=limits)
    if message.reply == "tokens" and params.stop:
        raise InvalidRequest("params.stop", 'stop strings need reply "text" or "both"')
    if message.reply == "embedding" or message.pooling:
        _check_embedding(message, params, has_embeddings)
    if (message.reply in ("text", "both") or message.prompt is None) and not has_text:
        raise InvalidRequest("reply", "this model has no tokenizer: send and read token ids", code="unsupported")
    if message.grammar is not None:
        validate_grammar(grammar_from_list(message.grammar), limits)
    if message.text is not None and not message.text:
        raise InvalidRequest("text", "must not be empty")
    if message.messages is not None and not message.messages:
        raise InvalidRequest("messages", "must not be empty")
    most = limits.max_text_characters
    if num_characters(message.text, message.messages) > most:
        raise InvalidRequest("prompt", f"must have at most {most} characters", code="request_too_large")
    return params


def _check_embedding(message: Submit, params: SamplingParams, has_embeddings: bool) -> None:
    """An embedding draws no token: what says how is refused, so that nobody wonders why it has no effect."""
    if message.reply != "embedding":
        raise InvalidRequest("pooling", 'is for reply "embedding" only')
    if not has_embeddings:
        raise InvalidRequest("reply", "this engine gives no embeddings", code="unsupported")
    if message.pooling and message.pooling not in POOLINGS:
        raise InvalidRequest("pooling", f"must be one of {', '.join(POOLINGS)}")
    if message.grammar is not None:
        raise InvalidRequest("grammar", "an embedding has no output that could match it: leave it out")
    if params != SamplingParams():
        raise InvalidRequest("params", "an embedding draws no tokens: leave them out")
