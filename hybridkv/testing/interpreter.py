"""Repairs of Triton's interpreter, so that `TRITON_INTERPRET=1` on a CPU means what a GPU would compute.

Versions 3.6 to 3.9 are alike in what is silently wrong:

    bf16 arithmetic, comparisons, reductions, scans, dots   work on the uint16 bit patterns
    fp32 -> bf16                                            truncates
    `stride: tl.int64`                                      is ignored; an int that fits becomes an int32
    int32 overflow, `tl.device_assert`                      are not looked at
    masks made from a scalar comparison                     are refused by 3.9
    loop bounds that are tensors                            warn in 3.6 (numpy deprecates what it does)

Upstream declined repairs (triton #11584, #11604, #4972). Not repaired: fp32 -> fp8, libdevice, inline assembly, the
single rounding of `tl.fma` before 3.9. The interpreter sums in numpy's order, runs one program after another and never
contracts a product and a sum.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interp

Handle: Any = interp.TensorHandle
Builder: Any = interp.InterpreterBuilder
Grid: Any = interp.GridExecutor
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Widen bf16 patterns (uint16). Exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, subnormals kept, to bf16 patterns (uint16)."""
    values = np.ascontiguousarray(values, np.float32).reshape(np.shape(values))
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16


def _up(handle: Any) -> Any:
    return Handle(bf16_to_fp32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _down(handle: Any) -> Any:
    return handle if handle.data.dtype == np.bool_ else Handle(fp32_to_bf16(handle.data), tl.bfloat16)


def _repair_casts() -> None:
    stock_cast, stock_fp_to_fp = Builder.cast_impl, Builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst: Any) -> Any:
        source, target = src.dtype.scalar, dst.scalar
        if source == target == tl.bfloat16:
            return src
        if source == tl.bfloat16:
            wide = _up(src)
            return wide if target == tl.float32 else stock_cast(self, wide, dst)
        if target == tl.bfloat16:
            return _down(src if source == tl.float32 else stock_cast(self, src, tl.float32))
        return stock_cast(self, src, dst)

    def create_fp_to_fp(self: Any, src: Any, dst: Any, mode: Any) -> Any:
        source, target = src.dtype.scalar, dst.scalar
        if tl.bfloat16 not in (source, target):
            return stock_fp_to_fp(self, src, dst, mode)
        if source.is_fp8():
            return cast_impl(self, stock_fp_to_fp(self, src, tl.float32, mode), dst)
        if target.is_fp8():
            return stock_fp_to_fp(self, cast_impl(self, src, tl.float32), dst, mode)
        return cast_impl(self, src, dst)

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp


def _repair_arithmetic() -> None:
    stock_binary, stock_unary = Builder.binary_op, Builder.unary_op
    stock_fma, stock_dot = Builder.create_fma, Builder.create_dot

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if op in _BITWISE or not (_is_bf16(lhs) or _is_bf16(rhs)):
            return stock_binary(self, lhs, rhs, op)
        return _down(stock_binary(self, _up(lhs), _up(rhs), op))

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return _down(stock_unary(self, _up(arg), op)) if _is_bf16(arg) else stock_unary(self, arg, op)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        out = stock_fma(self, _up(x), _up(y), _up(z))
        return _down(out) if _is_bf16(z) else out

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        return stock_dot(self, _up(a), _up(b), _up(acc), *rest)

    Builder.binary_op, Builder.unary_op = binary_op, unary_op
    Builder.create_fma, Builder.create_dot = create_fma, create_dot


