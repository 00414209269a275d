"""POST /v1/embeddings: known, and refused. The engine gives tokens and log-probabilities, no hidden states."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from inferengine.errors import InferEngineError


async def embeddings(request: Request) -> Response:
    """Refused: this engine gives no embeddings."""
    raise InferEngineError("unsupported", "This engine generates text; it gives no embeddings.")
