"""Draft heads: layers that guess further tokens, beside the decoder in a model's files, or in a directory of their own.

Within a model they are told by their names and their count. The decoder works without them (speculative decoding is
faster with them). Files hold them behind the last layer, as many as the configuration counts, or under names of their
own; the classes of transformers leave them out. So they are declared for no family but recognised in all, and stay as
they are unless a recipe says otherwise. A directory of Medusa or EAGLE-3 heads holds nothing else.

The matrices inside of attention and MLP are linears like those of the decoder, and of those of EAGLE-3 it is known
which read the same activation. What joins a head to the decoder (`eh_proj`, `fc`), its embedding, output matrix,
routers and norms are not, and engines hold them in 16 bits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from quantforge.architectures.draft_kinds import EAGLE3, type_of
from quantforge.architectures.matched import Matched, MatchedTensor, Role
from quantforge.architectures.routers import routers, weighs_an_index
from quantforge.architectures.towers import BLOCK, LAYERS, NAMES
from quantforge.errors import InputError
from quantforge.plans import StoredTensor

BEHIND = "num_nextn_predict_layers"  # counts layers behind the last one
# Other counts, and whether there are any; 0 and false where they are left out.
COUNTS = (BEHIND, "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")
USED = ("use_mtp",)
_OWN = re.compile(r"(\w+\.)*?(mtp|mtp_layers|mtp_\w+|medusa_heads?)\..+")
_WORDS = ("mtp", "medusa")  # one of them is in every such name
_JOINS = re.compile(
    r"(?<!\.experts)\.\d+$|(^|\.)(mtp\w*|medusa_heads?)$"
)  # a module that holds layers, not of one
_NOT_LINEAR = re.compile(r"embed|head|norm|router|(^|\.)gate\.weight|conv")
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
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


def heads_of(
    config: Mapping[str, Any], layers: int, stored: Iterable[StoredTensor]
) -> dict[str, bool]:
    """Return the names of the tensors of heads, and whether each is a linear.

    Args:
        config: of the decoder.
        layers: that it has.
        stored: all tensors.

    Raises:
        InputError: ``num_nextn_predict_layers`` is no number of layers.
    """
    count = config.get(BEHIND) or 0
    if type(count) is not int or not 0 <= count <= max(layers, 1):
        raise InputError(f"config.json: {BEHIND} = {str(count)[:40]!r}", "a number")
    behind = range(layers, layers + count)
    found = {}
    for tensor in stored:
        name = tensor.name
        block = BLOCK.match(name) if behind else None
        further = block and int(block[2]) in behind and not NAMES.search(name)
        if further or (any(word in name for word in _WORDS) and _OWN.fullmatch(name)):
            found[name] = tensor
    spared = routers(config, {name: tensor.shape for name, tensor in found.items()})
    return {name: name not in spared and _is_linear(tensor) for name, tensor in found.items()}


def head_tensors(
    config: Mapping[str, Any], layers: int, stored: Iterable[StoredTensor]
) -> dict[str, MatchedTensor]:
    """Return the tensors of heads, as a match has them; arguments as of `heads_of`."""
    stored = list(stored)
    found = heads_of(config, layers, stored)
    return {
        tensor.name: MatchedTensor(
            tensor.name,
            tensor,
            Role.FOREIGN,
            further=True,
            shared=first_sibling(tensor.name, found) if found[tensor.name] else "",
        )
        for tensor in stored
        if tensor.name in found
    }


def layers_of(config: Mapping[str, Any]) -> int:
    """Return the number of layers that an unchecked configuration states, 0 where it states none."""
    found = next((config[key] for key in LAYERS if key in config), 0)
    return found if type(found) is int else 0


def first_sibling(name: str, names: Container[str]) -> str:
    """Return the module of the first linear that reads what ``name`` reads, as far as names say so."""
    parent, _, leaf = name.removesuffix(".weight").rpartition(".")
    for siblings in _SIBLINGS:
        if leaf in siblings:
            leaf = next(word for word in siblings if f"{parent}.{word}.weight" in names)
    return f"{parent}.{leaf}"


def without_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that counts no heads, in its tower neither."""
    changed: dict[str, Any] = {key: 0 for key in COUNTS if config.get(key)}
    changed |= {key: False for key in USED if config.get(key)}
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        changed["text_config"] = without_heads(nested)
    return {**config, **changed}


def _is_linear(tensor: StoredTensor) -> bool:
    name = tensor.name
    owner = name.removesuffix(".weight").rpartition(".")[0]
    matrix = name.endswith(".weight") and len(tensor.shape) == 2
    return (
        matrix
        and not _JOINS.search(owner)
        and not _NOT_LINEAR.search(name.rpartition(".layers.")[2])
        and not weighs_an_index(name)
    )


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
