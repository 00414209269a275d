"""Makes Triton's interpreter do the same in a fraction of the time.

It computes with numpy, program by program. Most of its time goes into what is the same each time: the list of the
functions to replace, numpy's types, shapes, constants, whether two operands have one type. It is kept here. What the
interpreter computes is unchanged.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hasten() -> None:
    """Put what is below into the interpreter; once is enough."""
    interpreter._patch_lang = _patch_languages
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _numpy_type
    interpreter._patch_attr = _patch_attribute
    tl.core._unwrap_if_constexpr = _unwrap
    tl.core.tensor.__init__ = _make_tensor  # type: ignore[method-assign]
    tl.core.dtype.__eq__ = _is_same_type  # type: ignore[method-assign]
    tl.core.block_type.__init__ = _make_block_type  # type: ignore[method-assign]
    tl.core.block_type.name = property(_block_name)  # type: ignore[assignment,method-assign]
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow  # type: ignore[method-assign]
    TritonSemantic.binary_op_type_checking_impl = _check_operands  # type: ignore[method-assign]
    TritonSemantic.computation_type_impl = _computation_type  # type: ignore[method-assign]
    TritonSemantic.broadcast_impl_value = _broadcast  # type: ignore[method-assign]


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
def _interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
    inner = inspect.unwrap(member)  # what wraps it asks only whether it is called for a compiler or an interpreter

    def call(*args: Any, **named: Any) -> Any:
        named["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **named)

    return call


def _patch_attribute(package: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """Replace a function of the language by one that calls it for the interpreter."""
    scope.set_attr(package, name, _interpreted(member))


class _Shape(NamedTuple):
    """What types and tensors keep of one shape."""

    of_type: Any
    of_tensor: Any
    num_elements: int
    size: Any


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> _Shape:
    number = validate_block_shape(sizes)
    kept = tl.core.tuple(sizes), tl.core.tuple([tl.core.constexpr(size) for size in sizes])
    return _Shape(*kept, number, tl.core.constexpr(number))


_SCALAR = (tl.core.tuple([]), tl.core.constexpr(1))


def _make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = shape.values if type(shape) is tl.core.tuple else shape
    if not (type(sizes) in (list, tuple) and sizes and all(type(size) is int for size in sizes)):
        sizes = tl.core._unwrap_shape(shape)
        if not sizes:
            raise TypeError("0d block_type is forbidden")
    kept = _shape_of(tuple(sizes))
    self.element_ty = element_ty
    self.shape = kept.of_type
    self.numel = kept.num_elements
    self.kept = kept


def _block_name(self: Any) -> str:
    return f"<{self.shape}, {self.element_ty}>"


_original_unwrap = tl.core._unwrap_if_constexpr
_PLAIN = frozenset((tl.core.tensor, tl.core.dtype, int, float, bool))


def _unwrap(value: Any) -> Any:
    return value if type(value) in _PLAIN else _original_unwrap(value)


_original_equality = tl.core.dtype.__eq__


def _is_same_type(self: Any, other: object) -> bool:
    return self is other or _original_equality(self, other)


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    if type.is_block():
        self.dtype = type.element_ty
        self.shape, self.numel = type.kept.of_tensor, type.kept.size
    else:
        self.dtype = type.scalar
        self.shape, self.numel = _SCALAR


_original_check = TritonSemantic.binary_op_type_checking_impl
_constants: dict[tuple[Any, ...], Any] = {}  # the tensors of numbers in a program's text
MOST_CONSTANTS, MOST_ELEMENTS = 1000, 8192


def _check_operands(
    self: Any, one: Any, other: Any, one_may_point: bool = False, other_may_point: bool = False,
    is_arithmetic: bool = True, divides: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Give both operands one type and one shape. Tensors of one type have it, unless they are divided."""
    key = None
    if type(one) is tl.core.tensor and not one.dtype.is_ptr() and is_arithmetic:
        if type(other) is tl.core.tensor:
            if one.dtype is other.dtype and not divides:
                return _broadcast(self, one, other)
        elif type(other) is int or (type(other) is float and other != 0.0):  # 0.0 and -0.0 would be one key
            key = type(other), other, one.dtype.name, id(one.shape), divides  # each shape is kept once, and for good
            constant = _constants.get(key)
            if constant is not None:
                return one, constant
    found = _original_check(self, one, other, one_may_point, other_may_point, is_arithmetic, divides)
    if key is not None and found[0] is one and one.numel.value <= MOST_ELEMENTS:
        if len(_constants) >= MOST_CONSTANTS:
            _constants.clear()
        _constants[key] = found[1]
    return found


_computation_type = functools.cache(TritonSemantic.computation_type_impl)
_original_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """Give both operands one shape. Most have it already; each shape is kept once, and is one object."""
    if one.shape is other.shape:
        return one, other
    if not one.type.is_block():
        return _splat(self, one, other.type), other
    if not other.type.is_block():
        return one, _splat(self, other, one.type)
    sizes = _common_sizes(tuple(one.type.shape.values), tuple(other.type.shape.values))
    if sizes is None:
        return _original_broadcast(self, one, other)
    return _widen(self, one, sizes), _widen(self, other, sizes)


def _splat(self: Any, scalar: Any, block: Any) -> Any:
    made = tl.block_type(scalar.dtype, block.shape)
    return tl.core.tensor(self.builder.create_splat(made, scalar.handle), made)


def _widen(self: Any, block: Any, sizes: tuple[int, ...]) -> Any:
    made = tl.block_type(block.dtype, sizes)
    if made.kept is block.type.kept:
        return block
    return tl.core.tensor(self.builder.create_broadcast(block.handle, sizes), made)


@functools.cache
def _common_sizes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """None: the ranks differ, or sizes do not fit each other; the original then adds axes, or says what is wrong."""
    if len(one) != len(other) or any(a != b and 1 not in (a, b) for a, b in zip(one, other, strict=True)):
        return None
    return tuple(map(max, one, other))


def _check_overflow(self: Any, one: Any, other: Any, operation: Callable[..., Any]) -> None:
    """Check nothing: what the original computes is asserted with TRITON_DEBUG only, and thrown away otherwise."""
