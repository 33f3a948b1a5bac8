"""Launching Triton kernels: on the device of their tensors, with the tile sizes that were measured for it.

Triton launches on the thread's current device, which is the first GPU unless changed. A kernel that runs there but
reads the memory of another GPU fails with an illegal memory access; so all kernels are launched by `launch_kernel`.

``tuned/DEVICE.json``, which `scripts/tune_kernels.py` writes, maps ``kernel:bits:group:out x in`` to the four numbers
of a `Configuration`. Without an entry: small tiles of rows, so that a layer makes several programs per multiprocessor,
and the columns of a narrow layer split among programs. Nothing is ever tuned while a model runs.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from quantforge_kernels.problem import power_of_two

PROGRAMS = 8 * 132  # wanted: enough warps to keep the memory of a large GPU busy


def launch_kernel(
    kernel: Any, grid: tuple[int, ...], first: Tensor, /, *arguments: object, **constants: object
) -> None:
    """Launch a kernel on the device of its first argument, a tensor; the other tensors must be on the same device.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: number of programs along each dimension.
        first: the first argument of the kernel.
        arguments: the other positional arguments.
        constants: compile-time constants (``tl.constexpr``), and Triton's options such as ``num_warps``.
    """
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        kernel[grid](first, *arguments, **constants)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Rows and columns of a tile, warps of a program, programs that share the columns."""

    block_n: int
    block_k: int
    warps: int
    split: int


def key(kernel: str, bits: int, group_size: int, out_features: int, in_features: int) -> str:
    """Return the name of an entry."""
    return f"{kernel}:{bits}:{group_size}:{out_features}x{in_features}"


def configure(
    kernel: str,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    least_k: int,
    device: torch.device,
    strips: int = 0,
) -> Configuration:
    """Choose the configuration of a launch.

    Args:
        kernel: ``matvec`` or ``rows``.
        shape: ``(out_features, in_features)``.
        bits: of a code.
        group_size: columns of a group.
        least_k: columns that a tile needs at least (a power of two).
        device: where it runs.
        strips: of a grouped product, the pairs or the strips of pairs that are multiplied beside each other; else 0.
    """
    out_features, in_features = shape
    entry = key(
        f"grouped-{kernel}" if strips else kernel, bits, group_size, out_features, in_features
    )
    tuned = _tuned(_device_name(device)).get(entry)
    if tuned is not None:
        return tuned
    block_n, warps, widest = (8, 1, 1024) if kernel == "matvec" else (64, 2, 128)
    block_k = max(least_k, min(widest, power_of_two(in_features)))
    inside = min(widest, group_size & -group_size)  # a tile in one group is the cheapest
    if kernel == "rows" and least_k <= inside:
        block_k = inside
    split = split_of(
        -(-out_features // block_n) * warps * max(1, strips), -(-in_features // block_k)
    )
    return Configuration(block_n, block_k, warps, split)


def split_of(warps: int, tiles: int) -> int:
    """Return the programs that share the columns, where the rows alone make so many warps."""
    return max(1, min(PROGRAMS // warps, tiles))


def save(entries: dict[str, Configuration]) -> str:
    """Return the text of a file of tuned configurations."""
    rows = [f"  {json.dumps(name)}: {list(astuple(entries[name]))}" for name in sorted(entries)]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def parse(text: str) -> dict[str, Configuration]:
    """Read the text that `save` returned."""
    return {name: Configuration(*values) for name, values in json.loads(text).items()}


@cache
def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")


@cache
def _tuned(device: str) -> dict[str, Configuration]:
    file = files(__package__).joinpath("tuned", f"{device}.json")
    return parse(file.read_text(encoding="utf-8")) if device and file.is_file() else {}
