"""Derive the declarations of a model whose family is not declared, by running transformers' code for it.

The model runs on a few random tokens, with stand-ins for its blocks and random numbers around them. The first time that
a block of one kind of layer is reached, it runs with random weights itself. Linears with equal inputs read the same
activation. Which tensor can take a scale of that activation is proven by folding one in
(`quantforge.model.derive.trial_block`). No weights are read: the result follows from the configuration and
transformers' code. Mixtures of experts are derived with a few experts, since all experts have the same structure.

The derived names are then mapped to the tensor names of one checkpoint (`quantforge.model.weight_mapping`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quantforge.architectures import Architecture, LayerKind, Parameter
from quantforge.architectures.architecture import Derivation
from quantforge.architectures.dimensions import Dimensions
from quantforge.architectures.match import DerivedDeclarations
from quantforge.architectures.routers import expert_counts
from quantforge.architectures.towers import NUMBERED_NAME
from quantforge.errors import InputError, RefusedError
from quantforge.model.block_calls import Call, StandIn, mutable_mappings
from quantforge.model.block_inputs import equal_trees
from quantforge.model.derive.layer_kinds import (
    DerivedKind,
    ModelFacts,
    derive_kind,
    is_linear,
    is_transposed,
    parameter_signature,
    unify_slices,
)
from quantforge.model.derive.trial_block import TrialBlock
from quantforge.model.hidden_states import StateLayout
from quantforge.model.model_parts import block_list_name, find_base_model, output_layer
from quantforge.model.skeleton import build_skeleton, errors_as_refusals
from quantforge.model.weight_loading import parameter
from quantforge.model.weight_mapping import WeightMapping, WeightSource
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The last model only: a run derives it more than once, and large blocks are slow to run.
_CACHE: dict[str, Architecture] = {}
FEW_EXPERTS = 8  # enough to see how a mixture computes
EXPERTS_PER_TOKEN_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
)
_INDEX_IN_NAME = re.compile(r"\.\d+\.")
GROUP_KEYS = ("n_group", "topk_group", "num_expert_group")
UNLIMITED_POSITIONS = 1 << 30  # positions of a model whose configuration does not limit them
EMBEDDING_ROWS = 32  # of embeddings, those of positions too: more than twice LENGTH
SEQUENCE_LENGTH = 13  # of a row of tokens: the size of nothing else
MAX_OUTER_ELEMENTS = 1 << 26  # elements of a tensor outside of the blocks, except embeddings
# What a block returns beside its hidden states, given its index and what reaches it; None: they are returned alone.
_ComputeExtraOutputs = Callable[[int, Tensor, Call], tuple[Any, ...] | None]


def derive_declarations_for(
    config: Mapping[str, Any], stored: Iterable[StoredTensor], *, whole: bool = False
) -> DerivedDeclarations:
    """Derive the declarations of a checkpoint from its configuration and the names of its tensors.

    For a declared multimodal family, only the decoder is derived, unless ``whole``.

    Raises:
        InputError: transformers cannot build or run the model, or a stored tensor does not belong to it.
        RefusedError: its blocks cannot run one after another, or its files store weights in a layout that cannot be
            read block by block; the message says which.
    """
    model = build_skeleton(config, whole=whole)
    names = WeightMapping(model, stored)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    unstacked = {stack_slice.stack.parameter for stack_slice in names.expert_places.values()}
    # The structure of a model follows from its configuration; `build_skeleton` drops what describes stored weights.
    key = json.dumps(
        [model.config.to_dict(), sorted(unstacked), whole], sort_keys=True, default=str
    )
    if key not in _CACHE:
        derived = _derive_architecture(
            _with_few_experts(config, model, whole=whole), shapes, unstacked
        )
        _CACHE.clear()
        _CACHE[key] = derived
    architecture = _CACHE[key]
    ignored = tuple(map(re.escape, names.ignored))
    assert architecture.derivation is not None
    architecture = replace(
        architecture,
        droppable_patterns=(*architecture.droppable_patterns, *ignored),
        derivation=replace(architecture.derivation, tied=_is_head_tied(names, architecture)),
    )
    canonical_names, transposed_stacks = _canonical_names(names, architecture)
    other = [
        source for source in names.distinct_sources() if source.stored[0] not in canonical_names
    ]
    architecture, stored_outer = _declare_stored_tensors(names, architecture, other)
    return DerivedDeclarations(
        architecture,
        {**canonical_names, **stored_outer, **_single_expert_names(names, architecture)},
        transposed_stacks,
    )


def _is_head_tied(names: WeightMapping, architecture: Architecture) -> bool:
    """Return whether the head is tied to the embedding; raise RefusedError if any other tensors are tied."""
    # Files may hold either of the two
    ends = {f"{architecture.head}.weight", f"{architecture.embedding}.weight"}
    other_ties = [name for name, source in names.tied.items() if {name, source} != ends]
    if other_ties:
        raise RefusedError(f"{other_ties[0]} is {names.tied[other_ties[0]]}, too", "--method rtn")
    return bool(names.tied)


def _with_few_experts(
    config: Mapping[str, Any], model: PreTrainedModel, *, whole: bool = False
) -> PreTrainedModel:
    """Return a skeleton of the same model with `FEW_EXPERTS` experts; the model itself if that is not possible."""
    reduced_config = _reduce_experts(config)
    if reduced_config == config:
        return model
    try:
        small = build_skeleton(reduced_config, whole=whole)
    except InputError:
        return model
    same_names = small.state_dict().keys() == model.state_dict().keys()
    return small if same_names else model


def _reduce_experts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with a few experts, two per token and no expert groups."""
    counts = expert_counts(config)
    if max(counts, default=0) <= FEW_EXPERTS:
        nested_config = config.get("text_config")
        return (
            {**config, "text_config": _reduce_experts(nested_config)}
            if isinstance(nested_config, Mapping)
            else config
        )
    expert_settings = {
        key: value for key, value in config.items() if type(value) is int and "expert" in key
    }
    reduced = {key: FEW_EXPERTS for key, value in expert_settings.items() if value in counts}
    experts_per_token = {key: 2 for key in EXPERTS_PER_TOKEN_KEYS if type(config.get(key)) is int}
    groups = {key: 1 for key in GROUP_KEYS if type(config.get(key)) is int}
    return {**config, **reduced, **experts_per_token, **groups}


