"""What sentence-transformers' files beside a checkpoint say of its embeddings: how states are pooled, and which layers
the pooled state passes (EmbeddingGemma has two)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from inferengine.errors import ConfigError

POOLED = {  # by what 1_Pooling/config.json calls it: a key that is true, or since version 5.4 a value of one key
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
AROUND = ("Transformer", "Normalize", "LogitScore")  # whose files say nothing that is needed
ACTIVATIONS = {"torch.nn.modules.linear.Identity": "", "torch.nn.modules.activation.Tanh": "tanh"}


class DenseModule(NamedTuple):
    """A linear layer behind the pooling. `folder` has its model.safetensors; `activation` is tanh, or empty: none."""

    folder: Path
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


class EmbeddingModules(NamedTuple):
    """`pooling`: last, mean or cls; None: the files do not say. `dense`: in their order."""

    pooling: str | None = None
    dense: tuple[DenseModule, ...] = ()


def read_embedding_modules(folder: Path) -> EmbeddingModules:
    """Read modules.json and the files of its modules. Raises ConfigError for what is not computed."""
    listed, place = folder / "modules.json", folder / "1_Pooling" / "config.json"
    dense: list[DenseModule] = []
    seen: list[str] = []
    try:
        for module in json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else ():
            kind, path = str(module["type"]).rpartition(".")[2], Path(str(module["path"]))
            is_beside = path.name == str(path)  # no other folder is read
            if kind == "Pooling" and is_beside:
                place = folder / path / "config.json"
            elif kind == "Dense" and is_beside and "Pooling" in seen and "Normalize" not in seen:
                dense.append(_dense(folder / path))
            elif kind not in (*AROUND, "Pooling"):
                raise _not_pooled(f"modules.json has a module {kind} that is not computed")
            seen.append(kind)
        is_said = "Pooling" in seen or place.is_file()
        modes = _modes(json.loads(place.read_text(encoding="utf-8"))) if is_said else []
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise _not_pooled(f"modules.json, or a file that it names, cannot be read ({type(error).__name__})") from None
    if len(modes) > 1 or (modes and modes[0] not in POOLED):
        raise _not_pooled(f"1_Pooling/config.json asks for {', '.join(modes)}, which is not computed")
    return EmbeddingModules(POOLED[modes[0]] if modes else None, tuple(dense))


def _modes(values: dict[str, Any]) -> list[str]:
    """Return the names of all poolings that 1_Pooling/config.json asks for; the mean is what it need not say."""
    newer = values.get("pooling_mode")
    if newer is not None:
        return [str(name) for name in (newer if isinstance(newer, list) else [newer])]
    return [name for name, is_on in values.items() if name.startswith("pooling_mode_") and is_on is True] or ["mean"]


def _dense(folder: Path) -> DenseModule:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    sizes = values["in_features"], values["out_features"]
    for name in ("module_input_name", "module_output_name"):
        if values.get(name) not in (None, "sentence_embedding"):
            raise _not_pooled(f"{folder.name}/config.json has {name} = {values[name]}, which is not computed")
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError("a size that is no whole number")
    name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh"))  # sentence-transformers' default
    if name not in ACTIVATIONS:
        raise _not_pooled(f"{folder.name}/config.json asks for {name}, which is not computed")
    return DenseModule(folder, *sizes, has_bias=values.get("bias", True) is not False, activation=ACTIVATIONS[name])


def _not_pooled(what: str) -> ConfigError:
    return ConfigError("model.pooling", f"{what}: set it to last, mean or cls to serve the model without that")
