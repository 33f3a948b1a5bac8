"""Matrix products whose last bits do not depend on the number of threads.

A library divides a product among its threads as it chooses. If it splits the summed dimension, or selects another
kernel for the shape that each thread gets, the result depends on the number of threads: observed with MKL on large
float32 products, on one and two threads of one machine. So each product is cut into tiles that depend only on its
shape, and each tile is computed on one thread. The other operations of a run compute each element, or sum each row, on
one thread anyway.

`matmul` and `addmm_` are for our own code; `tiled_products` applies the same to all torch products, for transformers'
code, and `tiled_linears` to linears with gradients. This is active inside of
`quantforge.numerics.threads.reproducible`; outside, torch's own products are used.

torch computes float32 products with MKL, which is slower on AMD processors than oneDNN, which torch includes too (by a
fifth on one thread, see docs/results/speed-and-memory.md): there oneDNN computes the products whose layouts it
supports. It caches code and plans for each shape, 0.4 MB each, up to 1024 of them, and experts have varying numbers of
tokens: padding with rows of zeros keeps the number of shapes small, and changes no bit of the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantforge.numerics.function_mode import Function, FunctionMode
from quantforge.numerics.threads import ACTIVE_TEAMS, one_thread

LEAST = 1 << 27  # multiplications of a tile, a few milliseconds
SIDE = 256  # rows, or columns, of a tile
SETUP = 1 << 20  # multiplications from which oneDNN's call overhead pays off
# oneDNN is asked for multiples of so many rows: of the second up to the first.
ROWS, FEW_ROWS = 32, 8
TileTask = Callable[[], object]  # computes one tile
TilePlan = tuple[Tensor, list[TileTask]]  # the result, and what fills it


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``."""
    product: Tensor = _compute_tiled(torch.matmul, (a, b), {})
    return product


def addmm_(out: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1) -> None:
    """Add ``alpha * a @ b`` to ``out``; all are matrices."""
    _compute_tiled(torch.Tensor.addmm_, (out, a, b), {"alpha": alpha})


def tiled_products() -> AbstractContextManager[object]:
    """Compute every torch product of this thread as `matmul` does, inside of `reproducible`."""
    return _TiledProducts() if ACTIVE_TEAMS else nullcontext()


def _compute_on_threads(
    threads: int, function: Callable[..., Tensor], *args: Tensor | None
) -> Tensor:
    """Return a torch product computed on the given number of threads, inside of `reproducible`."""
    product: Tensor = _compute_tiled(function, args, {}, threads)
    return product


class _TiledProducts(FunctionMode):
    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return _compute_tiled(function, args, kwargs)


def _compute_tiled(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    threads: int | None = None,
) -> Any:
    cut, names = CUTS.get(func, (None, ()))
    tensors, options = [*args], dict(kwargs)
    for name in names[len(args) :]:
        if name not in options:
            break
        tensors.append(options.pop(name))
    if cut is None or not ACTIVE_TEAMS or not tensors or tensors[0].device.type != "cpu":
        return func(*args, **kwargs)
    if cut is not _addmm_:  # autocast leaves alone what is computed in place
        tensors = [*map(_cast, tensors)]
    # With a place for the result it is a tile itself, of a product of ours inside of `tiled_products`.
    plan = None if "out" in options else cut(*tensors, **options)
    threads = threads or torch.get_num_threads()
    if plan is None:
        if threads == 1:
            return func(*args, **kwargs)
        with one_thread():
            return func(*args, **kwargs)
    result, jobs = plan
    if threads == 1:
        for job in jobs:
            job()
    else:
        ACTIVE_TEAMS[-1].map("tiles", threads, 1, torch.no_grad()(lambda job: job()), jobs)
    return result


def _cast(value: Any) -> Any:
    """Cast an argument as autocast would: on worker threads autocast is not active, so this is done by hand."""
    if isinstance(value, Tensor) and value.is_floating_point() and torch.is_autocast_enabled("cpu"):
        return value.to(torch.get_autocast_dtype("cpu"))
    return value


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> TilePlan | None:
    if x.dim() < 2 or weight.dim() != 2:
        return None
    plan = _plan_product(x.flatten(0, -2), weight.T, bias=bias)
    return plan and (plan[0].view(*x.shape[:-1], len(weight)), plan[1])


def _matmul(a: Tensor, b: Tensor) -> TilePlan | None:
    if a.dim() >= 2 and b.dim() == 2:
        return _linear(a, b.T)
    if a.dim() < 3 or a.shape[:-2] != b.shape[:-2] or math.prod(a.shape) * b.shape[-1] < LEAST:
        return None
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    return out, [partial(torch.matmul, a[i], b[i], out=out[i]) for i in range(len(a))]