def _canonical_names(
    names: WeightMapping, architecture: Architecture
) -> tuple[dict[str, str], frozenset[str]]:
    """Return canonical names of stored tensors, and the stored expert stacks whose matrices are transposed.

    Tensors of other conversions are left out.

    Raises:
        RefusedError: experts are not stacked matrix by matrix.
    """
    assert architecture.derivation is not None
    kinds = {kind.name: kind for kind in architecture.kinds}
    result, transposed_stacks = {}, set()
    for stored, expert_slice in names.expert_places.items():
        if not expert_slice.stack.parameter.startswith(
            f"{architecture.blocks}."
        ):  # experts of a tower
            continue
        block, _, parameter = expert_slice.stack.parameter.removeprefix(
            f"{architecture.blocks}."
        ).partition(".")
        kind = kinds[architecture.derivation.kinds[int(block)]]
        stack = next((item for item in kind.stacks if item.parameter == parameter), None)
        if stack is None or len(stack.linears) != len(expert_slice.stack.linears):
            raise RefusedError(
                f"experts in {expert_slice.stack.parameter} are not read one by one", "--method rtn"
            )
        linear = stack.linears[expert_slice.linear_index].format(expert_slice.expert)
        result[stored] = f"{architecture.blocks}.{block}.{linear}.weight"
    for parameter, source in names.sources.items():
        if source.operations == ("Transpose",) and _is_stack(parameter, architecture):
            transposed_stacks |= {source.stored[0]} if names.is_transposed(source) else set()
            result[source.stored[0]] = parameter
        elif source.rule is None:
            result[source.stored[0]] = parameter
    return result, frozenset(transposed_stacks)


