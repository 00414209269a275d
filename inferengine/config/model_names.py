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
    "mistral-nemo": ("mistralai/Mistral-Nemo-Instruct-2407", ""),
    "mistral-small": ("mistralai/Mistral-Small-24B-Instruct-2501", ""),
    "ministral-{}": ("mistralai/Ministral-{}-Instruct-2410", "8B"),
    "gemma-{}": ("google/gemma-1.1-{}-it", "2b 7b"),
    "gemma2-{}": ("google/gemma-2-{}-it", "2b 9b 27b"),
    "gemma3-{}": ("google/gemma-3-{}-it", "270m 1b 4b 12b 27b"),
    "phi3-{}": ("microsoft/Phi-3-{}-4k-instruct", "mini medium"),
    "phi3.5-mini": ("microsoft/Phi-3.5-mini-instruct", ""),
    "phi4": ("microsoft/phi-4", ""),
    "phi4-mini": ("microsoft/Phi-4-mini-instruct", ""),
    "falcon3-{}": ("tiiuae/Falcon3-{}-Instruct", "1B 3B 7B 10B"),
    "olmo2-1b": ("allenai/OLMo-2-0425-1B-Instruct", ""),
    "olmo2-{}": ("allenai/OLMo-2-1124-{}-Instruct", "7B 13B"),
    "olmo2-32b": ("allenai/OLMo-2-0325-32B-Instruct", ""),
    "granite3.3-{}": ("ibm-granite/granite-3.3-{}-instruct", "2b 8b"),
    "smollm2-{}": ("HuggingFaceTB/SmolLM2-{}-Instruct", "135M 360M 1.7B"),
    "smollm3-{}": ("HuggingFaceTB/SmolLM3-{}", "3B"),
    "glm4-{}": ("zai-org/GLM-4-{}-0414", "9B 32B"),
    "seed-oss-{}": ("ByteDance-Seed/Seed-OSS-{}-Instruct", "36B"),
    "command-r": ("CohereLabs/c4ai-command-r-08-2024", ""),
    "command-r-plus": ("CohereLabs/c4ai-command-r-plus-08-2024", ""),
    "command-r7b": ("CohereLabs/c4ai-command-r7b-12-2024", ""),
    "command-a": ("CohereLabs/c4ai-command-a-03-2025", ""),
    "starcoder2-{}": ("bigcode/starcoder2-{}", "3b 7b 15b"),
    "stablelm2-1.6b": ("stabilityai/stablelm-2-1_6b-chat", ""),
    "stablelm2-12b": ("stabilityai/stablelm-2-12b-chat", ""),
    "pythia-{}": ("EleutherAI/pythia-{}", "70m 160m 410m 1b 1.4b 2.8b 6.9b 12b"),
    "gpt-neox-{}": ("EleutherAI/gpt-neox-{}", "20b"),
    "gpt2": ("openai-community/gpt2", ""),
    "gpt2-{}": ("openai-community/gpt2-{}", "medium large xl"),
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
