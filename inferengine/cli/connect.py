"""A command's connection to a running engine."""

from __future__ import annotations

from inferengine.client import Client
from inferengine.errors import InferEngineError
from inferengine.wire.messages import Welcome

CONNECT_TIMEOUT_S = 3.0


def connect(client: Client) -> Welcome:
    """Wait for the engine's first word. Raises engine_unavailable, which says where nobody answered."""
    try:
        return client.connect(CONNECT_TIMEOUT_S)
    except InferEngineError as error:
        message = f"No engine answers at {client.address}: 'inferengine check' looks for the reason."
        raise InferEngineError(error.code, message) from None
