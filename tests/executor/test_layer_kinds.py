"""A model cut down to its kinds of layers launches what the whole one does, and is whole again afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from inferengine.executor.cuda_graphs import GraphCapture
from inferengine.executor.warm_up import scratch_plan
from inferengine.kernels import ops
from inferengine.kernels.reference import ops as reference_fused
from inferengine.layers.linear import Linear
from inferengine.models.layer_kinds import covering, kind, one_layer_of_each_kind
from tests.executor.engine import Engine
from tests.models.checkpoints import SHAPES, make_model, model_of, save

S, F = "sliding_attention", "full_attention"
GEMMA4 = {
    **SHAPES, "num_hidden_layers": 10, "sliding_window": 12, "global_head_dim": 16, "num_kv_shared_layers": 4,
    "layer_types": [S, S, F] * 3 + [F], "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 301,
}  # fmt: skip
# name of a checkpoint -> (its changes, the layers that are kept)
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "llama": ({"num_hidden_layers": 8}, [0, 1, 7]),  # the last hands no norm on
    "qwen3": ({"num_hidden_layers": 8}, [0, 1, 7]),
    "qwen2-mixed-window": ({"num_hidden_layers": 8, "max_window_layers": 3}, [0, 1, 3, 4, 7]),
    "mistral-window": ({"num_hidden_layers": 8}, [0, 1, 7]),
    "gemma3": ({"num_hidden_layers": 10, "layer_types": [S, S, F] * 3 + [S]}, [0, 1, 2, 3, 8, 9]),
    "gemma4": (GEMMA4, [0, 1, 2, 3, 5, 6, 7, 8, 9]),  # layers 6 to 9 read the keys of layers before them
    "gpt2": ({"n_layer": 6}, [0, 1]),
}


def engine(tmp_path: Path, name: str, **options: Any) -> Engine:
    changes = CASES[name][0]
    model = model_of("Gemma4TextConfig", changes) if name == "gemma4" else make_model(name, **changes)
    return Engine(save(model, tmp_path / name), **options)


class Calls:
    """Every call of an ops table: its name, and its operands but for their numbers."""

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def table(self, base: ops.Ops) -> ops.Ops:
        functions = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        return dataclasses.replace(
            base, **{name: self._watched(name, function) for name, function in functions.items() if callable(function)}
        )

    def _watched(self, name: str, function: Any) -> Any:
        def watched(*operands: Any, **options: Any) -> Any:
            self.seen.add((name, *(_shape(operand) for operand in (*operands, *options.values()))))
            return function(*operands, **options)

        return watched


def _shape(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return operand.dtype, tuple(operand.shape)
    return operand if isinstance(operand, (bool, int, str)) else type(operand)


@pytest.mark.parametrize("name", CASES)
def test_the_layers_kept_call_what_all_layers_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = Calls()
    base = dataclasses.replace(ops.REFERENCE, linear_add_norm=reference_fused.linear_add_norm)
    monkeypatch.setattr(ops, "REFERENCE", calls.table(base))
    executor = engine(tmp_path, name).executor
    groups = len(executor.kv.groups)
    plans = [scratch_plan(4, groups, decodes=decodes, chunk=chunk) for decodes, chunk in ((0, 2), (0, 16), (3, 2))]

    def called() -> set[Any]:
        calls.seen.clear()
        for plan in plans:
            executor.execute(plan).result()
        return set(calls.seen)

    whole = called()
    with one_layer_of_each_kind(executor.model):
        cut = called()
    assert cut == whole
    assert {call[0] for call in whole} >= {"attention_qkv", "linear"}


@pytest.mark.parametrize("name", CASES)
def test_the_first_layers_of_each_pair_of_kinds_are_kept(tmp_path: Path, name: str) -> None:
    model = engine(tmp_path, name).executor.model
    layers = list(model.layers)
    with one_layer_of_each_kind(model):
        assert [layers.index(layer) for layer in model.layers] == CASES[name][1]


@pytest.mark.parametrize("name", CASES)
def test_a_model_is_whole_again_after_a_failure(tmp_path: Path, name: str) -> None:
    model = engine(tmp_path, name).executor.model
    whole, places = model.layers, [place for place, _ in model.named_modules()]
    seen: list[int] = []

    def fail() -> None:
        with one_layer_of_each_kind(model):
            seen.append(len(model.layers))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen[0] < len(whole)
    assert model.layers is whole
    assert [place for place, _ in model.named_modules()] == places


def test_tokens_are_the_same_after_a_model_was_cut(tmp_path: Path) -> None:
    ours = engine(tmp_path, "llama")
    before = ours.generate([[5, 6, 7]], max_tokens=8)
    with one_layer_of_each_kind(ours.executor.model):
        pass
    assert ours.generate([[5, 6, 7]], max_tokens=8) == before


SHAPE = (48, 88)  # of `down`


def _other_type(linear: Linear) -> None:
    linear.packed = torch.empty(SHAPE, dtype=torch.float64)


def _other_shape(linear: Linear) -> None:
    linear.packed = torch.empty(SHAPE[0] - 1, SHAPE[1])


def _other_strides(linear: Linear) -> None:
    linear.packed = torch.empty(SHAPE[1], SHAPE[0]).t()


def _other_alignment(linear: Linear) -> None:
    linear.packed = torch.empty(SHAPE[0] * SHAPE[1] + 1)[1:].view(SHAPE)


def _other_class(linear: Linear) -> None:
    linear.packed = (torch.empty(SHAPE), None)


def _with_bias(linear: Linear) -> None:
    linear.offset = torch.empty(SHAPE[0])


@pytest.mark.parametrize(
    "change", [_other_type, _other_shape, _other_strides, _other_alignment, _other_class, _with_bias]
)
def test_a_layer_with_other_weights_is_kept_with_both_its_neighbours(tmp_path: Path, change: Any) -> None:
    model = engine(tmp_path, "llama").executor.model
    layers = list(model.layers)
    for layer in layers:
        layer.mlp.down.packed = torch.empty(SHAPE)  # the layout of a CUDA device
    change(layers[4].mlp.down)
    with one_layer_of_each_kind(model):
        assert [layers.index(layer) for layer in model.layers] == [0, 1, 4, 5, 7]


def test_scales_of_the_cache_and_tables_of_adapters_make_no_kind(tmp_path: Path) -> None:
    model = engine(tmp_path, "llama").executor.model
    first, second = model.layers[1], model.layers[2]
    second.attention.kv_scales = (0.5, 0.25)
    second.mlp.down.ops = dataclasses.replace(second.mlp.down.ops, linear=lambda *operands: None)
    assert kind(first) == kind(second)


def test_numbers_of_equal_value_are_of_one_kind() -> None:
    first, second = int("1000"), int("1000")  # two objects
    assert first is not second
    assert kind(first) == kind(second) != kind(1001)


def test_an_object_of_which_nothing_is_known_equals_only_itself() -> None:
    known, other = object(), object()
    assert kind(known) == kind(known) != kind(other)


def test_neighbours_of_the_kept_are_the_neighbours_of_all() -> None:
    draw = random.Random(0)
    for _ in range(500):
        kinds = [draw.choice("ABC") for _ in range(draw.randint(0, 12))]
        indices = covering(kinds)
        kept = [kinds[index] for index in indices]
        assert set(pairwise(kinds)) <= set(pairwise(kept))
        assert kept[:1] == kinds[:1]
        assert kept[-1:] == kinds[-1:]
        assert indices == sorted(set(indices))


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph: knows whether it is captured now."""

    capturing = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        FakeGraph.capturing = True

    def capture_end(self) -> None:
        FakeGraph.capturing = False


class FakeStream:
    def wait_stream(self, stream: object) -> None:
        """Do nothing: there is only one."""


def test_a_captured_step_runs_through_one_layer_of_each_kind_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine(tmp_path, "llama").executor.model
    for name, value in {
        "CUDAGraph": FakeGraph,
        "Stream": lambda device: FakeStream(),
        "current_stream": FakeStream,
        "stream": contextlib.nullcontext,
        "graph_pool_handle": object,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    runs = []

    def compute() -> int:
        runs.append((FakeGraph.capturing, len(model.layers)))
        return len(model.layers)

    _, num_layers = GraphCapture(model, torch.device("cpu")).capture(compute)
    assert runs == [(False, 3), (True, 8)]
    assert num_layers == 8
    assert not FakeGraph.capturing
