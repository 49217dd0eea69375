"""The interpreter guard: what a launch does to memory, checked lane by lane on a CPU.

`install()` repairs the interpreter (`hybridkv.testing.interpreter`). Inside `with guard():` every launch is checked:

    bounds      every active lane falls inside the tensor that its pointer was derived from, and is aligned
    hazards     no byte is stored by two programs, or stored by one and loaded by another, except by atomics:
                a GPU runs programs in any order
    order       programs run 0..n-1, reversed, or shuffled

It does not see a race inside one program, nor speed.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import triton.runtime.interpreter as interp

from hybridkv.testing.interpreter import Builder, Grid, Handle, install

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HazardError", "MisalignedError", "OutOfBoundsError", "guard", "install"]

Order = Literal["forward", "reverse", "shuffle"]
_POINTER_OPS = ["addptr", "splat", "broadcast", "expand_dims", "reshape", "trans", "bitcast"]
_ACCESSES = {  # places of the pointers and of the mask among the arguments
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic", 1, 3),
    "create_atomic_cas": ("atomic", 0, None),
}
_BLOCK_BITS = 16  # accesses are recorded in blocks of 64 KiB, made when first touched
_SEVERAL = -1  # readers of a byte; 0 is nobody, n is program n - 1


class OutOfBoundsError(AssertionError):
    """A lane addressed memory outside the tensor that its pointer came from."""


class MisalignedError(AssertionError):
    """A lane's address is not a multiple of its size."""


class HazardError(AssertionError):
    """Two programs of one launch touched the same byte, and at least one stored it."""


class Span(NamedTuple):
    """Addresses [low, high) of one tensor argument."""

    low: int
    high: int
    name: str


def _span(tensor: Any, name: str, *, views: bool) -> Span:
    if not views:
        storage = tensor.untyped_storage()
        return Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name)
    last = (
        sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    )
    return Span(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size(), name)


class Launch:
    """What one launch may touch, and per byte which program stored or loaded it."""

    def __init__(self, named: dict[str, Any], *, views: bool, hazards: bool) -> None:
        tensors = {n: v for n, v in named.items() if hasattr(v, "data_ptr")}
        self.spans = [_span(interp._unwrap_tensor(v), n, views=views) for n, v in tensors.items()]  # noqa: SLF001
        self.views = views
        self.hazards = hazards
        self.blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.program = 0

    def home_of(self, tensor: Any) -> Span:
        """Name the addresses of an argument as it reaches the kernel."""
        name = next((s.name for s in self.spans if s.low == tensor.data_ptr()), "an argument")
        return _span(interp._unwrap_tensor(tensor), name, views=self.views)  # noqa: SLF001

    def check(self, kind: str, pointers: Any, mask: Any, size: int) -> None:
        """Check the active lanes of one access of `size` bytes a lane, and record them."""
        at = np.asarray(pointers.data, np.uint64)
        if mask is not None:
            at = at[np.broadcast_to(np.asarray(mask.data, bool), at.shape)]
        at = at.ravel()
        if not at.size:
            return
        home = pointers.attr.get("home")
        spans = [home] if home else self.spans
        inside = np.zeros(at.shape, bool)
        for span in spans:
            inside |= (at >= np.uint64(span.low)) & (at + np.uint64(size) <= np.uint64(max(span.high, 0)))
        if not inside.all():
            first, names = int(at[~inside][0]), ", ".join(s.name for s in spans)
            where = f"{first - spans[0].low} B from the start of {spans[0].name}, {spans[0].high - spans[0].low} B long"
            raise OutOfBoundsError(
                f"{kind} of {size} B: {(~inside).sum()} of {at.size} lanes outside {names}; the first is {where}"
            )
        if (at % np.uint64(size)).any():
            raise MisalignedError(f"{kind} of {size} B at an address that is not a multiple of {size}")
        if self.hazards and kind != "atomic":
            self._record(kind, at, size)

    def _record(self, kind: str, at: np.ndarray, size: int) -> None:
        lanes = (at[:, None] + np.arange(size, dtype=np.uint64)).ravel()
        block = lanes >> np.uint64(_BLOCK_BITS)
        low, high = int(block.min()), int(block.max())
        for b in [low] if low == high else np.unique(block).tolist():
            part = lanes if low == high else lanes[block == b]
            self._record_block(kind, int(b), (part & np.uint64((1 << _BLOCK_BITS) - 1)).astype(np.int64))

    def _record_block(self, kind: str, block: int, at: np.ndarray) -> None:
        if block not in self.blocks:
            self.blocks[block] = np.zeros(1 << _BLOCK_BITS, np.int32), np.zeros(1 << _BLOCK_BITS, np.int32)
        stored, loaded = self.blocks[block]
        me, writer, reader = self.program + 1, stored[at], loaded[at]
        foreign = (writer != 0) & (writer != me)
        if foreign.any():
            other = writer[foreign][0] - 1
            raise HazardError(f"program {self.program} {kind}s a byte that program {other} stored")
        if kind == "load":
            loaded[at] = np.where((reader == 0) | (reader == me), me, _SEVERAL)
        elif ((reader != 0) & (reader != me)).any():
            raise HazardError(f"program {self.program} stores a byte that another program loaded")
        else:
            stored[at] = me


