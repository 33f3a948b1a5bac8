"""Map the tensors of a checkpoint to the parameters of the running model, by transformers' rules or by declarations.

Files keep the names of a family's first release. The model that transformers builds today has other names and holds
some
tensors in another layout: all experts of a layer in one parameter, q, k and v separately. transformers has rules for
this that it applies when it loads: renamings, and converters that stack, join, split or transpose. Here the same rules
are applied to headers, so that each parameter of the running model has a record of its stored tensors and its
conversion. QuantForge has no table of its own: what transformers does not convert is not mapped here either.

The rules are taken from transformers' objects. What a rule computes is found by running it, on tensors with or without
memory; so are the resulting names and shapes. If a rule only stacks matrices, a `StackSlice` gives the position of each
of them, so that a stack can be filled matrix by matrix. For a declared family the declarations are the mapping; rules
apply only to other towers, which are not declared.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import core_model_loading as core
from transformers.conversion_mapping import get_model_conversion_mapping

from quantforge.architectures import Stack, StackSlice
from quantforge.architectures.match import ModelLayout, Role
from quantforge.errors import InputError
from quantforge.model.skeleton import build_skeleton
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.files.reader import Checkpoint

# What may follow the stacking of experts: gate and up become one
_OPERATIONS_AFTER_STACKING = ((), ("Concatenate",))
_CONVERTER_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Stored tensors from which parameters of the running model are computed.

    Attributes:
        parameters: names of the parameters, with the shapes that the rule gives them.
        stored: names of the stored tensors, in the order in which the rule takes them.
        patterns: for each stored tensor the pattern of the rule that matched it; empty if only the name differs.
        rule: transformers' converter; None if only the name differs.
    """

    parameters: Mapping[str, tuple[int, ...]]
    stored: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    rule: Any = None

    @property
    def operations(self) -> tuple[str, ...]:
        """Return the names of transformers' operations in the rule."""
        return tuple(type(item).__name__ for item in self.rule.operations) if self.rule else ()

    def expert_places(self) -> dict[str, StackSlice]:
        """Return the position of each stored expert matrix in a stack, by stored name.

        The stack has the full name of its parameter. Empty for a rule that does more than stacking.
        """
        steps: Sequence[Any] = self.rule.operations if self.rule else ()
        later_steps = steps[1:]
        is_stacking = self.operations[:1] == ("MergeModulelist",) and steps[0].dim == 0
        if (
            not is_stacking
            or self.operations[1:] not in _OPERATIONS_AFTER_STACKING
            or len(self.parameters) > 1
        ):
            return {}
        if any(step.dim != 1 or step.num_shards_attribute for step in later_steps):
            return {}
        order = [text for text in self.rule.source_patterns if text in self.patterns]
        if len(order) != 1 + len(later_steps) * (len(order) - 1):
            return {}
        (parameter,) = self.parameters
        stack = Stack(parameter, tuple(text.replace("*", "{}") for text in order))
        counts: Counter[str] = Counter()
        stack_slices = {}
        for name, pattern in zip(self.stored, self.patterns, strict=True):
            stack_slices[name] = StackSlice(stack, order.index(pattern), counts[pattern])
            counts[pattern] += 1
        return stack_slices