def _is_stack(parameter: str, architecture: Architecture) -> bool:
    """Return whether a parameter stacks the matrices of experts."""
    return any(
        parameter.startswith(f"{architecture.blocks}.")
        and parameter.endswith(f".{stack.parameter}")
        for kind in architecture.kinds
        for stack in kind.stacks
    )


def _single_expert_names(names: WeightMapping, architecture: Architecture) -> dict[str, str]:
    """Return canonical names of experts that files store one by one although transformers only has them stacked."""
    blocks = {}
    for name, source in names.sources.items():
        match, stored_match = NUMBERED_NAME.match(name), NUMBERED_NAME.match(source.stored[0])
        if match and stored_match and match[1] == architecture.blocks:
            blocks[stored_match[1], stored_match[2]] = f"{match[1]}.{match[2]}."
    linears = {
        name for kind in architecture.kinds for stack in kind.stacks for name in stack.linears
    }
    result = {}
    for name in names.unused:
        stored_match = NUMBERED_NAME.match(name)
        if stored_match and (stored_match[1], stored_match[2]) in blocks:
            template = _INDEX_IN_NAME.sub(".{}.", stored_match[3].removesuffix(".weight"), count=1)
            if template in linears:
                result[name] = blocks[stored_match[1], stored_match[2]] + stored_match[3]
    return result


def _declare_stored_tensors(
    names: WeightMapping, architecture: Architecture, sources: Sequence[WeightSource]
) -> tuple[Architecture, dict[str, str]]:
    """Replace parameters in the declarations by the stored tensors from which they are computed.

    Some checkpoints have several tensors for one parameter of the model (the convolutions of queries, keys and values),
    or one tensor for several parameters (projections of a tower). If none of these parameters is quantized or takes a
    scale, the stored tensors are declared under their own names; transformers' rule computes the parameters when a
    block runs.

    Args:
        names: the weight mapping of the model.
        architecture: its derived declarations, by parameters of the running model.
        sources: the conversions.

    Returns:
        The declarations, and the canonical names of these stored tensors.

    Raises:
        RefusedError: one of the parameters is a quantized linear, takes a scale, or embeds tokens.
    """
    assert architecture.derivation is not None
    special_names = {f"{architecture.embedding}.weight", f"{architecture.head}.weight"}
    outer = {item.name: item for item in architecture.outer_parameters}
    kinds = {kind.name: kind for kind in architecture.kinds}
    canonical_names = {}
    for source in sources:
        _refuse_modified(source, special_names, architecture)
        block = NUMBERED_NAME.match(next(iter(source.parameters)))
        for stored in source.stored:
            match, shape = NUMBERED_NAME.match(stored), tuple(map(str, names.shape(stored)))
            if block is None or block[1] != architecture.blocks:
                outer[stored], canonical_names[stored] = Parameter(stored, shape), stored
                continue
            if match is None:
                raise _layout_refusal(source)
            kind = kinds[architecture.derivation.kinds[int(block[2])]]
            kinds[kind.name] = _replace_parameters(kind, source, Parameter(match[3], shape))
            canonical_names[stored] = f"{architecture.blocks}.{block[2]}.{match[3]}"
        for name in source.parameters:
            outer.pop(name, None)
    outer_parameters = tuple(outer.values())
    return replace(
        architecture, outer_parameters=outer_parameters, kinds=tuple(kinds.values())
    ), canonical_names


def _replace_parameters(kind: LayerKind, source: WeightSource, parameter: Parameter) -> LayerKind:
    """Return a layer kind with a stored tensor in place of the parameters computed from it."""
    replaced_names = {
        match[3] for name in source.parameters if (match := NUMBERED_NAME.match(name))
    }
    items: Mapping[str, Parameter] = {
        item.name: item for item in kind.parameters if item.name not in replaced_names
    }
    return replace(kind, parameters=tuple({**items, parameter.name: parameter}.values()))


