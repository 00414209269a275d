"""Short names of models on the Hugging Face hub: `qwen3-0.6b` is Qwen/Qwen3-0.6B.

One line of the table names the models of one kind by their sizes. Only models of architectures that the engine serves
stand here; any other is named by its hub id, `ORG/NAME`.
"""

from __future__ import annotations

import difflib

# short name with {} for the size → (hub id with {} for the size, sizes)
FAMILIES: dict[str, tuple[str, str]] = {
    "qwen3-{}": ("Qwen/Qwen3-{}", "0.6B 1.7B 4B 8B 14B 32B"),
    "qwen3-{}-fp8": ("Qwen/Qwen3-{}-FP8", "0.6B 1.7B 4B 8B 14B 32B"),
    "qwen2.5-{}": ("Qwen/Qwen2.5-{}-Instruct", "0.5B 1.5B 3B 7B 14B 32B 72B"),
    "qwen2.5-coder-{}": ("Qwen/Qwen2.5-Coder-{}-Instruct", "0.5B 1.5B 3B 7B 14B 32B"),
    "llama3.1-{}": ("meta-llama/Llama-3.1-{}-Instruct", "8B 70B"),
    "llama3.2-{}": ("meta-llama/Llama-3.2-{}-Instruct", "1B 3B"),
    "llama3.3-{}": ("meta-llama/Llama-3.3-{}-Instruct", "70B"),
    "mistral-{}": ("mistralai/Mistral-{}-Instruct-v0.3", "7B"),
    "gemma3-{}": ("google/gemma-3-{}-it", "270m 1b 4b 12b 27b"),
    "smollm2-{}": ("HuggingFaceTB/SmolLM2-{}-Instruct", "135M 360M 1.7B"),
    "gpt2": ("openai-community/gpt2", ""),
}
NAMES: dict[str, str] = {
    short.format(size.lower()): hub.format(size)
    for short, (hub, sizes) in FAMILIES.items()
    for size in sizes.split() or [""]
}


def hub_id(name: str) -> str:
    """The hub id of a short name; every other name as it is. `@REVISION` stays behind it.

    Upper case and Ollama's colon are read too: `Qwen3:0.6B` is qwen3-0.6b.
    """
    short, at, revision = name.partition("@")
    return NAMES.get(short.lower().replace(":", "-"), short) + at + revision


def near_names(name: str) -> list[str]:
    """Short names that `name` may have meant, at most three; of a family without a size, its sizes."""
    short = name.partition("@")[0].lower().replace(":", "-").rpartition("/")[2]
    sizes = [known for known in NAMES if known.startswith(f"{short}-")]
    return sizes[:3] or difflib.get_close_matches(short, NAMES, n=3, cutoff=0.75)
