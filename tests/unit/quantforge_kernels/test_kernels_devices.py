"""Kernels are launched on the device of their tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import quantforge_kernels

PACKAGE = Path(quantforge_kernels.__file__).parent


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in PACKAGE.rglob("*.py"):
        yield path.name, ast.parse(path.read_text(encoding="utf-8"))


def test_kernels_are_launched_in_one_place():
    """``kernel[grid](...)`` is only where the device is set: elsewhere it would run on the current one."""
    kernels = {
        node.name
        for _, tree in parsed()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(
            ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
        )
    }
    assert {"add_rms_norm_kernel", "matvec_kernel", "paged_attention_kernel"} <= kernels
    launches = [
        (name, ast.unparse(node.func))
        for name, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).rpartition(".")[2] in kernels | {"kernel"}
    ]  # fmt: skip
    assert launches == [("launching.py", "kernel[grid]")]
