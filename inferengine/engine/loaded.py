"""What exists once the model is loaded, and the reference through which the parts of the engine find it."""

from __future__ import annotations

from dataclasses import dataclass

from inferengine.core.scheduler.admission import AdmissionLimits
from inferengine.engine.loop import EngineLoop
from inferengine.errors import InferEngineError


@dataclass(frozen=True)
class LoadedEngine:
    """The running loop and the limits that requests are checked against."""

    loop: EngineLoop
    limits: AdmissionLimits
    vocab_size: int
    embedding_size: int = 0  # 0: the engine gives no embeddings
    speculation_method: str = "none"  # `speculation.method`, decided


class EngineRef:
    """The loaded engine, or None before it is loaded. Set once by the loop's thread, read by every thread."""

    def __init__(self) -> None:
        self.engine: LoadedEngine | None = None

    def set(self, engine: LoadedEngine) -> None:
        """The model is loaded."""
        self.engine = engine

    def require(self) -> LoadedEngine:
        """The loaded engine. Raises InferEngineError `engine_unavailable` before it is loaded."""
        if self.engine is None:
            raise InferEngineError("engine_unavailable", "The engine is still loading.")
        return self.engine

    def stop_choice(self, uid: int) -> None:
        """End a choice whose stop string was found."""
        if self.engine is not None:
            self.engine.loop.cancel([uid], "stop", None)
