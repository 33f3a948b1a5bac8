"""Map the tensors of a checkpoint to the parameters of the running model, by transformers' rules or by declarations.

Files keep the names of a family's first release; the model that transformers builds today has others, and holds some
tensors in another form: all experts of a layer in one parameter, q, k and v apart. transformers has rules for this,
which it applies whenever it loads: renamings, and converters that stack, join, cut or transpose. Here the same rules
are applied to headers, so that one record says, for every parameter of the running model, of which stored tensors it is
made and how. Nothing is looked up in a table of our own: what transformers does not convert has no place here either.

The rules are read of transformers' objects; what a rule computes is learnt by running it, on tensors with or without
memory, and so are the names and shapes that come of it. Where a rule only puts matrices into a stack, a `Place` says
where each of them lies, so that a stack is filled matrix by matrix.

For a declared family the declarations are the mapping; rules apply only to other towers, which are not declared.
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

from quantforge.architectures import Place, Stack
from quantforge.architectures.match import ModelLayout, Role
from quantforge.errors import InputError
from quantforge.model.skeleton import build
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quantforge.files.reader import Checkpoint

_JOINS = ((), ("Concatenate",))  # what may follow the stacking of experts: gate and up become one
_FAILURES = (
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
    """Stored tensors from which parameters of the running model are made.

    Attributes:
        parameters: their names, with the shapes that the rule gives them.
        stored: names of the stored tensors, in the order in which the rule takes them.
        patterns: of each stored tensor the pattern of the rule that took it; empty where only the name differs.
        rule: transformers' converter, None where only the name differs.
    """

    parameters: Mapping[str, tuple[int, ...]]
    stored: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    rule: Any = None

    @property
    def operations(self) -> tuple[str, ...]:
        """Return the names of transformers' operations in the rule."""
        return tuple(type(item).__name__ for item in self.rule.operations) if self.rule else ()

    def places(self) -> dict[str, Place]:
        """Return the place of each stored expert matrix in a stack, by stored name.

        The stack bears the full name of its parameter. Empty for a rule that does more than to stack.
        """
        steps: Sequence[Any] = self.rule.operations if self.rule else ()
        joins = steps[1:]
        stacks = self.operations[:1] == ("MergeModulelist",) and steps[0].dim == 0
        if not stacks or self.operations[1:] not in _JOINS or len(self.parameters) > 1:
            return {}
        if any(step.dim != 1 or step.num_shards_attribute for step in joins):
            return {}
        order = [text for text in self.rule.source_patterns if text in self.patterns]
        if len(order) != 1 + len(joins) * (len(order) - 1):
            return {}
        (parameter,) = self.parameters
        stack = Stack(parameter, tuple(text.replace("*", "{}") for text in order))
        counts: Counter[str] = Counter()
        found = {}
        for name, pattern in zip(self.stored, self.patterns, strict=True):
            found[name] = Place(stack, order.index(pattern), counts[pattern])
            counts[pattern] += 1
        return found


