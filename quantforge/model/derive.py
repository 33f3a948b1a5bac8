"""Derive the declarations of a family that has no file here, by running transformers' code for it.

One block of each kind of layer runs with random weights on a few random tokens. Linears whose inputs are equal read the
same activation. Which tensor absorbs a scale of that activation is proven by folding one in
(`quantforge.model.absorbers`). No weights are read: the result follows from the configuration and transformers' code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture, Parameter
from quantforge.architectures.architecture import Derivation
from quantforge.architectures.dimensions import Dimensions
from quantforge.errors import RefusedError
from quantforge.model.derive_kind import Derived, Sizes, agreed, derive_kind, modules_of
from quantforge.model.inner import head_of
from quantforge.model.outside import Learn, Outside
from quantforge.model.passage import same
from quantforge.model.standins import Call, mappings
from quantforge.model.trial_block import TrialBlock, is_linear, is_transposed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNBOUNDED = 1 << 30  # positions of a model whose configuration does not limit them


def derive(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], apart: Collection[str] = ()
) -> Architecture:
    """Derive the declarations of a skeleton, whose blocks are replaced on the way.

    Args:
        model: the skeleton; it may have fewer experts than the model.
        shapes: shapes of all tensors of the model.
        apart: three-dimensional parameters that files store as one matrix per expert.

    Raises:
        InputError: transformers cannot run it.
        RefusedError: its blocks cannot be run one after another; the message says why.
    """
    config = model.config.get_text_config()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    outside = Outside(model)
    keys = [_key(config, index, block) for index, block in enumerate(outside.blocks)]
    transposed = _transposed(outside.blocks)
    derived: dict[object, Derived] = {}
    shares: list[int] = []  # blocks that put something into a mapping that later blocks read

    def learn(index: int, states: Tensor, call: Call) -> tuple[Any, ...] | None:
        key = keys[index]
        given = _sizes_of_mappings(call)
        if key in derived and given:
            _try(outside.blocks[index], states, call)  # later blocks may read what it puts there
        if key not in derived:
            prefix = f"{outside.name}.{index}."
            inside = {
                name.removeprefix(prefix): shape
                for name, shape in shapes.items()
                if name.startswith(prefix)
            }
            made = derive_kind(
                TrialBlock(outside.blocks[index], states, call),
                Sizes(
                    _dimensions(config, outside.blocks, states.shape[-1], vocabulary),
                    config.to_dict(), transposed, tuple(model._keep_in_fp32_modules or ()),
                ),
                inside,
                {name.removeprefix(prefix) for name in apart},
            )  # fmt: skip
            derived[key] = _named(made, derived.values())
        if given != _sizes_of_mappings(call):
            shares.append(index)
        return derived[key].beside if derived[key].kind.returned else None

    replayed = _replayed(outside, learn) or bool(shares)
    sizes = Sizes(
        _dimensions(config, outside.blocks, outside.hidden, vocabulary), {}, transposed, ()
    )
    found = _architecture(model, outside, shapes, sizes, agreed([derived[key] for key in keys]))
    return replace(found, replayed=replayed, streams=outside.layout.width // outside.hidden)


def _try(module: nn.Module, states: Tensor, call: Call) -> None:
    """Run a block with random weights."""
    trial = TrialBlock(module, states, call)
    with trial.filled():
        trial.run()


def _sizes_of_mappings(call: Call) -> dict[str, int]:
    return {name: len(value) for name, value in mappings(call).items()}


def _named(made: Derived, known: Iterable[Derived]) -> Derived:
    """Return a kind under a new name, or the known kind that equals it."""
    others = {item.kind.name: item for item in known}
    for item in others.values():
        if replace(made.kind, name=item.kind.name) == item.kind:
            return item
    return made._replace(kind=replace(made.kind, name=f"kind{len(others)}"))


def _key(config: Any, index: int, block: nn.Module) -> object:
    """Return a key that layers of the same kind share."""
    listed = (_stated(config, name) for name in ("layer_types", "mlp_layer_types"))
    words = tuple(
        str(item[index]) if isinstance(item, Sequence) and len(item) > index else ""
        for item in listed
    )
    return type(block), modules_of(block), words


def _replayed(outside: Outside, learn: Learn) -> bool:
    """Return whether anything but the hidden states that a block gets depends on tokens or on earlier blocks."""

    def without(index: int, states: Tensor, call: Call) -> tuple[None, ...] | None:
        beside = learn(index, states, call)
        return None if beside is None else (None,) * len(beside)

    first, second = outside.calls(learn), outside.calls(learn, factor=0.5)
    others = outside.calls(without, seed=1, factor=0.5)
    alike = all(
        same(tuple(one.call), tuple(other.call)) for one, other in zip(first, others, strict=True)
    )
    chained = all(
        torch.equal(second[i].states * 0.5, second[i + 1].states) for i in range(len(second) - 1)
    )
    return not (alike and chained)


def _dimensions(
    config: Any, blocks: Sequence[nn.Module], hidden: int, vocabulary: int
) -> Dimensions:
    """Return the sizes, by the names that transformers' configuration classes give them."""

    def stated(*names: str, otherwise: int) -> int:
        values = (_stated(config, name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), otherwise)

    heads = stated("num_attention_heads", otherwise=1)
    widest = max(
        (
            size
            for block in blocks
            for module in block.modules()
            if is_linear(module)
            for size in module.get_parameter("weight").shape
        ),
        default=hidden,
    )
    return Dimensions(
        hidden=hidden,
        ffn=stated("intermediate_size", otherwise=widest),
        layers=len(blocks),
        heads=heads,
        kv_heads=stated("num_key_value_heads", "num_kv_heads", otherwise=heads),
        head=stated("head_dim", otherwise=max(1, hidden // heads)),
        vocab=vocabulary,
        positions=stated("max_position_embeddings", otherwise=UNBOUNDED),
    )


def _stated(config: Any, name: str) -> Any:
    """Return a value of a configuration, the general one if layers have their own; None if there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # how transformers answers for what differs from layer to layer
        return config.to_dict().get(name)


def _transposed(blocks: Sequence[nn.Module]) -> bool:
    """Return whether all linears hold ``[in_features, out_features]``; raise RefusedError where some do."""
    found = {is_transposed(item) for block in blocks for item in block.modules() if is_linear(item)}
    if len(found) > 1:
        raise RefusedError(
            "some of its linears are stored transposed, some are not", "--method rtn"
        )
    return found == {True}


def _architecture(
    model: PreTrainedModel,
    outside: Outside,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Sizes,
    derived: Sequence[Derived],
) -> Architecture:
    outer = {
        name: shape for name, shape in shapes.items() if not name.startswith(f"{outside.name}.")
    }
    config = model.config.get_text_config()
    kinds = {item.kind.name: item for item in derived}
    slices = {name: found for item in derived for name, found in item.slices.items()}
    names = {module: name for name, module in model.named_modules()}
    head = head_of(model)
    if head is None:
        raise RefusedError("it has no output projection", "--method rtn")
    return Architecture(
        model_type=str(config.model_type),
        blocks=outside.name,
        outer=tuple(Parameter(name, tuple(map(str, shape))) for name, shape in outer.items()),
        kinds=tuple(item.kind for item in kinds.values()),
        embedding=names[model.get_input_embeddings()],
        head=names[head],
        final_norm=outside.last_norm,
        slices={name: tuple(map(str, found.sizes)) for name, found in slices.items()},
        slice_labels={name: found.labels for name, found in slices.items()},
        transposed=sizes.transposed,
        fused_attention=any(item.fused for item in derived),
        derived=Derivation(
            f"transformers {version('transformers')}, {type(model).__name__}",
            sizes.dimensions,
            tuple(item.kind.name for item in derived),
            unobserved=tuple(sorted({name for item in derived for name in item.unobserved})),
        ),
    )
