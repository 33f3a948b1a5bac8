"""One family of models as data: everything that the rest of QuantForge knows about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quantforge.architectures.decoder_graph import DecoderGraph
from quantforge.architectures.dimensions import Dimensions, dimensions_of
from quantforge.architectures.layer_kind import FoldKind, LayerKind, Parameter
from quantforge.architectures.layer_windows import NONE, WindowRule
from quantforge.architectures.llama_cpp import GgufFamily
from quantforge.errors import InputError

if TYPE_CHECKING:
    from quantforge.architectures.projector import Projector

Rows = slice | list[int]
Config = Mapping[str, Any]
# Where a size of a family stands: keys of the configuration, of which the first that is there counts, or a function.
SizePlace = tuple[str, ...] | Callable[[Config], int]
_HINT = "--method rtn works without the architecture's declarations"


@dataclass(frozen=True, slots=True)
class Derivation:
    """Facts of one model that a declared family would compute from the configuration.

    Attributes:
        source: the code that was run, e.g. ``transformers 5.23.0, GPTNeoXForCausalLM``.
        dimensions: the sizes.
        kinds: the name of every layer's kind.
        tied: whether the head is the embedding.
        unobserved: modules of blocks that hold a matrix and are never called with what it reads, relative to the block.
    """

    source: str
    dimensions: Dimensions
    kinds: tuple[str, ...]
    tied: bool = False
    unobserved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Architecture:
    """Everything that the rest of QuantForge knows about one family of models.

    Attributes:
        model_type: the key in ``config.json``.
        blocks: name of the list of decoder blocks, e.g. ``model.layers``.
        outer: tensors outside of the blocks.
        kinds: the kinds of layers: the tensors of a block, and which of its linears read the same activation.
        kind_of: returns, for a (text) configuration with the family's defaults, the name of each layer's kind; None
            where there is one kind.
        other_words: for kinds of layers, that ``layer_types`` may hold beside the names of ``kinds``.
        joins_experts: whether transformers also loads experts one by one of a family that publishes them in one tensor.
        converted: whether the running model joins or cuts tensors of files other than the matrices of experts.
        joined: tensors of a block that files may hold as the running model does, by canonical name, with the parts,
            one after the other, that others hold in their place.
        embedding: module name of the token embedding; ``head`` of the output projection; ``final_norm`` the norm.
        prefixes: prefixes under which checkpoints store the canonical names; each is (stored, canonical).
        unmapped: by ``model_type`` of the whole configuration, a regular expression of the beginnings of names that
            are read here and that transformers does not look for: it would fill the parameters with random numbers.
        droppable: regular expressions (full match on the stored name) of tensors that are left out on purpose.
        foreign: regular expressions (full match on the stored name) of tensors of another tower, kept as they are.
        requires: configuration values that the declarations rely on; anything else is refused.
        uncovered: returns, for a configuration with the family's defaults, what else the declarations do not cover, ""
            where they cover it; None where they cover all.
        sizes: dimensions of the family's own, and where they stand; ``{"ffn": ...}`` overrides a common one.
        slices: rows of fused projections, e.g. ``{"self_attn.qkv_proj": ("q", "kv", "kv")}`` with their labels in
            ``slice_labels`` (``("q", "k", "v")``). Slices that fill a part of the rows are repeated, as q, k and v of
            one head after another.
        centred_norms: norms subtract the mean of the channels, though they have no bias.
        transposed: linears are stored ``[in_features, out_features]`` (gpt2's Conv1D).
        defaults: configuration values of the family where ``config.json`` leaves a key out.
        float16: whether engines may compute the family in float16 (gemma overflows).
        text_config: key of the nested configuration of the text tower in multimodal checkpoints.
        decoders: declarations in the place of these by the ``model_type`` that the text tower states, "" for none.
        gguf: what llama.cpp calls the family; None where no GGUF file of it is written.
        with_layer_types: the ``model_type`` under which transformers has to read a configuration that states
            ``layer_types``, by its own ``model_type``.
        windows: which of its layers look at the last tokens alone.
        projector: by ``model_type``, a function that returns, for a whole configuration, the tower and the projector as
            llama.cpp reads them (`quantforge.architectures.projector`).
        graph: how the own decoder computes its blocks; None: transformers does.
        replayed: what blocks get beside the hidden states depends on the tokens or on earlier blocks, so that the
            model's code around the blocks runs for every row: always, never, or by configuration keys of which one
            must be true.
        streams: hidden states that each token has between two blocks.
        fused_attention: whether scores have a fused kernel; soft-capped ones have none and are held twice.
        derived: for one model alone, found by running its code: its sizes, and the kind of every layer.
    """

    model_type: str
    blocks: str
    outer: tuple[Parameter, ...]
    kinds: tuple[LayerKind, ...]
    embedding: str
    head: str
    final_norm: str
    prefixes: tuple[tuple[str, str], ...] = (("", ""),)
    unmapped: Mapping[str, str] = field(default_factory=dict)
    droppable: tuple[str, ...] = (
        r".*rotary_emb\.inv_freq",
        r".*\.self_attn\.[kv]_scale",  # of a quantized KV cache, which this runtime does not read
    )
    foreign: tuple[str, ...] = ()
    requires: Mapping[str, object] = field(default_factory=dict)
    uncovered: Callable[[Config], str] | None = None
    slices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slice_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    centred_norms: bool = False
    transposed: bool = False
    float16: bool = True
    text_config: str = ""
    replayed: bool | tuple[str, ...] = False
    decoders: Mapping[str, Architecture] = field(default_factory=dict)
    streams: int = 1
    fused_attention: bool = True
    gguf: GgufFamily | None = None
    kind_of: Callable[[Config], Sequence[str]] | None = None
    other_words: tuple[str, ...] = ()
    converted: bool = False
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    joins_experts: bool = False
    sizes: Mapping[str, SizePlace] = field(default_factory=dict)
    derived: Derivation | None = None
    with_layer_types: Mapping[str, str] = field(default_factory=dict)
    windows: WindowRule = NONE
    projector: Mapping[str, Callable[[Config], Projector]] = field(default_factory=dict)
    graph: DecoderGraph | None = None

    def require(self, config: Mapping[str, Any]) -> None:
        """Refuse values of a (text) configuration that the declarations do not cover.

        Raises:
            InputError: naming the key, the value and what is supported.
        """
        for key, value in self.requires.items():
            if config.get(key, value) != value:
                raise InputError(
                    f"config.json: {key} = {config[key]!r} is not supported for {self.model_type}",
                    f"supported: {key} = {value!r}; {_HINT}",
                )
        if self.uncovered and (what := self.uncovered({**self.defaults, **config})):
            raise InputError(f"config.json: {what} is not supported for {self.model_type}", _HINT)

    def configured(self, config: Mapping[str, Any]) -> Architecture:
        """Return the declarations without the tensors that a (text) configuration leaves out."""
        stated, keys = {**self.defaults, **config}, self.replayed
        return replace(
            self,
            outer=tuple(item for item in self.outer if item.exists(stated)),
            kinds=tuple(kind.present(stated) for kind in self.kinds),
            replayed=keys if isinstance(keys, bool) else any(map(stated.get, keys)),
        )

    @property
    def linears(self) -> tuple[str, ...]:
        """Return the linears of all kinds of layers, in computing order."""
        return tuple(dict.fromkeys(name for kind in self.kinds for name in kind.linears))

    @property
    def rule(self) -> str:
        """Return how linears are found, as a sentence."""
        if self.derived is None:
            return f"linears as declared for {self.model_type}"
        return f"linears of {self.model_type} as derived from the code of {self.derived.source}"

    @property
    def norm_offset(self) -> float:
        """Return the constant that norms add to their weights: 1.0 for gemma and the like, else 0.0."""
        scale_folds = (shared.scale_fold for kind in self.kinds for shared in kind.inputs)
        return float(any(item and item.kind is FoldKind.NORM_PLUS_ONE for item in scale_folds))

    @property
    def own_graph(self) -> DecoderGraph | None:
        """Return the graph if it covers all kinds of layers: every parameter has its place, experts too."""
        mixture = any(kind.stacks for kind in self.kinds)
        if self.graph is None or (mixture and not self.graph.experts):
            return None
        names = (item.name for kind in self.kinds for item in kind.parameters)
        return self.graph if all(map(self.graph.knows, names)) else None

    @property
    def renamed(self) -> dict[str, str]:
        """Return modules inside blocks whose names differ: the name in files, mapped to that in the running model."""
        return {
            item.stored.removesuffix(".weight"): item.name.removesuffix(".weight")
            for kind in self.kinds
            for item in kind.parameters
            if item.stored.endswith(".weight") and not item.each
            if item.stored != item.name and item.name.endswith(".weight")
        }

    @property
    def stacks_experts(self) -> bool:
        """Return whether the family publishes all experts of a layer in one tensor."""
        return any(kind.stored_stacks for kind in self.kinds)

    def as_held(self, names: Iterable[str]) -> Architecture:
        """Adapt the declarations to files that hold `joined` tensors in place of their parts."""
        ends = tuple(f".{name}" for name in self.joined)
        held = {end for name in names if name.endswith(ends) for end in ends if name.endswith(end)}
        if not held:
            return self
        joined = {name: parts for name, parts in self.joined.items() if f".{name}" in held}
        return replace(self, kinds=tuple(_joined(kind, joined) for kind in self.kinds))

    def dimensions(self, config: Mapping[str, Any]) -> Dimensions:
        """Read and check the sizes of a (text) configuration; errors as `dimensions_of`."""
        if self.derived is not None:
            return self.derived.dimensions
        sizes = {
            name: where({**self.defaults, **config}) if callable(where) else where
            for name, where in self.sizes.items()
        }
        types = frozenset(word for kind in self.kinds for word in kind.name.split("/") if word)
        return dimensions_of(config, self.defaults, sizes, types.union(self.other_words))

    def layers(self, config: Mapping[str, Any], dimensions: Dimensions) -> tuple[LayerKind, ...]:
        """Return the kind of every layer of a model, with one entry for each expert.

        Raises:
            InputError: the configuration does not say of which kind every layer is; or as `WindowRule.check`.
        """
        self.windows.check(config, dimensions.layers)
        stated = {**self.defaults, **config}
        if self.derived is not None:
            names = self.derived.kinds
        elif self.kind_of is not None:
            names = tuple(self.kind_of(stated))
        else:
            return (self.kinds[0].present(stated).counted(dimensions),) * dimensions.layers
        kinds = {kind.name: kind for kind in self.kinds}
        if len(names) != dimensions.layers or not set(names) <= kinds.keys():
            raise InputError(
                f"config.json: the kinds of its {dimensions.layers} layers are {str(names)[:60]}",
                f"each of them {' or '.join(sorted(kinds))}",
            )
        counted = {name: kinds[name].present(stated).counted(dimensions) for name in set(names)}
        return tuple(counted[name] for name in names)

    def rows(self, dimensions: Dimensions, linear: str, label: str) -> Rows:
        """Return the rows of a slice of a fused linear (``"v"`` of a qkv projection); all rows for an empty label."""
        if not label:
            return slice(None)
        sizes = [dimensions.size(text) for text in self.slices[linear]]
        position = self.slice_labels[linear].index(label)
        first, last, period = sum(sizes[:position]), sum(sizes[: position + 1]), sum(sizes)
        whole = self._rows_of(dimensions, linear)
        if whole == period:
            return slice(first, last)
        return [row + place for row in range(0, whole, period) for place in range(first, last)]

    def _rows_of(self, dimensions: Dimensions, linear: str) -> int:
        """Return the number of rows of a linear."""
        parameters = (item for kind in self.kinds for item in kind.parameters)
        shape = next(item.shape for item in parameters if item.name == f"{linear}.weight")
        return dimensions.size(shape[1 if self.transposed else 0])


def _joined(kind: LayerKind, joined: Mapping[str, tuple[str, ...]]) -> LayerKind:
    """Return a kind of layers with fused tensors in place of the parts that they consist of."""
    items = {item.name: item for item in kind.parameters}
    for whole, parts in joined.items():
        found = [items.pop(part) for part in parts if part in items]
        if found:
            rows = "+".join(item.shape[0] for item in found)
            items[whole] = Parameter(whole, (rows, *found[0].shape[1:]))
    return replace(kind, parameters=tuple(items.values()))


def matches(patterns: tuple[str, ...], name: str) -> bool:
    """Return whether any regular expression matches the whole name."""
    return any(re.fullmatch(pattern, name) for pattern in patterns)