def _refuse_modified(source: WeightSource, touched: set[str], architecture: Architecture) -> None:
    block_parameters = {
        name for name in source.parameters if name.startswith(f"{architecture.blocks}.")
    }
    modules_in_block = {
        match[3].rpartition(".")[0]
        for name in block_parameters
        if (match := NUMBERED_NAME.match(name))
    }
    rewritten_modules = {name for kind in architecture.kinds for name in kind.linears}
    rewritten_modules |= {
        shared.scale_fold.module
        for kind in architecture.kinds
        for shared in kind.inputs
        if shared.scale_fold
    }
    rewritten_modules |= {
        stack.parameter.rpartition(".")[0] for kind in architecture.kinds for stack in kind.stacks
    }
    if touched & source.parameters.keys() or modules_in_block & rewritten_modules:
        raise _layout_refusal(source)


def _layout_refusal(source: WeightSource) -> RefusedError:
    parameter = next(iter(source.parameters))
    return RefusedError(
        f"its files hold {parameter} in another form ({', '.join(source.operations)})",
        "--method rtn",
    )


def _derive_architecture(
    model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], unstacked: Collection[str] = ()
) -> Architecture:
    """Derive the declarations of a skeleton; its blocks are replaced in the process.

    Args:
        model: the skeleton; it may have fewer experts than the real model.
        shapes: shapes of all tensors of the real model.
        unstacked: three-dimensional parameters that files store as one matrix per expert.

    Raises:
        InputError: transformers cannot run it.
        RefusedError: its blocks cannot run one after another; the message says why.
    """
    config = model.config.get_text_config()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    outside = _ModelAroundBlocks(model)
    keys = [_kind_key(config, index, block) for index, block in enumerate(outside.blocks)]
    transposed, float32_modules = (
        _are_transposed(outside.blocks),
        tuple(model._keep_in_fp32_modules or ()),
    )
    kinds_by_key: dict[object, DerivedKind] = {}
    shares: list[int] = []  # blocks that put something into a mapping that later blocks read

    def sizes(hidden: int) -> ModelFacts:
        dimensions = _dimensions(config, outside.blocks, hidden, vocabulary)
        return ModelFacts(dimensions, config.to_dict(), transposed, float32_modules)

    def learn(index: int, states: Tensor, call: Call) -> tuple[Any, ...] | None:
        key = keys[index]
        mapping_sizes = _sizes_of_mappings(call)
        if key in kinds_by_key and mapping_sizes:
            trial = TrialBlock(outside.blocks[index], states, call)
            with trial.filled():
                trial.run()  # later blocks may read what it puts there
        if key not in kinds_by_key:
            prefix = f"{outside.name}.{index}."
            names_in_block = {
                name.removeprefix(prefix): shape
                for name, shape in shapes.items()
                if name.startswith(prefix)
            }
            derived_kind = derive_kind(
                TrialBlock(outside.blocks[index], states, call),
                sizes(states.shape[-1]),
                names_in_block,
                {name.removeprefix(prefix) for name in unstacked},
            )
            kinds_by_key[key] = _name_kind(derived_kind, kinds_by_key.values())
        if mapping_sizes != _sizes_of_mappings(call):
            shares.append(index)
        return kinds_by_key[key].extra_outputs if kinds_by_key[key].kind.num_outputs else None

    needs_replay = _needs_replay(outside, learn) or bool(shares)
    kinds = unify_slices([kinds_by_key[key] for key in keys])
    return _architecture(
        model, outside, shapes, sizes(outside.hidden), kinds, replayed=needs_replay
    )


def _sizes_of_mappings(call: Call) -> dict[str, int]:
    return {name: len(value) for name, value in mutable_mappings(call).items()}


def _name_kind(derived: DerivedKind, named_kinds: Iterable[DerivedKind]) -> DerivedKind:
    """Name a new layer kind, or return the known kind that equals it."""
    known_by_name = {item.kind.name: item for item in named_kinds}
    for item in known_by_name.values():
        if replace(derived.kind, name=item.kind.name) == item.kind:
            return item
    return derived._replace(kind=replace(derived.kind, name=f"kind{len(known_by_name)}"))