class WeightMapping:
    """The mapping between the stored tensors of one checkpoint and the parameters of one model.

    Args:
        model: its parameters take no memory, or are there.
        stored: headers of the tensors, to which transformers' rules are applied; or the checkpoint, matched to
            declarations that describe the decoder.

    Attributes:
        sources: what every parameter is made of, by its name; those of one rule share a `WeightSource`.
        left_over: stored tensors that have no place in the model.
        ignored: those among them that the class of the model ignores on purpose.
        tied: parameters that are another one: a tied head, layers that share their weights.
        missing: parameters and kept buffers of the model that are made of nothing and are not tied.
        places: where the stored matrices of experts lie in stacks of the running model, by stored name.
    """

    def __init__(
        self, model: PreTrainedModel, stored: Iterable[StoredTensor] | ModelLayout
    ) -> None:
        self._model = model
        self._wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._runtime: dict[str, str] = {}
        self.sources: dict[str, WeightSource] = {}
        self.places: dict[str, Place] = {}
        if isinstance(stored, ModelLayout):
            self._follow_declarations(stored)
        else:
            self._apply_rules(stored)
        self.left_over = tuple(name for name in self._shapes if name not in self._runtime)
        self.tied = _tied(model, self.sources)
        absent = self._wanted.keys() - self.sources.keys() - self.tied.keys()
        self.missing = tuple(name for name in self._wanted if name in absent)

    def distinct(self) -> Iterator[WeightSource]:
        """Yield the sources, each once."""
        yield from {id(source): source for source in self.sources.values()}.values()

    def shape(self, stored: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return self._shapes[stored]

    def weights(self, stored: str) -> int:
        """Return the number of weights of a stored tensor."""
        return math.prod(self._shapes[stored])

    def runtime(self, stored: str) -> str:
        """Return the parameter that a stored tensor becomes part of (the first of several).

        Raises:
            InputError: it has no place in the model.
        """
        if stored not in self._runtime:
            raise InputError(
                f"tensor {stored!r} has no place in the model",
                "a model of this model_type has no such parameter",
                tensor=stored,
            )
        return self._runtime[stored]

    def turns(self, source: WeightSource) -> bool:
        """Return whether a source is an expert stack that files hold transposed."""
        (_, shape), *more = source.parameters.items()
        if source.operations != ("Transpose",) or more:
            return False
        step = source.rule.operations[0]
        same = step.check_dims and self._shapes[source.stored[0]] == shape  # then nothing is done
        return {step.dim0, step.dim1} == {1, 2} and not same

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return the stored tensors without a place that the model class ignores on purpose."""
        patterns = {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
        patterns |= set(self._model._keys_to_ignore_on_load_unexpected or ())
        return tuple(
            name for name in self.left_over if any(re.search(text, name) for text in patterns)
        )

    def make(self, source: WeightSource, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Compute the parameters of a source; ``read`` returns a stored tensor by name, in any type."""
        if source.rule is None:
            (parameter,) = source.parameters
            return {parameter: read(source.stored[0])}
        first = self._runtime[source.stored[0]]
        return _converted(self._model, source.rule, source.stored, source.patterns, read, first)

    def _apply_rules(self, stored: Iterable[StoredTensor]) -> None:
        """Find the parameter of each stored tensor, as transformers does when it loads."""
        self._shapes = {tensor.name: tensor.shape for tensor in stored}
        found_rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in found_rules if isinstance(rule, core.WeightRenaming)]
        converters = [rule for rule in found_rules if isinstance(rule, core.WeightConverter)]
        by_pattern = {text: rule for rule in converters for text in rule.source_patterns}
        prefix = self._model.base_model_prefix
        wanted = self._model.state_dict()
        taken: dict[str, tuple[Any, list[str], list[str]]] = {}
        for name in sorted(self._shapes, key=core.dot_natural_key):
            found, pattern = core.rename_source_key(name, renamings, converters, prefix, wanted)
            if found not in wanted and name in wanted:
                found, pattern = core.rename_source_key(name, [], [], prefix, wanted)
            if found not in wanted:
                continue
            rule = by_pattern[pattern] if pattern is not None else None
            _, names, patterns = taken.setdefault(found, (rule, [], []))
            names.append(name)
            patterns.append(pattern or "")
        for first, (rule, names, patterns) in taken.items():
            self._add(first, rule, names, patterns)
        for source in self.distinct():
            self.places |= source.places()

    def _follow_declarations(self, model_layout: ModelLayout) -> None:
        """Find the parameter of each stored tensor by the family's declarations; of tensors of towers by rules."""
        if getattr(self._model.config, "text_config", None) is not None:
            towers = WeightMapping(self._model, [tensor.header for tensor in model_layout.foreign])
            self.sources |= towers.sources
            self._runtime |= towers._runtime
            self._shapes |= {name: towers.shape(name) for name in towers._runtime}
        stacks: dict[str, list[str]] = defaultdict(list)
        for tensor in model_layout.tensors:
            if tensor.role is Role.FOREIGN:
                continue
            self._shapes[tensor.header.name] = tensor.header.shape
            if tensor.expert >= 0:
                place = self.places[tensor.header.name] = model_layout.place(tensor)
                block = model_layout.block_name(tensor.block)
                stacks[f"{block}.{place.stack.parameter}"].append(tensor.header.name)
            elif tensor.name in self._wanted:
                self._add(tensor.name, None, [tensor.header.name], [""])
        for parameter, stored in stacks.items():
            self.sources[parameter] = WeightSource(
                {parameter: self._wanted[parameter]}, tuple(stored)
            )
            self._runtime |= dict.fromkeys(stored, parameter)

    def _add(self, first: str, rule: Any, names: list[str], patterns: list[str]) -> None:
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
            made = _converted(self._model, rule, names, patterns, empty.__getitem__, first)
            shapes = {name: tuple(value.shape) for name, value in made.items()}
            source = WeightSource(shapes, tuple(names), tuple(patterns), rule)
        for parameter, shape in source.parameters.items():
            self._check(parameter, shape, source)
            self.sources[parameter] = source
        self._runtime |= dict.fromkeys(names, first)

    def _check(self, parameter: str, shape: tuple[int, ...], source: WeightSource) -> None:
        wanted = self._wanted.get(parameter)
        if wanted != shape:
            asked = "has no such parameter" if wanted is None else f"asks for {list(wanted)}"
            raise InputError(
                f"tensor {source.stored[0]!r} makes {parameter} {list(shape)}, config.json {asked}",
                "configuration and weights are not of one model",
                tensor=source.stored[0],
            )


