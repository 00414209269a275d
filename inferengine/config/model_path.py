"""Find a model's files: a folder, a hub id or a short name in the local cache, or the embedded model.

Nothing is downloaded here: `inferengine fetch` and `inferengine up` bring what the cache lacks.

The hub's cache is laid out by Hugging Face: `models--ORG--NAME/refs/REVISION` names a commit, whose files stand under
`models--ORG--NAME/snapshots/COMMIT`.
"""

from __future__ import annotations

import re
from pathlib import Path

from inferengine.config import Config, hub_cache_directory
from inferengine.config.model_names import hub_id, near_names
from inferengine.errors import ConfigError

EMBEDDED = Path(__file__).parents[1] / "assets" / "embedded"
EMBEDDED_DRAFT = Path(__file__).parents[1] / "assets" / "embedded-draft"
HUB_ID = re.compile(r"^([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")


def model_folder(config: Config) -> Path:
    """The folder of `model.path`: as it is, or `ORG/NAME` or `ORG/NAME@REVISION` in the hub's cache.

    Raises ConfigError naming `model.path` when there is neither.
    """
    return _find(config.model.path, "model.path") if config.model.path else EMBEDDED


def draft_folder(config: Config, *, on_cpu: bool) -> Path | None:
    """The folder of the draft model; None without one. `on_cpu`: whether the model runs on a CPU."""
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
    """The hub id, with its revision, of a model that is neither a folder nor in the local cache; empty: it is there.

    Raises ConfigError naming `key` for a name that can be neither.
    """
    if not name or Path(name).expanduser().is_dir():
        return ""
    _check_name(name, key)
    return "" if _snapshot(hub_id(name)) is not None else hub_id(name)


def _find(name: str, key: str) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    _check_name(name, key)
    return _in_hub_cache(name, key)


def _check_name(name: str, key: str) -> None:
    """Raise ConfigError for a name that is no folder and cannot be a model's on the hub."""
    folder = Path(name).expanduser()
    if folder.exists():
        raise ConfigError(key, f"{folder.name} is a file: name the folder that holds it")
    if not HUB_ID.match(hub_id(name)) or ".." in name:
        raise ConfigError(key, f"there is no folder {name}")
    if "/" not in hub_id(name) and not _snapshot(name):
        close = near_names(name)
        hint = f"did you mean {', '.join(close)}?" if close else "hub ids look like ORG/NAME"
        raise ConfigError(key, f"there is no folder {name}, and no model of that short name; {hint}")


def served_name(config: Config) -> str:
    """The model's name on the wire and on /v1/models."""
    if config.model.served_name:
        return config.model.served_name
    if not config.model.path:
        return "inferengine-embedded"
    if Path(config.model.path).expanduser().is_dir():
        return Path(config.model.path).expanduser().resolve().name
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
    """The folder of `ORG/NAME` or `ORG/NAME@REVISION` in the hub's cache; None: it is not there."""
    repository, _, revision = name.partition("@")
    base, revision = _cache_folder(repository), revision or "main"
    reference = base / "refs" / revision
    commit = reference.read_text(encoding="ascii").strip() if reference.is_file() else revision
    snapshot = base / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