def _kind_key(config: Any, index: int, block: nn.Module) -> object:
    """Return a key that is equal for layers of the same kind."""
    layer_type_lists = (_config_value(config, name) for name in ("layer_types", "mlp_layer_types"))
    text_attributes = tuple(
        str(item[index]) if isinstance(item, Sequence) and len(item) > index else ""
        for item in layer_type_lists
    )
    return type(block), parameter_signature(block), text_attributes


def _needs_replay(outside: _ModelAroundBlocks, learn: _ComputeExtraOutputs) -> bool:
    """Return whether block arguments other than hidden states depend on tokens or on earlier blocks."""

    def without(index: int, states: Tensor, call: Call) -> tuple[None, ...] | None:
        outputs = learn(index, states, call)
        return None if outputs is None else (None,) * len(outputs)

    first, second = outside.record_arguments(learn), outside.record_arguments(learn, factor=0.5)
    second_calls = outside.record_arguments(without, seed=1, factor=0.5)
    alike = all(
        equal_trees(tuple(call_before.call), tuple(other.call))
        for call_before, other in zip(first, second_calls, strict=True)
    )
    chained = all(
        torch.equal(second[i].states * 0.5, second[i + 1].states) for i in range(len(second) - 1)
    )
    return not (alike and chained)


def _dimensions(
    config: Any, blocks: Sequence[nn.Module], hidden: int, vocabulary: int
) -> Dimensions:
    """Return the sizes of the model, read from the attribute names of transformers' configuration classes."""

    def stated(*names: str, otherwise: int) -> int:
        values = (_config_value(config, name) for name in names)
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
        positions=stated("max_position_embeddings", otherwise=UNLIMITED_POSITIONS),
    )


