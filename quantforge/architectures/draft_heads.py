"""Tensors of draft heads: which of them are linears, and which of these read the same activation.

What joins a head to its model (`fc`), its embedding, output matrices and norms are no linears here, as of heads that
lie within a model (`quantforge.architectures.heads`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantforge.architectures.draft_kinds import EAGLE3, type_of
from quantforge.architectures.matched import Matched, MatchedTensor, Role
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

EMBEDDING = "embed_tokens.weight"
# Of EAGLE-3, those of a group read the same activation.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",),
)  # fmt: skip
_BLOCK = re.compile(
    r"(?:medusa_heads?\.)?(?:(\d+)\.\d+\.linear|blocks\.(\d+)\.layers\.\d+)\.weight"
)
_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(?:\d+\.\d+|lm_heads\.\d+)\.weight")


def stored_names(name: str) -> list[str]:
    """Return the names that files of EAGLE-3 have for a tensor: with the layer in front where it is of the layer."""
    return [
        f"{prefix}{owner}{name}"
        for prefix in ("", "model.")
        for owner in ("", "midlayer.", "layers.0.")
    ]


def match_draft(config: Mapping[str, Any], stored: list[StoredTensor]) -> Matched:
    """Match the tensors of a directory of draft heads.

    Raises:
        InputError: it holds no linear, or lacks one that is known by its name.
    """
    kind = type_of(config)
    tensors = tuple(_eagle3(stored) if kind == EAGLE3 else _medusa(stored))
    if not any(tensor.role is Role.LINEAR for tensor in tensors):
        raise InputError(
            f"{kind} heads without a linear: no tensor has the name of one", "fetch them again"
        )
    return Matched(
        architecture=None,
        model_type=kind,
        config=config,
        dimensions=None,
        tensors=tensors,
        rule=f"{kind} heads: the linears of their layers are rounded, whatever else they hold is kept",
        draft=kind,
    )


def _eagle3(stored: list[StoredTensor]) -> Iterator[MatchedTensor]:
    roles = dict.fromkeys(stored_names(EMBEDDING), Role.EMBEDDING)
    roles |= dict.fromkeys(stored_names("lm_head.weight"), Role.HEAD)
    held = {tensor.name for tensor in stored}
    shared: dict[str, str] = {}
    for group in GROUPS:
        found = [_held(f"{name}.weight", held) for name in group]
        shared |= dict.fromkeys(found, found[0].removesuffix(".weight"))
    for tensor in stored:
        if tensor.name in shared:
            yield MatchedTensor(tensor.name, tensor, Role.LINEAR, 0, shared[tensor.name])
        else:
            yield MatchedTensor(tensor.name, tensor, roles.get(tensor.name) or _rest(tensor))


def _held(name: str, held: set[str]) -> str:
    found = next((other for other in stored_names(name) if other in held), None)
    if found is None:
        raise InputError(f"{EAGLE3} heads: no tensor {name!r}", "fetch the directory again")
    return found


def _medusa(stored: list[StoredTensor]) -> Iterator[MatchedTensor]:
    for tensor in stored:
        if found := _BLOCK.fullmatch(tensor.name):
            module = tensor.name.removesuffix(".weight")
            yield MatchedTensor(tensor.name, tensor, Role.LINEAR, int(found[1] or found[2]), module)
        elif _OUTPUT.fullmatch(tensor.name):
            yield MatchedTensor(tensor.name, tensor, Role.HEAD)
        else:
            yield MatchedTensor(tensor.name, tensor, _rest(tensor))


def _rest(tensor: StoredTensor) -> Role:
    if "norm" in tensor.name:
        return Role.NORM
    return Role.BIAS if tensor.name.endswith(".bias") else Role.OTHER
