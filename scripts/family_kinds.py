"""What the tensors of a tiny family are, by the running model: what a plan rounds and should not, or leaves unsaid.

What a stored tensor is follows from its values: they are looked for among the parameters of the running model, whose
modules say what they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def misjudged(family: str, source: Path, plan: Any) -> list[str]:
    """Return what the plan rounds and should not, and what it leaves without a word."""
    from quantforge.architectures.towers import NUMBERED_NAME
    from quantforge.files.reader import open_checkpoint
    from quantforge.model.transformers_layout import running_layout
    from quantforge.planning.coverage import coverage
    from quantforge.planning.source_views import one_by_one
    from quantforge.plans import Action

    source_form = open_checkpoint(source)
    if any("source layout:" in note for note in plan.notes):
        source_form = running_layout(source_form)
    view = one_by_one(source_form)  # plans name single experts of a stack
    kinds = _kinds(family)
    measured = coverage(plan.tensors)
    said = {name.replace(".*.", ".N.") for name in measured.kept}
    told = any(event.kind == "low-coverage" for event in plan.substitutions)
    found: list[str] = []
    for tensor in plan.tensors:
        kind = kinds.get(_digest(view.read(tensor.name)), "unknown")
        if tensor.action is Action.QUANTIZE and kind not in {"linear", "experts", "unknown"}:
            found.append(f"rounded: {tensor.name} is {kind}")
        if tensor.action is Action.KEEP and kind in {"linear", "experts"}:
            joined = re.sub(
                r"\bexperts\.\d+\.",
                "experts.*.",
                tensor.name.replace(f".{tensor.block}.", ".*.", 1),
            )
            if tensor.name.endswith("bias"):
                continue
            block = NUMBERED_NAME.match(tensor.name)
            if block is not None and block[1] in measured.outside_blocks:
                continue  # named by its list
            if joined.replace(".*.", ".N.") not in said:
                found.append(f"stays without a word: {tensor.name} is {kind}")
            elif kind == "experts" and not told:
                found.append(f"stays without an event: {tensor.name} is experts")
    numbers = Counter(re.sub(r"\.\d+\.", ".*.", text) for text in found)
    return [f"{text} ({count})" for text, count in numbers.items()]


def _digest(tensor: Any) -> tuple[int, ...]:
    """Return what a tensor's values are known by: its size and its sorted ends, whatever the order and shape."""
    import hashlib

    import torch

    values = tensor.detach().to(torch.float32).flatten().sort().values
    return (values.numel(), int.from_bytes(hashlib.sha256(values.numpy().tobytes()).digest()[:8]))


def _kinds(family: str) -> dict[tuple[int, ...], str]:
    """Return what every parameter of the running model is, by its values: halves and slices of stacks included."""
    from scripts import tiny_families

    model = tiny_families.build(family)
    blocks = _decoder(model)
    found: dict[tuple[int, ...], str] = {}
    for _, kind, parameter in _named(model, blocks):
        for piece in _pieces(parameter, kind):
            found.setdefault(_digest(piece), kind)
    return found


def _decoder(model: Any) -> tuple[str, ...]:
    """Return the names of the lists of decoder blocks: the one with the most weights, and those of the same blocks."""
    from torch import nn

    from scripts import tiny_families as t

    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and 2 <= len(module) <= 2 * t.LAYERS
    }
    text = {n: m for n, m in lists.items() if not any(n.startswith(o + ".") for o in lists)}
    tower = (
        "vision",
        "visual",
        "audio",
        "speech",
        "projector",
        "sam",
        "encoder.",
        "vq",
        "generation",
    )
    named = [n for n in text if not any(word in n for word in tower)]
    if not text:
        return ()
    largest = max(named or text, key=lambda n: sum(p.numel() for p in text[n].parameters()))
    kind = type(text[largest][0])
    return tuple(n for n in named or text if type(text[n][0]) is kind)


def _named(model: Any, blocks: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Return every matrix of the model with what it is."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from scripts.tiny_families import EXPERTS

    stacks = {name for name, module in model.named_modules() if _holds_experts(module, EXPERTS)}
    parents = {name.rpartition(".")[0] for name in stacks}
    for name, module in model.named_modules():
        inside = name.startswith(tuple(f"{block}." for block in blocks))
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            linear = isinstance(module, nn.Linear | Conv1D) and leaf == "weight"
            beside = any(name.startswith(parent + ".") for parent in parents) and name not in stacks
            rows = parameter.shape[0]
            if isinstance(module, nn.Embedding):
                kind = "embedding"
            elif not inside:
                kind = "outside of the blocks" if not linear else "linear outside of the blocks"
            elif name in stacks:
                kind = "experts"
            elif beside and rows in {1, EXPERTS}:
                kind = "router"
            else:
                kind = "linear" if linear else f"no linear but {type(module).__name__}.{leaf}"
            yield f"{name}.{leaf}", kind, parameter


def _holds_experts(module: Any, count: int) -> bool:
    """Return whether a module holds the experts of a layer: by its class, or by a stack of matrices of its own."""
    if re.search(r"Experts?(GLU)?$", type(module).__name__) and "Gate" not in type(module).__name__:
        return True
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    stacked = any(parameter.dim() == 3 and parameter.shape[0] == count for parameter in own)
    return stacked and "Conv" not in type(module).__name__


def _pieces(parameter: Any, kind: str) -> Iterator[Any]:
    yield parameter
    if kind == "experts" and parameter.dim() == 3:
        yield parameter.flatten(0, 1)
        for half in (
            parameter.chunk(2, 1),
            parameter.chunk(2, 2),
            (parameter[:, ::2], parameter[:, 1::2]),
        ):
            yield from half
        for expert in parameter:
            yield expert
            yield from (*expert.chunk(2, 0), *expert.chunk(2, 1))
            yield from (expert[::2], expert[1::2], expert[:, ::2], expert[:, 1::2])
    elif parameter.dim() == 2:
        yield from (*parameter.chunk(2, 0), *parameter.chunk(3, 0))