class WeightMapping:
    """The mapping between the stored tensors of one checkpoint and the parameters of one model.

    Args:
        model: the model, with or without weights.
        stored: headers of the tensors, to which transformers' rules are applied; or a checkpoint matched to
            declarations of its decoder.

    Attributes:
        sources: the `WeightSource` of every parameter, by name; parameters of one rule share it.
        unused: stored tensors that belong to no parameter.
        ignored: those among them that the model class ignores on purpose.
        tied: parameters that equal another one (a tied head, layers that share weights), with its name.
        missing: parameters and persistent buffers of the model that have no source and are not tied.
        expert_places: positions of stored expert matrices in stacks of the running model, by stored name.
    """

    def __init__(
        self, model: PreTrainedModel, stored: Iterable[StoredTensor] | ModelLayout
    ) -> None:
        self._model = model
        self._expected_shapes = {
            name: tuple(value.shape) for name, value in model.state_dict().items()
        }
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parameter_names: dict[str, str] = {}
        self.sources: dict[str, WeightSource] = {}
        self.expert_places: dict[str, StackSlice] = {}
        if isinstance(stored, ModelLayout):
            self._apply_declarations(stored)
        else:
            self._apply_transformers_rules(stored)
        self.unused = tuple(name for name in self._shapes if name not in self._parameter_names)
        self.tied = _tied_parameters(model, self.sources)
        absent = self._expected_shapes.keys() - self.sources.keys() - self.tied.keys()
        self.missing = tuple(name for name in self._expected_shapes if name in absent)

    def distinct_sources(self) -> Iterator[WeightSource]:
        """Yield each source once."""
        yield from {id(source): source for source in self.sources.values()}.values()

    def shape(self, stored: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return self._shapes[stored]

    def numel(self, stored: str) -> int:
        """Return the number of elements of a stored tensor."""
        return math.prod(self._shapes[stored])

    def parameter_name(self, stored: str) -> str:
        """Return the parameter that a stored tensor becomes part of (the first of several).

        Raises:
            InputError: it belongs to no parameter of the model.
        """
        if stored not in self._parameter_names:
            raise InputError(
                f"tensor {stored!r} has no place in the model",
                "a model of this model_type has no such parameter",
                tensor=stored,
            )
        return self._parameter_names[stored]

    def is_transposed(self, source: WeightSource) -> bool:
        """Return whether a source is an expert stack that files store transposed."""
        (_, shape), *other_parameters = source.parameters.items()
        if source.operations != ("Transpose",) or other_parameters:
            return False
        step = source.rule.operations[0]
        # Nothing is transposed in this case
        is_noop = step.check_dims and self._shapes[source.stored[0]] == shape
        return {step.dim0, step.dim1} == {1, 2} and not is_noop

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the unused stored tensors that the model class ignores on purpose."""
        patterns = {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
        patterns |= set(self._model._keys_to_ignore_on_load_unexpected or ())
        return tuple(
            name for name in self.unused if any(re.search(text, name) for text in patterns)
        )

    def compute(
        self, source: WeightSource, read_tensor: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Compute the parameters of a source; ``read_tensor`` returns a stored tensor by name, in any dtype."""
        if source.rule is None:
            (parameter,) = source.parameters
            return {parameter: read_tensor(source.stored[0])}
        first = self._parameter_names[source.stored[0]]
        return _run_converter(
            self._model, source.rule, source.stored, source.patterns, read_tensor, first
        )

    def _apply_transformers_rules(self, stored: Iterable[StoredTensor]) -> None:
        """Find the parameter of each stored tensor with transformers' renaming and conversion rules."""
        self._shapes = {tensor.name: tensor.shape for tensor in stored}
        found_rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in found_rules if isinstance(rule, core.WeightRenaming)]
        converters = [rule for rule in found_rules if isinstance(rule, core.WeightConverter)]
        by_pattern = {text: rule for rule in converters for text in rule.source_patterns}
        prefix = self._model.base_model_prefix
        expected = self._model.state_dict()
        collected: dict[str, tuple[Any, list[str], list[str]]] = {}
        for name in sorted(self._shapes, key=core.dot_natural_key):
            renamed, pattern = core.rename_source_key(name, renamings, converters, prefix, expected)
            if renamed not in expected and name in expected:
                renamed, pattern = core.rename_source_key(name, [], [], prefix, expected)
            if renamed not in expected:
                continue
            rule = by_pattern[pattern] if pattern is not None else None
            _, names, patterns = collected.setdefault(renamed, (rule, [], []))
            names.append(name)
            patterns.append(pattern or "")
        for first, (rule, names, patterns) in collected.items():
            self._add_source(first, rule, names, patterns)
        for source in self.distinct_sources():
            self.expert_places |= source.expert_places()

    def _apply_declarations(self, model_layout: ModelLayout) -> None:
        """Find the parameter of each stored tensor by declarations, or by rules for tensors of towers."""
        if getattr(self._model.config, "text_config", None) is not None:
            towers = WeightMapping(
                self._model, [tensor.header for tensor in model_layout.foreign_tensors]
            )
            self.sources |= towers.sources
            self._parameter_names |= towers._parameter_names
            self._shapes |= {name: towers.shape(name) for name in towers._parameter_names}
        stacks: dict[str, list[str]] = defaultdict(list)
        for tensor in model_layout.tensors:
            if tensor.role is Role.FOREIGN:
                continue
            self._shapes[tensor.header.name] = tensor.header.shape
            if tensor.expert >= 0:
                expert_slice = self.expert_places[tensor.header.name] = model_layout.expert_slice(
                    tensor
                )
                block = model_layout.block_name(tensor.block)
                stacks[f"{block}.{expert_slice.stack.parameter}"].append(tensor.header.name)
            elif tensor.name in self._expected_shapes:
                self._add_source(tensor.name, None, [tensor.header.name], [""])
        for parameter, stored in stacks.items():
            self.sources[parameter] = WeightSource(
                {parameter: self._expected_shapes[parameter]}, tuple(stored)
            )
            self._parameter_names |= dict.fromkeys(stored, parameter)

    def _add_source(self, first: str, rule: Any, names: list[str], patterns: list[str]) -> None:
        if rule is None:
            if len(names) > 1:
                raise InputError(
                    f"{' and '.join(names[:2])} are both {first}",
                    "every tensor has to be in exactly one file",
                    tensor=names[1],
                )
            source = WeightSource({first: self._shapes[names[0]]}, tuple(names))
        else:
            empty = {name: torch.empty(self._shapes[name], device="meta") for name in names}
            converted = _run_converter(self._model, rule, names, patterns, empty.__getitem__, first)
            shapes = {name: tuple(value.shape) for name, value in converted.items()}
            source = WeightSource(shapes, tuple(names), tuple(patterns), rule)
        for parameter, shape in source.parameters.items():
            self._check(parameter, shape, source)
            self.sources[parameter] = source
        self._parameter_names |= dict.fromkeys(names, first)

    def _check(self, parameter: str, shape: tuple[int, ...], source: WeightSource) -> None:
        expected = self._expected_shapes.get(parameter)
        if expected != shape:
            expectation = (
                "has no such parameter" if expected is None else f"asks for {list(expected)}"
            )
            raise InputError(
                f"tensor {source.stored[0]!r} makes {parameter} {list(shape)}, config.json {expectation}",
                "configuration and weights are not of one model",
                tensor=source.stored[0],
            )


