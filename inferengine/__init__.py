"""InferEngine: a message-queue engine for LLM inference. See README.md for the path of a request."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names; a program imports them when it asks for them
    from inferengine.llm import LLM
    from inferengine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import `LLM`, which brings torch with it, or `SamplingParams` when it is asked for and not before."""
        if name == "LLM":
            try:
                from inferengine.llm import LLM
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] in ("inferengine", "frontends"):
                    raise
                raise ImportError(
                    f"inferengine.LLM needs the engine, and {error.name} is not installed: "
                    "pip install 'inferengine[engine]'",
                    name=error.name,
                ) from None
            return LLM
        if name == "SamplingParams":
            from inferengine.sampling_params import SamplingParams

            return SamplingParams
        raise AttributeError(f"module 'inferengine' has no attribute '{name}'")

    def __dir__() -> list[str]:
        """Return every public name, those included that are imported later."""
        return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
