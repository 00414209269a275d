"""Makes Triton's interpreter do the same in a fraction of the time.

It computes with numpy, program by program. Most of its time goes into what is the same each time: the list of the
functions to replace, numpy's types, shapes. They are kept here. What it computes is unchanged.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hasten() -> None:
    """Put what is below into the interpreter; once is enough."""
    interpreter._patch_lang = _patch_languages
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _numpy_type
    tl.core.tensor.__init__ = _make_tensor  # type: ignore[method-assign]
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow  # type: ignore[method-assign]


_original_patch = interpreter._patch_lang
_replaced: set[str] = set()  # the modules whose functions are replaced now


class _Scope(interpreter._LangPatchScope):
    """Puts the functions back, when the kernel that had them replaced has ended."""

    def restore(self) -> None:
        if self._changes:
            _replaced.clear()
        super().restore()


@functools.cache
def _languages_of(function: Callable[..., Any]) -> frozenset[str]:
    modules = (value for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(module.__name__ for module in modules if module in (tl, tl.core))


def _patch_languages(function: Callable[..., Any]) -> _Scope:
    """Replace the functions that a kernel sees; those that it calls find them replaced, and need not do it again."""
    scope = _Scope()
    languages = _languages_of(function)
    if not languages <= _replaced:
        scope._changes = _original_patch(function)._changes
        _replaced.update(languages)
    return scope


@functools.cache
def _builtins_of(package: types.ModuleType | type) -> list[tuple[str, Callable[..., Any]]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins_of(package):
        interpreter._patch_attr(package, name, member, builder, scope)


_original_numpy_type = interpreter._get_np_dtype
_numpy_types: dict[str, np.dtype[Any]] = {}


def _numpy_type(dtype: Any) -> np.dtype[Any]:
    if isinstance(dtype, tl.block_type):
        dtype = dtype.element_ty
    found = _numpy_types.get(dtype.name)
    if found is None:
        found = _numpy_types[dtype.name] = _original_numpy_type(dtype)
    return found


@functools.cache
def _shape_and_size(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.core.tuple([tl.core.constexpr(size) for size in shape]), tl.core.constexpr(int(np.prod(shape, dtype=int)))


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _shape_and_size(type.shape if type.is_block() else ())


def _check_overflow(self: Any, one: Any, other: Any, operation: Callable[..., Any]) -> None:
    """Check nothing: what the original computes is asserted with TRITON_DEBUG only, and thrown away otherwise."""