class Guard:
    """The patches of one `guard()` block."""

    def __init__(self, *, order: Order, views: bool, hazards: bool, seed: int) -> None:
        self.order, self.views, self.hazards, self.seed = order, views, hazards, seed
        self.launch: Launch | None = None
        self.permutation: list[int] = []

    def access(self, name: str, stock: Any) -> Any:
        """Wrap a load, store or atomic."""
        kind, pointer_place, mask_place = _ACCESSES[name]

        def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
            if self.launch is not None:
                pointers = args[pointer_place]
                size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                self.launch.check(kind, pointers, None if mask_place is None else args[mask_place], size)
            return stock(builder, *args, **kwargs)

        return call

    def derive(self, stock: Any) -> Any:
        """Wrap pointer arithmetic: the result belongs to the tensor that its operand belongs to."""

        def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
            out = stock(builder, *args, **kwargs)
            for arg in args:
                if isinstance(arg, Handle) and "home" in arg.attr:
                    out.attr["home"] = arg.attr["home"]
            return out

        return call

    def convert(self, stock: Any) -> Any:
        """Wrap the conversion of an argument: a tensor becomes a pointer that knows where it belongs."""

        def call(arg: Any) -> Any:
            out = stock(arg)
            if self.launch is not None and hasattr(arg, "data_ptr") and isinstance(out.handle, Handle):
                out.handle.attr["home"] = self.launch.home_of(arg)
            return out

        return call

    def set_grid_dim(self, stock: Any) -> Any:
        """Wrap the start of a launch: draw the order of its programs."""

        def call(builder: Any, nx: int, ny: int, nz: int) -> None:
            stock(builder, nx, ny, nz)
            self.permutation = list(range(nx * ny * nz))
            if self.order == "reverse":
                self.permutation.reverse()
            elif self.order == "shuffle":
                random.Random(self.seed).shuffle(self.permutation)

        return call

    def set_grid_idx(self, stock: Any) -> Any:
        """Wrap the start of a program: run another one in its place."""

        def call(builder: Any, x: int, y: int, z: int) -> None:
            _, ny, nz = builder.grid_dim
            program = self.permutation[(x * ny + y) * nz + z]
            if self.launch is not None:
                self.launch.program = program
            x, rest = divmod(program, ny * nz)
            stock(builder, x, *divmod(rest, nz))

        return call

    def run(self, stock: Any) -> Any:
        """Wrap a launch."""

        def call(grid: Any, *args: Any, **kwargs: Any) -> Any:
            named = dict(zip(grid.arg_names, args, strict=False)) | kwargs
            self.launch = Launch(named, views=self.views, hazards=self.hazards)
            try:
                return stock(grid, *args, **kwargs)
            except interp.InterpreterError as error:
                cause: BaseException | None = error
                while isinstance(cause, interp.InterpreterError):  # one for every device function on the way
                    cause = cause.__cause__
                if isinstance(cause, AssertionError):  # ours, or the kernel's own
                    raise cause from None
                raise
            finally:
                self.launch = None

        return call


@contextlib.contextmanager
def guard(
    *, order: Order = "forward", views: bool = True, hazards: bool = True, seed: int = 0
) -> Iterator[None]:
    """Check every launch made inside the block; kernels must reach memory through tensor arguments only.

    Args:
        order: in which order programs run; "shuffle" is drawn from `seed`.
        views: lanes must stay inside the view that was passed, not only inside its storage.
        hazards: also look for bytes that two programs touch. Slower.
    """
    if order not in ("forward", "reverse", "shuffle"):
        raise ValueError(f"order must be forward, reverse or shuffle, got {order!r}")
    install()
    g = Guard(order=order, views=views, hazards=hazards, seed=seed)
    pointer_ops = [f"create_{n}" for n in _POINTER_OPS if hasattr(Builder, f"create_{n}")]
    patches = [(Builder, n, g.access(n, getattr(Builder, n))) for n in _ACCESSES]
    patches += [(Builder, n, g.derive(getattr(Builder, n))) for n in pointer_ops]
    patches += [
        (Builder, "set_grid_dim", g.set_grid_dim(Builder.set_grid_dim)),
        (Builder, "set_grid_idx", g.set_grid_idx(Builder.set_grid_idx)),
        (Grid, "__call__", g.run(Grid.__call__)),
        (interp, "_implicit_cvt", g.convert(interp._implicit_cvt)),  # noqa: SLF001
    ]
    stock = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, patched in patches:
        setattr(owner, name, patched)
    try:
        yield
    finally:
        for owner, name, original in stock:
            setattr(owner, name, original)