def _in_fp32(stock: Any) -> Any:
    """Let a reduction or scan over bf16 work on fp32 values and round its result."""

    def retype(value: Any, handle: Any) -> Any:
        block = value.type.is_block()
        return tl.tensor(handle, tl.block_type(handle.dtype, list(value.shape)) if block else handle.dtype)

    def widen(value: Any) -> Any:
        return retype(value, _up(value.handle)) if _is_bf16(value.handle) else value

    def narrow(value: Any) -> Any:
        return retype(value, _down(value.handle)) if value.dtype.scalar == tl.float32 else value

    @functools.wraps(stock)
    def run(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        many = isinstance(x, (tuple, list))
        if not _is_bf16((x[0] if many else x).handle):
            return stock(self, x, *args, **kwargs)
        out = stock(self, type(x)(map(widen, x)) if many else widen(x), *args, **kwargs)
        return type(out)(map(narrow, out)) if isinstance(out, (tuple, list)) else narrow(out)

    return run


def _repair_reductions() -> None:
    for kind, names in (
        ("ReduceOps", "sum min_max generic_reduce"),
        ("ScanOps", "cumsum cumprod generic_scan"),
    ):
        owner = getattr(interp, kind)
        for name in names.split():
            setattr(owner, name, _in_fp32(getattr(owner, name)))


def _repair_masks() -> None:
    def as_mask(arg: Any) -> Any:
        is_int_mask = isinstance(arg, Handle) and arg.dtype.scalar in (tl.int1, tl.int8, tl.int32, tl.int64)
        return (
            Handle(arg.data.astype(np.bool_), tl.int1) if is_int_mask and arg.data.dtype != np.bool_ else arg
        )

    for name, place in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        stock = getattr(Builder, name)

        def call(self: Any, *args: Any, stock: Any = stock, place: int = place, **kwargs: Any) -> Any:
            return stock(self, *args[:place], as_mask(args[place]), *args[place + 1 :], **kwargs)

        setattr(Builder, name, call)


def _repair_index() -> None:
    stock = interp._patch_lang_tensor  # noqa: SLF001

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interp._patch_lang_tensor = patch_lang_tensor  # noqa: SLF001


def _with_room(run: Any, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


# CPython keeps frames in chunks of 16 KiB. A loop whose calls cross a chunk's end maps and unmaps memory at every one,
# a third of a launch's time at an unlucky depth. A frame of 256 KiB opens a chunk of 512, which no kernel fills.
_with_room.__code__ = _with_room.__code__.replace(co_stacksize=1 << 15)


def _repair_launch() -> None:
    """Honour `tl.int64` annotations, and let floats overflow without a word, as a GPU does."""
    stock = Grid.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        annotations = inspect.get_annotations(self.fn)
        wide = {n for n in self.arg_names if str(annotations.get(n)).split(".")[-1] in ("int64", "i64")}

        def widen(name: str, value: Any) -> Any:
            if name not in wide or type(value) is not int:
                return value
            return tl.tensor(Handle(np.array([value], np.int64), tl.int64), tl.int64)

        args = tuple(widen(n, v) for n, v in zip(self.arg_names, args, strict=False))
        with np.errstate(all="ignore"):
            return _with_room(stock, self, *args, **{n: widen(n, v) for n, v in kwargs.items()})

    Grid.__call__ = call


def _patch_once_a_launch() -> None:
    """Stock patches `triton.language` again at every call of a device function: half of the time of a small kernel."""
    stock = interp._patch_lang  # noqa: SLF001
    scopes: list[Any] = []
    patched: set[int] = set()

    def finish(restore_first: Any) -> None:
        for scope in reversed(scopes[1:]):
            scope.restore()
        restore_first()
        scopes.clear()
        patched.clear()

    def patch_lang(fn: Any) -> Any:
        languages = {id(m) for m in fn.__globals__.values() if m is tl or m is tl.core}
        if scopes and languages <= patched:
            return scopes[0]
        scope = stock(fn)
        if not hasattr(scope, "restore"):
            return scope
        if not scopes:
            scope.restore = functools.partial(finish, scope.restore)
        scopes.append(scope)
        patched.update(languages)
        return scope

    interp._patch_lang = patch_lang  # noqa: SLF001


def _check_overflow_in_numpy() -> None:
    """Stock looks for overflow by ten more operations of the language: a third of the time of a kernel."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        scalar = lhs.type.scalar
        if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        out = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        low, high = scalar.get_int_min_value(), scalar.get_int_max_value()
        if out.size and not (low <= out.min() and out.max() <= high):
            raise AssertionError(
                f"int{scalar.int_bitwidth} overflow detected for operation {binary_op.__name__}"
            )

    interp.TritonSemantic.binary_op_sanitize_overflow_impl = check  # pyright: ignore[reportAttributeAccessIssue]


def _remember_types() -> None:
    """Stock builds a table of types at every constant, and lists of constants at every value: another third."""
    language: Any = tl.core
    block_type = tl.block_type
    stock_np_dtype, stock_unwrap = interp._get_np_dtype, language._unwrap_if_constexpr  # noqa: SLF001
    stock_equal, stock_equal_tuples, stock_block = tl.dtype.__eq__, language.tuple.__eq__, block_type.__init__
    nested = (list, tuple, language.tuple)
    np_dtypes: dict[str, Any] = {}
    values: dict[tuple[int, ...], tuple[Any, Any]] = {}
    blocks: dict[tuple[str, tuple[int, ...]], tuple[Any, int, str]] = {}

    def np_dtype(kind: Any) -> Any:
        found = np_dtypes.get(kind.name)
        if found is None:
            found = np_dtypes[kind.name] = stock_np_dtype(kind)
        return found

    def unwrap(value: Any) -> Any:
        if isinstance(value, nested):
            return stock_unwrap(value)
        return value.value if isinstance(value, language.constexpr) else value

    def equal(self: Any, other: Any) -> bool:
        return self is other or stock_equal(self, other)

    def equal_tuples(self: Any, other: Any) -> Any:
        them = other.values if isinstance(other, language.tuple) else other
        if not isinstance(them, (list, tuple)) or any(isinstance(v, nested) for v in them):
            return stock_equal_tuples(self, other)
        return language.constexpr(self.values == [unwrap(v) for v in them])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([unwrap(n) for n in shape])
        found = blocks.get(key)
        if found is None:
            stock_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    def init_value(self: Any, handle: Any, type: Any) -> None:  # noqa: A002
        sizes = tuple(type.shape) if type.is_block() else ()
        found = values.get(sizes)
        if found is None:
            constants = [language.constexpr(n) for n in sizes]
            found = values[sizes] = language.constexpr(math.prod(sizes)), language.tuple(constants)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found

    interp._get_np_dtype, language._unwrap_if_constexpr = np_dtype, unwrap  # noqa: SLF001
    tl.dtype.__eq__, block_type.__init__, tl.tensor.__init__ = equal, init_block, init_value
    language.tuple.__eq__ = equal_tuples


def install() -> None:
    """Repair the interpreter of this process, before kernels run. Calling it again does nothing."""
    if getattr(Builder, "repaired_by_hybridkv", False):
        return
    Builder.repaired_by_hybridkv = True
    _repair_casts()
    _repair_arithmetic()
    _repair_reductions()
    _repair_masks()
    _repair_index()
    _repair_launch()
    _patch_once_a_launch()
    _check_overflow_in_numpy()
    _remember_types()
    interp.interpreter_builder.options = interp.InterpreterOptions(debug=True)  # overflow and device asserts
