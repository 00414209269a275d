"""`inferengine fetch`: bring a model from the Hugging Face hub into its local cache, with progress and an estimate."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from inferengine.cli import model_files
from inferengine.cli.command import Arguments, Option, command
from inferengine.cli.terminal import LiveLine
from inferengine.config import hub_cache_directory, hub_endpoint
from inferengine.config.model_path import NAMES, hub_id, model_folder, to_fetch
from inferengine.errors import ConfigError, ExitCode

WANTED = ("*.safetensors", "*.json", "*.jinja")
NOT_WANTED = ("original/*", "onnx/*", "*/*")  # other formats of the same weights stand in folders
POLL_S = 0.25
TIMEOUT_S = 10.0  # for the hub's answer; the files themselves may take as long as they come
SPARE_BYTES = 256 * 1024**2  # that must stay free beside the model
OPTIONS = {
    "options": (
        Option("--list", "print the short names and the hub ids that they stand for"),
        Option("--json", "print the result as JSON; no progress"),
    )
}


class RemoteFile(NamedTuple):
    """A file of a repository on the hub. `blob` is its name in the cache."""

    name: str
    size: int
    blob: str


@command(OPTIONS, takes_model=True, usage=("MODEL [--config FILE]", "--list"))
def run(arguments: Arguments) -> int:
    """Bring a model from the Hugging Face hub into its local cache, where `inferengine up MODEL` finds it.

    MODEL is a short name (qwen3-0.6b) or a hub id (ORG/NAME, ORG/NAME@REVISION). What an earlier try has brought is
    kept. Only weights in safetensors, configuration, tokenizer and chat template are fetched, and no code is run. The
    hub's own variables count: HF_TOKEN for models behind a licence, HF_ENDPOINT for a mirror, HF_HOME for the cache.
    """
    as_json = arguments.values["json"]
    if arguments.values["list"]:
        print(json.dumps(NAMES) if as_json else "\n".join(f"{short:<22}{hub}" for short, hub in NAMES.items()))
        return ExitCode.OK
    name = arguments.config.model.path
    if not name:
        raise ConfigError("MODEL", "name a model, such as qwen3-0.6b or ORG/NAME; --list prints the short names")
    missing = missing_model(name)
    if missing:
        fetch(missing, None if as_json else sys.stderr)
    folder = model_folder(arguments.config)
    result = {"model": name, "hub_id": hub_id(name), "folder": str(folder), "fetched": bool(missing)}
    print(json.dumps(result) if as_json else folder)
    return ExitCode.OK


def missing_model(name: str, key: str = "model.path") -> str:
    """Return the hub id of a model of which the local cache has nothing, or not all; empty: it is there, or is a
    folder.

    Raises ConfigError naming `key`.
    """
    if absent := to_fetch(name, key):
        return absent
    if not name or Path(name).expanduser().is_dir():
        return ""
    from inferengine.config import Config

    try:
        model_files.inspect(model_folder(Config().with_values(model={"path": name})))
    except model_files.BadModel:  # an earlier try was cut short
        return hub_id(name)
    return ""


def fetch(name: str, stream: TextIO | None) -> Path:
    """Download a model into the hub's cache and return its folder. Progress goes to `stream`. Raises ConfigError."""
    repository, _, revision = name.partition("@")
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise _refused(name, "the package huggingface_hub is missing: pip install 'inferengine[engine]'") from None
    disable_progress_bars()
    line = LiveLine(stream) if stream is not None else None
    if line is not None:
        line.show(f"asking {hub_endpoint()} for {name}")
    try:
        info = HfApi(endpoint=hub_endpoint()).model_info(
            repository, revision=revision or None, files_metadata=True, timeout=TIMEOUT_S
        )
        files = list(wanted_files(info.siblings or []))
        blobs = hub_cache_directory() / f"models--{repository.replace('/', '--')}" / "blobs"
        _check_files(name, files)
        _check_space(name, files, blobs)

        def download() -> str:
            return snapshot_download(
                repository,
                revision=info.sha,
                allow_patterns=[file.name for file in files],
                cache_dir=hub_cache_directory(),
                endpoint=hub_endpoint(),
            )

        folder = Path(_with_progress(download, name, files, blobs, line))
        _keep_reference(folder, revision or "main")
        return folder
    except ConfigError:
        raise
    except Exception as error:  # the library's own errors, and those of the HTTP client below it
        raise _refused(name, why(error)) from None
    finally:
        if line is not None:
            line.clear()


