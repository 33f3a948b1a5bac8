"""Declarations of one family of models: all that QuantForge knows about it, as data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import Dimensions, read_dimensions
from quantforge.architectures.layer_kind import FoldKind, LayerKind, Parameter
from quantforge.architectures.layer_windows import NO_WINDOWS, WindowRule
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.errors import InputError

if TYPE_CHECKING:
    from quantforge.architectures.projector import Projector

Rows = slice | list[int]
Config = Mapping[str, Any]
# Source of a size of a family: configuration keys, of which the first present one counts, or a function.
SizeSource = tuple[str, ...] | Callable[[Config], int]
_RTN_HINT = "--method rtn works without the architecture's declarations"


@dataclass(frozen=True, slots=True)
class Derivation:
    """Facts of one derived model; for a declared family they are computed from the configuration instead.

    Attributes:
        source: the code that was run, e.g. ``transformers 5.23.0, GPTNeoXForCausalLM``.
        dimensions: the sizes.
        kinds: the name of every layer's kind.
        tied: whether the head is tied to the embedding.
        unobserved: modules of blocks with a matrix whose input was never observed, relative to the block.
    """

    source: str
    dimensions: Dimensions
    kinds: tuple[str, ...]
    tied: bool = False
    unobserved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """Declarations of one family of models: all that QuantForge knows about it.

    Attributes:
        model_type: the key in ``config.json``.
        blocks: name of the list of decoder blocks, e.g. ``model.layers``.
        outer_parameters: tensors outside of the blocks.
        kinds: the kinds of layers: the tensors of a block, and which of its linears read the same activation.
        layer_kind_names: returns the name of each layer's kind for a (text) configuration with the family's defaults;
            None if there is only one kind.
        extra_layer_types: values that ``layer_types`` may contain besides the names of ``kinds``.
        loads_single_experts: whether transformers also loads experts stored one by one, for a family that publishes
            them stacked.
        has_weight_conversion: whether the running model joins or splits stored tensors other than the matrices of
            experts.
        joined_tensors: tensors of a block that some files hold joined, as the running model does, by canonical name,
            with the parts in order that other files hold instead.
        embedding: module name of the token embedding.
        head: module name of the output projection.
        final_norm: module name of the norm before it.
        prefixes: prefixes under which checkpoints store the canonical names; each is (stored, canonical).
        unmapped_prefixes: by ``model_type`` of the whole configuration, a regular expression for the start of stored
            names that QuantForge reads but transformers does not find: it would fill the parameters with random
            numbers.
        droppable_patterns: regular expressions (full match on the stored name) of tensors that are dropped on purpose.
        foreign_patterns: regular expressions (full match on the stored name) of tensors of another tower, kept
            unchanged.
        required_values: configuration values that the declarations rely on; anything else is refused.
        unsupported_setting: returns, for a configuration with the family's defaults, another setting that the
            declarations do not cover, "" if they cover it; None if there are no such settings.
        sizes: dimensions specific to the family, each with its source; ``{"ffn": ...}`` overrides a common one.
        slices: sizes of the row slices of fused projections, e.g. ``{"self_attn.qkv_proj": ("q", "kv", "kv")}``. Slices
            that cover only a part of the rows repeat, as q, k and v of one head after another.
        slice_labels: names of these slices, e.g. ``("q", "k", "v")``.
        centred_norms: norms subtract the mean of the channels although they have no bias.
        transposed: linears are stored ``[in_features, out_features]`` (gpt2's Conv1D).
        defaults: configuration values of the family for keys missing in ``config.json``.
        allows_float16: whether engines may compute the family in float16 (gemma overflows).
        text_config: key of the nested configuration of the text decoder in multimodal checkpoints.
        decoders_by_type: declarations that replace these, by the ``model_type`` of the text configuration ("" if it has
            none).
        gguf: how llama.cpp implements the family; None if no GGUF file of it is written.
        model_type_with_layer_types: the ``model_type`` under which transformers has to read a configuration with
            ``layer_types``, by its own ``model_type``.
        windows: which layers use sliding-window attention.
        projector: by ``model_type``, a function that returns, for a whole configuration, the vision tower and projector
            as llama.cpp reads them (`quantforge.architectures.projector`).
        graph: how QuantForge's own decoder computes the blocks; None if transformers computes them.
        needs_model_replay: whether block arguments other than the hidden states depend on the tokens or on earlier
            blocks, so that the model's code around the blocks runs for every row: always, never, or if one of these
            configuration keys is true.
        num_streams: number of hidden states per token between two blocks.
        fused_attention: whether attention has a fused kernel; soft-capped scores have none and take memory twice.
        derivation: facts of a single model whose declarations were derived by running its code.
    """

    model_type: str
    blocks: str
    outer_parameters: tuple[Parameter, ...]
    kinds: tuple[LayerKind, ...]
    embedding: str
    head: str
    final_norm: str
    prefixes: tuple[tuple[str, str], ...] = (("", ""),)
    unmapped_prefixes: Mapping[str, str] = field(default_factory=dict)
    droppable_patterns: tuple[str, ...] = (
        r".*rotary_emb\.inv_freq",
        r".*\.self_attn\.[kv]_scale",  # of a quantized KV cache, which this runtime does not read
    )
    foreign_patterns: tuple[str, ...] = ()
    required_values: Mapping[str, object] = field(default_factory=dict)
    unsupported_setting: Callable[[Config], str] | None = None
    slices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slice_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    centred_norms: bool = False
    transposed: bool = False
    allows_float16: bool = True
    text_config: str = ""
    needs_model_replay: bool | tuple[str, ...] = False
    decoders_by_type: Mapping[str, Architecture] = field(default_factory=dict)
    num_streams: int = 1
    fused_attention: bool = True
    gguf: GgufFamily | None = None
    layer_kind_names: Callable[[Config], Sequence[str]] | None = None
    extra_layer_types: tuple[str, ...] = ()
    has_weight_conversion: bool = False
    joined_tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loads_single_experts: bool = False
    sizes: Mapping[str, SizeSource] = field(default_factory=dict)
    derivation: Derivation | None = None
    model_type_with_layer_types: Mapping[str, str] = field(default_factory=dict)
    windows: WindowRule = NO_WINDOWS
    projector: Mapping[str, Callable[[Config], Projector]] = field(default_factory=dict)
    graph: DecoderGraph | None = None

    def check_required_values(self, config: Mapping[str, Any]) -> None:
        """Refuse values of a (text) configuration that the declarations do not support.

        Raises:
            InputError: naming the key, the value and what is supported.
        """
        for key, value in self.required_values.items():
            if config.get(key, value) != value:
                raise InputError(
                    f"{key} = {config[key]!r} is not supported for {self.model_type}",
                    f"supported: {key} = {value!r}; {_RTN_HINT}",
                    subject="config.json",
                )
        if self.unsupported_setting and (
            unsupported := self.unsupported_setting({**self.defaults, **config})
        ):
            raise InputError(
                f"{unsupported} is not supported for {self.model_type}",
                _RTN_HINT,
                subject="config.json",
            )

    def for_config(self, config: Mapping[str, Any]) -> Architecture:
        """Return the declarations without the tensors that do not exist in a (text) configuration."""
        values, keys = {**self.defaults, **config}, self.needs_model_replay
        return replace(
            self,
            outer_parameters=tuple(item for item in self.outer_parameters if item.exists(values)),
            kinds=tuple(kind.for_config(values) for kind in self.kinds),
            needs_model_replay=keys if isinstance(keys, bool) else any(map(values.get, keys)),
        )

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the linears of all kinds of layers, in computing order."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.linears))

    @property
    def linear_rule(self) -> str:
        """Return how linears are identified, as a sentence for a plan."""
        if self.derivation is None:
            return f"linears as declared for {self.model_type}"
        return f"linears of {self.model_type} as derived from the code of {self.derivation.source}"

    @property
    def norm_offset(self) -> float:
        """Return the constant that norms add to their weights: 1.0 for gemma and similar families, else 0.0."""
        scale_folds = (shared.scale_fold for kind in self.kinds for shared in kind.inputs)
        return float(any(item and item.kind is FoldKind.NORM_PLUS_ONE for item in scale_folds))

    @property
    def graph_if_complete(self) -> DecoderGraph | None:
        """Return the graph if it covers every parameter of all kinds of layers, experts included; else None."""
        mixture = any(kind.stacks for kind in self.kinds)
        if self.graph is None or (mixture and not self.graph.supports_experts):
            return None
        names = (item.name for kind in self.kinds for item in kind.parameters)
        return self.graph if all(map(self.graph.covers, names)) else None

    @property
    def renamed_modules(self) -> dict[str, str]:
        """Return modules inside blocks with another stored name: the stored name, mapped to the running name."""
        return {
            item.stored.removesuffix(".weight"): item.name.removesuffix(".weight")
            for kind in self.kinds
            for item in kind.parameters
            if item.stored.endswith(".weight") and not item.repeated_over
            if item.stored != item.name and item.name.endswith(".weight")
        }

    @property
    def publishes_stacked_experts(self) -> bool:
        """Return whether the family publishes all experts of a layer in one tensor."""
        return any(kind.stored_stacks for kind in self.kinds)

    def for_stored_names(self, names: Iterable[str]) -> Architecture:
        """Adapt the declarations to files that store `joined_tensors` instead of their parts."""
        ends = tuple(f".{name}" for name in self.joined_tensors)
        stored_joined = {
            end for name in names if name.endswith(ends) for end in ends if name.endswith(end)
        }
        if not stored_joined:
            return self
        joined_tensors = {
            name: parts
            for name, parts in self.joined_tensors.items()
            if f".{name}" in stored_joined
        }
        return replace(
            self, kinds=tuple(_with_joined_tensors(kind, joined_tensors) for kind in self.kinds)
        )

    def dimensions(self, config: Mapping[str, Any]) -> Dimensions:
        """Read and check the sizes of a (text) configuration; errors as `read_dimensions`."""
        if self.derivation is not None:
            return self.derivation.dimensions
        sizes = {
            name: size_source({**self.defaults, **config}) if callable(size_source) else size_source
            for name, size_source in self.sizes.items()
        }
        types = frozenset(
            layer_type for kind in self.kinds for layer_type in kind.name.split("/") if layer_type
        )
        return read_dimensions(config, self.defaults, sizes, types.union(self.extra_layer_types))

    def layer_kinds(
        self, config: Mapping[str, Any], dimensions: Dimensions
    ) -> tuple[LayerKind, ...]:
        """Return the kind of every layer of a model, with one entry for each expert.

        Raises:
            InputError: the configuration does not determine the kind of every layer; or as `WindowRule.check`.
        """
        self.windows.check(config, dimensions.layers)
        values = {**self.defaults, **config}
        if self.derivation is not None:
            names = self.derivation.kinds
        elif self.layer_kind_names is not None:
            names = tuple(self.layer_kind_names(values))
        else:
            return (self.kinds[0].for_config(values).with_experts(dimensions),) * dimensions.layers
        kinds = {kind.name: kind for kind in self.kinds}
        if len(names) != dimensions.layers or not set(names) <= kinds.keys():
            raise InputError(
                f"the kinds of its {dimensions.layers} layers are {str(names)[:60]}",
                f"each of them {' or '.join(sorted(kinds))}",
                subject="config.json",
            )
        kinds_by_name = {
            name: kinds[name].for_config(values).with_experts(dimensions) for name in set(names)
        }
        return tuple(kinds_by_name[name] for name in names)

    def slice_rows(self, dimensions: Dimensions, linear: str, label: str) -> Rows:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        if not label:
            return slice(None)
        sizes = [dimensions.size(text) for text in self.slices[linear]]
        position = self.slice_labels[linear].index(label)
        first, last, period = sum(sizes[:position]), sum(sizes[: position + 1]), sum(sizes)
        num_rows = self._num_rows(dimensions, linear)
        if num_rows == period:
            return slice(first, last)
        return [row + offset for row in range(0, num_rows, period) for offset in range(first, last)]

    def _num_rows(self, dimensions: Dimensions, linear: str) -> int:
        """Return the number of rows of a linear."""
        parameters = (item for kind in self.kinds for item in kind.parameters)
        shape = next(item.shape for item in parameters if item.name == f"{linear}.weight")
        return dimensions.size(shape[1 if self.transposed else 0])


def _with_joined_tensors(kind: LayerKind, joined: Mapping[str, tuple[str, ...]]) -> LayerKind:
    """Return a layer kind with joined tensors in place of their parts."""
    items = {item.name: item for item in kind.parameters}
    for joined_name, part_names in joined.items():
        part_parameters = [items.pop(part_name) for part_name in part_names if part_name in items]
        if part_parameters:
            rows = "+".join(item.shape[0] for item in part_parameters)
            items[joined_name] = Parameter(joined_name, (rows, *part_parameters[0].shape[1:]))
    return replace(kind, parameters=tuple(items.values()))


def matches_any(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether any regular expression matches the whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
