"""Grammars for requests: compiled off the loop and off the I/O thread, before the request is accepted, so that a
grammar that makes no sense is a REJECT and not a failure later on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from inferengine.core.grammar import Grammar
from inferengine.errors import InferEngineError
from inferengine.structure import GrammarSpec

if TYPE_CHECKING:
    from inferengine.structured.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

LARGE_VOCABULARY = 16_384  # below, the first grammar costs some ten milliseconds more than the others

GrammarsDone = Callable[[list[Grammar] | InferEngineError], None]


class GrammarService:
    """`deliver` takes a call to the I/O thread. The compiler's library is imported when the first grammar comes."""

    def __init__(self, files: Mapping[str, bytes], deliver: Callable[[Callable[[], None]], None]) -> None:
        self._tokenizer_json = files.get("tokenizer.json")
        self._deliver = deliver
        self._compiler: GrammarCompiler | None = None
        self._prepared: Future[Any] | None = None

    def prepare(self, vocab_size: int, eos_token_ids: list[int]) -> None:
        """Begin, while the engine starts, with what a large vocabulary needs before its first grammar: it keeps the
        interpreter's lock for a second, in which no stream would go on."""
        if vocab_size >= LARGE_VOCABULARY:
            with contextlib.suppress(InferEngineError):  # said when somebody asks for a grammar
                self._compiler = self._make_compiler(vocab_size, eos_token_ids)
                self._prepared = self._compiler.prepare()

    def wait(self) -> None:
        """Until that is done."""
        if self._prepared is not None and (error := self._prepared.exception()) is not None:
            logger.warning("grammars will be refused: %s", error)

    def compile(
        self, spec: GrammarSpec, count: int, vocab_size: int, eos_token_ids: list[int], done: GrammarsDone
    ) -> None:
        """`done` gets `count` grammars at their beginning, or why there are none, in the I/O thread. Raises
        `unsupported` where this engine cannot compile any."""
        compiler = self._compiler or self._make_compiler(vocab_size, eos_token_ids)
        self._compiler = compiler

        def work(first: Grammar | InferEngineError) -> None:
            outcome: list[Grammar] | InferEngineError
            if isinstance(first, InferEngineError):
                outcome = first
            else:
                outcome = [first, *(compiler.compile(spec) for _ in range(count - 1))]
            self._deliver(partial(done, outcome))

        compiler.submit(spec, work)

    def close(self) -> None:
        """What waits is not done any more."""
        if self._compiler is not None:
            self._compiler.close()

    def _make_compiler(self, vocab_size: int, eos_token_ids: list[int]) -> GrammarCompiler:
        if self._tokenizer_json is None:
            raise InferEngineError("unsupported", "The model has no tokenizer: grammars need one.", field="grammar")
        if not eos_token_ids:
            message = "The model has no end-of-text token: a grammar could not end."
            raise InferEngineError("unsupported", message, field="grammar")
        try:
            from inferengine.structured.compiler import GrammarCompiler
        except ImportError as error:
            logger.warning("grammars are refused: %s", error)
            message = "This engine runs without its grammar library."
            raise InferEngineError("unsupported", message, field="grammar") from None
        return GrammarCompiler(self._tokenizer_json.decode(), vocab_size=vocab_size, eos_token_ids=eos_token_ids)