def check_whole(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of an undeclared family that lacks parameters of the model that transformers builds.

    Declarations account for every tensor while a run is planned. Without them linears are found by their names, and
    what is not there is not missed; a loader would fill it with random numbers. So the model is built without memory,
    and asked. A checkpoint of which transformers builds no model is left alone.

    Raises:
        InputError: parameters are missing, or have another shape than the configuration asks for.
    """
    try:
        model = build(checkpoint.config)
    except InputError:
        return
    names = WeightMapping(model, [entry.header() for entry in checkpoint.entries.values()])
    missing = names.missing
    if len(missing) > len(names.sources):
        return  # the checkpoint is of another class of the family, whose names are not these
    if missing:
        raise InputError(
            f"{checkpoint.path}: {len(missing)} parameter(s) are in no file, first: {', '.join(missing[:5])}",
            "a complete checkpoint holds every tensor; fetch the model again",
            file=str(checkpoint.path),
        )


def _converted(
    model: PreTrainedModel,
    rule: Any,
    names: Sequence[str],
    patterns: Sequence[str],
    read: Callable[[str], Tensor],
    first: str,
) -> dict[str, Tensor]:
    """Run a converter on stored tensors; return the parameters that it makes, by name.

    Args:
        model: whose parameters they are.
        rule: transformers' converter.
        names: of the stored tensors.
        patterns: of the rule, one for each of them.
        read: returns a stored tensor by name.
        first: the parameter in which the first of them ends.

    Raises:
        InputError: the converter fails on them.
    """
    own = deepcopy(rule)
    for name, pattern in zip(names, patterns, strict=True):
        own.add_tensor(first, name, pattern, read(name))
    try:
        made = own.convert(first, model=model, config=model.config)
    except _FAILURES as error:
        steps = " and ".join(type(item).__name__ for item in rule.operations)
        raise InputError(
            f"{first}: transformers cannot make it of {len(names)} tensor(s) ({names[0]}) by {steps}: {error}",
            "the checkpoint is not complete, or not of this model",
            tensor=names[0],
        ) from error
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _tied(model: PreTrainedModel, sources: Mapping[str, WeightSource]) -> dict[str, str]:
    """Return the parameters that are absent from files because they are tied to one that is present."""
    groups: dict[str, set[str]] = {}
    for target, origin in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        group = groups.setdefault(origin, {origin})
        group |= groups.pop(target, {target})
        groups[origin] = group
    found: dict[str, str] = {}
    for group in groups.values():
        stored = sorted(group & sources.keys())
        if stored:
            found |= dict.fromkeys(sorted(group - sources.keys()), stored[0])
    return found