def wanted_files(siblings: Sequence[Any]) -> Iterator[RemoteFile]:
    """Yield those of a repository's files that the engine reads."""
    for sibling in siblings:
        name = sibling.rfilename
        if any(fnmatch(name, pattern) for pattern in WANTED) and not any(fnmatch(name, each) for each in NOT_WANTED):
            blob = sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id
            yield RemoteFile(name, sibling.size or 0, blob or "")


def why(error: Exception) -> str:
    """Return the reason of a failed download with its remedy, for an error of the hub's library."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in names:
        return "its owner asks for consent: accept the licence on the model's page, then set HF_TOKEN"
    if "RepositoryNotFoundError" in names:
        return "the hub has no such model, or it is private: check the name, or set HF_TOKEN"
    if "RevisionNotFoundError" in names:
        return "the model has no such revision"
    if "LocalTokenNotFoundError" in names:
        return "it needs a token: set HF_TOKEN"
    if isinstance(error, OSError) and error.errno == 28:
        return "the disk is full: free some space, or set HF_HOME to a folder on another disk"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the hub answered {status}: try again later"
    if "OfflineModeIsEnabled" in names:
        return f"HF_HUB_OFFLINE is set. {WITHOUT_NETWORK}"
    return f"{hub_endpoint()} cannot be reached ({type(error).__name__}). {WITHOUT_NETWORK}"


WITHOUT_NETWORK = (
    "Without a network: on another machine run 'hf download {}', copy its folder here and name that folder as MODEL; "
    "HF_ENDPOINT names a mirror; without MODEL the embedded model is served"
)


def _refused(name: str, reason: str) -> ConfigError:
    return ConfigError("model.path", f"{name} is not in the local cache and cannot be fetched: {reason.format(name)}")


def _check_files(name: str, files: Sequence[RemoteFile]) -> None:
    names = {file.name for file in files}
    for wanted in ("config.json", "tokenizer.json"):
        if wanted not in names:
            raise _refused(name, f"it has no {wanted}, so it cannot be served")
    if not any(file.endswith(".safetensors") for file in names):
        raise _refused(name, "it has no weights in safetensors: take another repository of this model")


def _check_space(name: str, files: Sequence[RemoteFile], blobs: Path) -> None:
    folder = blobs
    while not folder.exists():
        folder = folder.parent
    needed = sum(file.size for file in files) - num_bytes(files, blobs)
    free = shutil.disk_usage(folder).free
    if needed + SPARE_BYTES > free:
        raise _refused(
            name,
            f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free at {folder}: free some space, or set "
            "HF_HOME to a folder on another disk",
        )


def num_bytes(files: Sequence[RemoteFile], blobs: Path) -> int:
    """Return how many bytes of these files are in the cache, those of unfinished files included."""
    found = 0
    for file in files:
        if not file.blob:
            continue
        found += max((min(path.stat().st_size, file.size) for path in blobs.glob(f"{file.blob}*")), default=0)
    return found


def _with_progress(
    download: Callable[[], str], name: str, files: Sequence[RemoteFile], blobs: Path, line: LiveLine | None
) -> str:
    """Run `download` in a thread, showing how far it is. Raises what it raises."""
    result: list[str] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            result.append(download())
        except BaseException as error:
            failure.append(error)

    total = sum(file.size for file in files)
    at_first, begin = num_bytes(files, blobs), time.monotonic()
    thread = threading.Thread(target=work, daemon=True)  # Ctrl-C ends the process, whatever it waits for
    thread.start()
    while thread.is_alive():
        if line is not None:
            line.show(progress_text(name, num_bytes(files, blobs), total, at_first, time.monotonic() - begin))
        thread.join(POLL_S)
    if failure:
        raise failure[0]
    return result[0]


def progress_text(name: str, done: int, total: int, at_first: int, elapsed_s: float) -> str:
    """Return the progress for LiveLine, such as `fetching ORG/NAME: 0.40 of 1.50 GB, 21 MB/s, about 52 s left 26 %`,
    for LiveLine."""
    rate = (done - at_first) / elapsed_s if elapsed_s > 0 else 0.0
    left = f", {rate / 1e6:.0f} MB/s, about {duration((total - done) / rate)} left" if rate > 0 and total > done else ""
    share = 100 * done // total if total else 0
    return f"fetching {name}: {done / 1e9:.2f} of {total / 1e9:.2f} GB{left} {share} %"


def duration(seconds: float) -> str:
    """Return a duration for people: `52 s`, `3 min`, `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _keep_reference(folder: Path, revision: str) -> None:
    """Name the commit under its revision: the library does so only where it is asked for by that name."""
    reference = folder.parents[1] / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    if not reference.exists() or reference.read_text(encoding="ascii").strip() != folder.name:
        reference.write_text(folder.name, encoding="ascii")
