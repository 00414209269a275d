"""Submissions that wait for their text: how long, and whose time counts."""

from __future__ import annotations

from typing import Any

from inferengine.engine.io.output_log import Submission
from inferengine.engine.io.pending import TEXT_TIMEOUT_S, PendingSubmission, PendingSubmissions
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.wire.messages import Submit


class Silent:
    """Tokenizes, and is never done."""

    def tokenize(self, *arguments: Any) -> None:
        pass


def test_time_in_which_the_engine_did_not_run_counts_for_no_text() -> None:
    refused: list[InferEngineError] = []
    unused: Any = Silent()
    pending = PendingSubmissions(
        unused,
        unused,
        unused,
        grammar_timeout_s=5.0,
        ready=lambda item, prompt: None,
        refuse=lambda item, error: refused.append(error),
    )
    message = Submit(bytes(16), 1, text="a text")
    submission = Submission(message.id, SamplingParams())
    item = PendingSubmission(submission, message, None, [], None, None, [], 5.0, TEXT_TIMEOUT_S)
    pending.begin(item, vocab_size=100, eos_token_ids=[], max_model_len=100)
    pending.extend_deadlines(40.0)
    pending.tick(41.0)
    assert refused == []
    pending.tick(40.0 + TEXT_TIMEOUT_S + 1.0)
    assert [error.code for error in refused] == ["overloaded"]
