"""Find a model's files: a folder, a hub id or a short name in the local cache, or the embedded model.

A short name stands for a model on the Hugging Face hub: `qwen3-0.6b` is Qwen/Qwen3-0.6B. One line of the table names
the models of one kind by their sizes. Only models of architectures that the engine serves stand there; any other is
named by its hub id, `ORG/NAME`.

Nothing is downloaded here: `inferengine fetch` and `inferengine up` bring what the cache lacks.

The hub's cache is laid out by Hugging Face: `models--ORG--NAME/refs/REVISION` names a commit, whose files stand under
`models--ORG--NAME/snapshots/COMMIT`.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from inferengine.config import Config, hub_cache_directory
from inferengine.errors import ConfigError
from inferengine.gguf.reader import SUFFIX, gguf_in, read_gguf

# -- short names -------------------------------------------------------------------------------------------------------

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
    """Return the hub id of a short name; every other name as it is. `@REVISION` stays behind it.

    Upper case and Ollama's colon are read too: `Qwen3:0.6B` is qwen3-0.6b.
    """
    short, at, revision = name.partition("@")
    return NAMES.get(short.lower().replace(":", "-"), short) + at + revision


def near_names(name: str) -> list[str]:
    """Return short names that `name` may have meant, at most three; of a family without a size, its sizes."""
    short = name.partition("@")[0].lower().replace(":", "-").rpartition("/")[2]
    sizes = [known for known in NAMES if known.startswith(f"{short}-")]
    return sizes[:3] or difflib.get_close_matches(short, NAMES, n=3, cutoff=0.75)


# -- files -------------------------------------------------------------------------------------------------------------


EMBEDDED = Path(__file__).parents[1] / "assets" / "embedded"
EMBEDDED_DRAFT = Path(__file__).parents[1] / "assets" / "embedded-draft"
HUB_ID = re.compile(r"^([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")


def model_folder(config: Config) -> Path:
    """Return the folder of `model.path`: as it is, or `ORG/NAME` or `ORG/NAME@REVISION` in the hub's cache. Of a model
    in GGUF format it is the file, which stands for a folder: models/hf_config.py and engine/model_info.py read both.

    Raises ConfigError naming `model.path` when there is neither.
    """
    return _find(config.model.path, "model.path") if config.model.path else EMBEDDED


def weight_paths(folder: Path) -> list[Path]:
    """Return the files of the weights in a folder, or of a model in GGUF format. Raises ConfigError for a broken
    one."""
    return list(read_gguf(folder).files) if folder.suffix == SUFFIX else sorted(folder.glob("*.safetensors"))


def draft_folder(config: Config, *, on_cpu: bool) -> Path | None:
    """Return the folder of the draft model; None without one. `on_cpu`: whether the model runs on a CPU. Raises
    ConfigError where `speculation.method = draft` has no draft model of the same vocabulary."""
    speculation = config.speculation
    if speculation.method not in ("auto", "draft"):
        return None
    if speculation.draft_model:
        return _find(speculation.draft_model, "speculation.draft_model")
    is_embedded = model_folder(config).resolve() == EMBEDDED.resolve()
    if speculation.method == "auto":
        return EMBEDDED_DRAFT if is_embedded and on_cpu and config.model.load_format != "dummy" else None
    if not is_embedded:
        raise ConfigError("speculation.draft_model", "must name a model of the same vocabulary")
    return EMBEDDED_DRAFT


def to_fetch(name: str, key: str = "model.path") -> str:
    """Return the hub id, with its revision, of a model that is neither a folder nor in the local cache; empty: it is
    there.

    Raises ConfigError naming `key` for a name that can be neither.
    """
    if not name or Path(name).expanduser().is_dir() or _is_gguf(Path(name).expanduser()):
        return ""
    _check_name(name, key)
    return "" if _snapshot(hub_id(name)) is not None else hub_id(name)


def _find(name: str, key: str) -> Path:
    folder = Path(name).expanduser()
    if _is_gguf(folder):
        return folder
    if not folder.is_dir():
        _check_name(name, key)
        folder = _in_hub_cache(name, key)
    return gguf_in(folder) or folder


def _is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()


def _check_name(name: str, key: str) -> None:
    """Raise ConfigError for a name that is no folder and cannot be a model's on the hub."""
    folder = Path(name).expanduser()
    if folder.exists():
        raise ConfigError(key, f"{folder.name} is a file: name the folder that holds it, or a {SUFFIX} file")
    if not HUB_ID.match(hub_id(name)) or ".." in name:
        raise ConfigError(key, f"there is no folder {name}")
    if "/" not in hub_id(name) and not _snapshot(name):
        close = near_names(name)
        hint = f"did you mean {', '.join(close)}?" if close else "hub ids look like ORG/NAME"
        raise ConfigError(key, f"there is no folder {name}, and no model of that short name; {hint}")


def served_name(config: Config) -> str:
    """Return the model's name on the wire and on /v1/models."""
    if config.model.served_name:
        return config.model.served_name
    if not config.model.path:
        return "inferengine-embedded"
    if Path(config.model.path).expanduser().is_dir():
        return Path(config.model.path).expanduser().resolve().name
    if _is_gguf(Path(config.model.path).expanduser()):
        return Path(config.model.path).stem
    return config.model.path.partition("@")[0]


def _in_hub_cache(name: str, key: str) -> Path:
    repository, _, revision = hub_id(name).partition("@")
    if (snapshot := _snapshot(hub_id(name))) is not None:
        return snapshot
    if not _cache_folder(repository).is_dir():
        raise ConfigError(
            key,
            f"there is no folder {name} here, and no such model in the hub's local cache; "
            f"fetch it first with: inferengine fetch {name}",
        )
    raise ConfigError(
        key,
        f"the local cache has {repository}, but not its revision {revision or 'main'}: inferengine fetch {name}",
    )


def _cache_folder(repository: str) -> Path:
    return hub_cache_directory() / f"models--{repository.replace('/', '--')}"


def _snapshot(name: str) -> Path | None:
    """Return the folder of `ORG/NAME` or `ORG/NAME@REVISION` in the hub's cache; None: it is not there."""
    repository, _, revision = name.partition("@")
    base, revision = _cache_folder(repository), revision or "main"
    reference = base / "refs" / revision
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision
    snapshot = base / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