def check_no_missing_parameters(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of an undeclared family that lacks parameters of the model that transformers builds.

    For declared families, planning already accounts for every tensor. Without declarations linears are found by name,
    and a missing tensor would go unnoticed; a loader would fill it with random numbers. A checkpoint for which
    transformers
    builds no model is not checked.

    Raises:
        InputError: parameters are missing, or have another shape than the configuration requires.
    """
    try:
        model = build_skeleton(checkpoint.config)
    except InputError:
        return
    names = WeightMapping(
        model, [entry.to_stored_tensor() for entry in checkpoint.entries.values()]
    )
    missing_names = names.missing
    if len(missing_names) > len(names.sources):
        return  # the checkpoint is of another class of the family, whose names are not these
    if missing_names:
        raise InputError(
            f"{len(missing_names)} parameter(s) are in no file, first: {', '.join(missing_names[:5])}",
            "a complete checkpoint holds every tensor; fetch the model again",
            file=str(checkpoint.path),
            subject=str(checkpoint.path),
        )


def _run_converter(
    model: PreTrainedModel,
    rule: Any,
    names: Sequence[str],
    patterns: Sequence[str],
    read_tensor: Callable[[str], Tensor],
    first: str,
) -> dict[str, Tensor]:
    """Run a converter on stored tensors; return the resulting parameters by name.

    Args:
        model: the model of the parameters.
        rule: transformers' converter.
        names: names of the stored tensors.
        patterns: the matching pattern of the rule for each of them.
        read_tensor: returns a stored tensor by name.
        first: the parameter that the first of them becomes part of.

    Raises:
        InputError: the converter fails.
    """
    rule_copy = deepcopy(rule)
    for name, pattern in zip(names, patterns, strict=True):
        rule_copy.add_tensor(first, name, pattern, read_tensor(name))
    try:
        converted = rule_copy.convert(first, model=model, config=model.config)
    except _CONVERTER_ERRORS as error:
        steps = " and ".join(type(item).__name__ for item in rule.operations)
        raise InputError(
            f"{first}: transformers cannot make it of {len(names)} tensor(s) ({names[0]}) by {steps}: {error}",
            "the checkpoint is not complete, or not of this model",
            tensor=names[0],
        ) from error
    return {
        name: value[0] if isinstance(value, list) else value for name, value in converted.items()
    }


def _tied_parameters(model: PreTrainedModel, sources: Mapping[str, WeightSource]) -> dict[str, str]:
    """Return the parameters that are not in files because they are tied to one that is, with its name."""
    groups: dict[str, set[str]] = {}
    for target, origin in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        group = groups.setdefault(origin, {origin})
        group |= groups.pop(target, {target})
        groups[origin] = group
    tied: dict[str, str] = {}
    for group in groups.values():
        stored = sorted(group & sources.keys())
        if stored:
            tied |= dict.fromkeys(sorted(group - sources.keys()), stored[0])
    return tied