def _addmm(
    start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> TilePlan | None:
    return _plan_product(a, b, start.expand(len(a), b.shape[1]), beta=beta, alpha=alpha)


def _addmm_(
    start: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> TilePlan | None:
    return _plan_product(a, b, start, beta=beta, alpha=alpha, out=start)


def _plan_product(
    a: Tensor,
    b: Tensor,
    start: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    **factors: float,
) -> TilePlan | None:
    """Plan the matrix product ``a @ b``, added to ``start``, in tiles along the longer side of the result."""
    size = a.numel() * b.shape[1]
    use_onednn = start is None and size >= SETUP and _onednn_supports(a, b)
    tall = len(a) >= b.shape[1] or (use_onednn and not b.T.is_contiguous())
    length = len(a) if tall else b.shape[1]
    count = min(size // LEAST, length // SIDE)
    if count < 2:
        return (_onednn_linear(a, b, bias), []) if use_onednn else None
    if bias is not None and not use_onednn:
        start = bias.expand(len(a), b.shape[1])
    out = a.new_empty(len(a), b.shape[1]) if out is None else out
    jobs: list[TileTask] = []
    for first in range(0, length, step := -(-length // count)):
        run = slice(first, first + step)
        tile = (run, slice(None)) if tall else (slice(None), run)
        factor = (a[run], b) if tall else (a, b[:, run])
        if use_onednn:
            jobs.append(partial(_fill, out[tile], *factor, bias if bias is None else bias[tile[1]]))
        elif start is None:
            jobs.append(partial(torch.mm, *factor, out=out[tile]))
        else:
            jobs.append(partial(torch.addmm, start[tile], *factor, **factors, out=out[tile]))
    return out, jobs


@cache
def _onednn_is_faster() -> bool:
    """Return whether oneDNN is faster than MKL at float32 products, as on AMD processors."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return (
        "AMD" in capabilities.get("cpu_name", "")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _onednn_supports(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN supports the layouts of the factors without a copy."""
    return (
        _onednn_is_faster()
        and a.dtype == b.dtype == torch.float32
        and a.is_contiguous()
        and (b.is_contiguous() or b.T.is_contiguous())
    )


def _onednn_linear(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    rows = len(a)
    padding = -rows % (ROWS if rows > ROWS else FEW_ROWS)
    if rows > 1 and padding:  # a single one is computed in another way, and ends in other last bits
        a = functional.pad(a, (0, 0, 0, padding))
    with one_thread():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.T, bias, "none", [], "")
    return product[:rows]


def _fill(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    out.copy_(_onednn_linear(a, b, bias))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> TilePlan | None:
    """Plan attention separately for each row of the batch.

    The result is stored with tokens before heads, as the following projection reads it.
    """
    if query.dim() != 4 or len(query) < 2:
        return None
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)

    def fill(i: int) -> None:
        row = slice(i, i + 1)
        has_row_masks = attn_mask is not None and attn_mask.dim() == 4 and len(attn_mask) > 1
        mask = attn_mask[row] if attn_mask is not None and has_row_masks else attn_mask
        out[row] = functional.scaled_dot_product_attention(
            query[row], key[row], value[row], mask, **options
        )

    return out, [partial(fill, i) for i in range(batch)]


# For each product, the function that plans it, and torch's names of its tensor arguments.
CUTS: dict[Callable[..., Any], tuple[Callable[..., TilePlan | None], Sequence[str]]] = {
    functional.linear: (_linear, ("input", "weight", "bias")),
    functional.scaled_dot_product_attention: (_attention, ("query", "key", "value", "attn_mask")),
    torch.matmul: (_matmul, ("input", "other")),
    torch.Tensor.matmul: (_matmul, ("self", "other")),
    torch.mm: (_matmul, ("input", "mat2")),
    torch.Tensor.mm: (_matmul, ("self", "mat2")),
    torch.bmm: (_matmul, ("input", "mat2")),
    torch.Tensor.bmm: (_matmul, ("self", "mat2")),
    torch.addmm: (_addmm, ("input", "mat1", "mat2")),
    torch.Tensor.addmm_: (_addmm_, ("self", "mat1", "mat2")),
}


def tiled_linears(threads: int) -> AbstractContextManager[object]:
    """Compute linears with frozen weights, and the gradients of their inputs, on several threads.

    Everything else stays on this thread. Weights must not change before the backward pass.
    """
    return _TiledLinears(threads) if ACTIVE_TEAMS else nullcontext()


class _TiledLinears(FunctionMode):
    def __init__(self, threads: int) -> None:
        super().__init__()
        self._threads = threads

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if function is functional.linear and len(args) > 1 and args[0].requires_grad:
            x, weight, bias = (*args, *kwargs.values(), None)[:3]
            is_tileable = x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() > 1
            if is_tileable and not any(
                tensor is not None and tensor.requires_grad for tensor in (weight, bias)
            ):
                return _FrozenLinear.apply(x, weight, bias, self._threads)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)


class _FrozenLinear(torch.autograd.Function):
    """A linear without gradients for its weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, threads: int) -> Tensor:
        ctx.weight, ctx.threads = weight, threads
        return _compute_on_threads(threads, functional.linear, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (
            _compute_on_threads(ctx.threads, torch.matmul, *gradients, ctx.weight),
            None,
            None,
            None,
        )