def _config_value(config: Any, name: str) -> Any:
    """Return a configuration value, the general one if it differs by layer; None if there is none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # how transformers answers for what differs from layer to layer
        return config.to_dict().get(name)


def _are_transposed(blocks: Sequence[nn.Module]) -> bool:
    """Return whether all linears hold ``[in_features, out_features]``; raise RefusedError if only some do."""
    orientations = {
        is_transposed(item) for block in blocks for item in block.modules() if is_linear(item)
    }
    if len(orientations) > 1:
        raise RefusedError(
            "some of its linears are stored transposed, some are not", "--method rtn"
        )
    return orientations == {True}


def _architecture(
    model: PreTrainedModel,
    outside: _ModelAroundBlocks,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: ModelFacts,
    derived_kinds: Sequence[DerivedKind],
    *,
    replayed: bool,
) -> Architecture:
    outer = {
        name: shape for name, shape in shapes.items() if not name.startswith(f"{outside.name}.")
    }
    config = model.config.get_text_config()
    kinds = {item.kind.name: item for item in derived_kinds}
    slices = {name: row_slice for item in derived_kinds for name, row_slice in item.slices.items()}
    names = {module: name for name, module in model.named_modules()}
    head = output_layer(model)
    if head is None:
        raise RefusedError("it has no output projection", "--method rtn")
    return Architecture(
        model_type=str(config.model_type),
        blocks=outside.name,
        outer_parameters=tuple(
            Parameter(name, tuple(map(str, shape))) for name, shape in outer.items()
        ),
        kinds=tuple(item.kind for item in kinds.values()),
        embedding=names[model.get_input_embeddings()],
        head=names[head],
        final_norm=outside.last_norm,
        slices={name: tuple(map(str, row_slice.sizes)) for name, row_slice in slices.items()},
        slice_labels={name: row_slice.labels for name, row_slice in slices.items()},
        transposed=sizes.transposed,
        needs_model_replay=replayed,
        num_streams=outside.layout.values_per_token // outside.hidden,
        fused_attention=any(item.has_fused_attention for item in derived_kinds),
        derivation=Derivation(
            f"transformers {version('transformers')}, {type(model).__name__}",
            sizes.dimensions,
            tuple(item.kind.name for item in derived_kinds),
            unobserved=tuple(sorted({name for item in derived_kinds for name in item.unobserved})),
        ),
    )


class _BlockArguments(NamedTuple):
    """Hidden states and other arguments of a block."""

    states: Tensor
    call: Call


class _ModelAroundBlocks:
    """A model with stand-ins for its blocks and random numbers elsewhere; embeddings have a few rows.

    Attributes:
        name: name of the list of blocks.
        blocks: the modules in it.
        hidden: width of the hidden states, once the model was run.
        layout: axes of the hidden states, once the model was run.
        last_norm: name of the first norm computed after the blocks, once the model was run; "" without one.

    Args:
        model: a skeleton; its list of blocks is changed.

    Raises:
        RefusedError: the model has no list of decoder blocks, or its blocks do not run one after another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.name = block_list_name(model)
        block_list = model.get_submodule(self.name)
        assert isinstance(block_list, nn.ModuleList)  # for the type checker
        self.blocks = list(block_list)
        self._stand_ins = [StandIn(block) for block in self.blocks]
        for index, stand_in in enumerate(self._stand_ins):
            block_list[index] = stand_in
        self.hidden = 0
        self.last_norm = ""
        self._generator = torch.Generator().manual_seed(1)
        self._fill_random()

    def record_arguments(
        self, extra_outputs_of_block: _ComputeExtraOutputs, *, seed: int = 0, factor: float = 1.0
    ) -> list[_BlockArguments]:
        """Run the model on random tokens; return the arguments of every block.

        Args:
            extra_outputs_of_block: returns the outputs of a block other than its hidden states.
            seed: seed of the tokens.
            factor: the hidden states that a stand-in returns are its input times this factor.

        Raises:
            RefusedError: a block is called twice, or never.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, EMBEDDING_ROWS, (2, SEQUENCE_LENGTH), generator=generator)
        call_order: list[int] = []
        arguments: dict[int, _BlockArguments] = {}

        def override(index: int, states: Tensor, call: Call) -> Any:
            call_order.append(index)
            arguments[index] = _BlockArguments(states, call)
            extra_outputs = extra_outputs_of_block(index, states, call)
            stand_in = self._stand_ins[index]
            stand_in.num_outputs = 0 if extra_outputs is None else 1 + len(extra_outputs)
            return stand_in.wrap_output(states * factor, extra_outputs or ())

        for index, stand_in in enumerate(self._stand_ins):
            stand_in.override = partial(override, index)
        with (
            torch.no_grad(),
            self._recording_last_norm(call_order),
            errors_as_refusals("the model around its blocks"),
        ):
            (find_base_model(self._model) or self._model)(input_ids=ids, use_cache=False)
        if call_order != list(range(len(self.blocks))):
            raise RefusedError(
                f"its {len(self.blocks)} blocks are not called once each, in order: {str(call_order)[:60]}",
                "--method rtn",
            )
        first = arguments[0].states
        self.layout = StateLayout.find(first.shape, 2, SEQUENCE_LENGTH)
        self.hidden = first.shape[-1]
        return [arguments[index] for index in call_order]

    @contextmanager
    def _recording_last_norm(self, call_order: list[int]) -> Iterator[None]:
        """Record the first norm after the last block while the context is active."""

        def record_norm(name: str, *_: object) -> None:
            if len(call_order) == len(self.blocks) and not self.last_norm:
                self.last_norm = name

        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 1:
                    hook = module.register_forward_pre_hook(partial(record_norm, name))
                    stack.callback(hook.remove)
            yield

    def _fill_random(self) -> None:
        for module in self._model.modules():
            for name, value in module.named_parameters(recurse=False):
                shape: tuple[int, ...] = value.shape
                if isinstance(module, nn.Embedding):
                    module.padding_idx = None
                    shape = (min(shape[0], EMBEDDING_ROWS), *shape[1:])
                elif value.numel() > MAX_OUTER_ELEMENTS or module is output_layer(self._model):
                    continue
                real = 0.5 + torch.rand(shape, generator=self._generator)
                setattr(module, name, parameter(real))
