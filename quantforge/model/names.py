"""Names of tensors in files, and in the running model: one bridge, by transformers' own rules.

Files keep the names of a family's first release; the model that transformers builds today has others, and holds some
tensors in another form: all experts of a layer in one parameter, q, k and v apart. transformers has rules for this,
which it applies whenever it loads: renamings, and converters that stack, join, cut or transpose. Here the same rules
are applied to headers, so that one record says, for every parameter of the running model, of which stored tensors it is
made and how. Nothing is looked up in a table of our own: what transformers does not convert has no place here either.

The rules are read of transformers' objects; what a rule computes is learnt by running it on tensors without memory,
and so are the names and shapes that come of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import core_model_loading as core
from transformers.conversion_mapping import get_model_conversion_mapping

from quantforge.architectures import Place
from quantforge.errors import InputError
from quantforge.model.conversion import Source, converted
from quantforge.plans import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Names", "Source"]


class Names:
    """The bridge between the stored tensors of one checkpoint and the parameters of one model.

    Attributes:
        sources: what every parameter is made of, by its name; those of one rule share a `Source`.
        left_over: stored tensors that have no place in the model.
        ignored: those among them that the class of the model ignores on purpose.
        tied: parameters that are another one: a tied head, layers that share their weights.
        missing: parameters and kept buffers of the model that are made of nothing and are not tied.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[StoredTensor]) -> None:
        self._model = model
        self._wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        self._shapes = {tensor.name: tensor.shape for tensor in stored}
        self._runtime: dict[str, str] = {}
        self.sources: dict[str, Source] = {}
        self._resolve()
        self.left_over = tuple(name for name in self._shapes if name not in self._runtime)
        self.tied = _tied(model, self.sources)
        absent = self._wanted.keys() - self.sources.keys() - self.tied.keys()
        self.missing = tuple(name for name in self._wanted if name in absent)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Return where the stored matrices of experts lie in stacks of the running model, by stored name."""
        found: dict[str, Place] = {}
        for source in self.distinct():
            found |= source.places()
        return found

    def distinct(self) -> Iterator[Source]:
        """Yield the sources, each once."""
        yield from {id(source): source for source in self.sources.values()}.values()

    def shape(self, stored: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor."""
        return self._shapes[stored]

    def weights(self, stored: str) -> int:
        """Return the number of weights of a stored tensor."""
        return math.prod(self._shapes[stored])

    def runtime(self, stored: str) -> str:
        """Return the parameter in which a stored tensor ends (the first of several).

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

    def turns(self, source: Source) -> bool:
        """Return whether a source is a stack of matrices that files hold transposed."""
        (_, shape), *more = source.parameters.items()
        if source.operations != ("Transpose",) or more:
            return False
        step = source.rule.operations[0]
        same = step.check_dims and self._shapes[source.stored[0]] == shape  # then nothing is done
        return {step.dim0, step.dim1} == {1, 2} and not same

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return stored tensors without a place that the class of the model ignores on purpose."""
        patterns = {r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}
        patterns |= set(self._model._keys_to_ignore_on_load_unexpected or ())
        return tuple(
            name for name in self.left_over if any(re.search(text, name) for text in patterns)
        )

    def make(self, source: Source, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the parameters of a source, computed of its stored tensors, which ``read`` returns in any type."""
        if source.rule is None:
            (parameter,) = source.parameters
            return {parameter: read(source.stored[0])}
        first = self._runtime[source.stored[0]]
        return converted(self._model, source.rule, source.stored, source.patterns, read, first)

    def _resolve(self) -> None:
        """Find the parameter of each stored tensor, as transformers does when it loads."""
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

    def _add(self, first: str, rule: Any, names: list[str], patterns: list[str]) -> None:
        if rule is None:
            if len(names) > 1:
                raise InputError(
                    f"{' and '.join(names[:2])} are both {first}",
                    "every tensor has to be in exactly one file",
                    tensor=names[1],
                )
            source = Source({first: self._shapes[names[0]]}, tuple(names))
        else:
            empty = {name: torch.empty(self._shapes[name], device="meta") for name in names}
            made = converted(self._model, rule, names, patterns, empty.__getitem__, first)
            shapes = {name: tuple(value.shape) for name, value in made.items()}
            source = Source(shapes, tuple(names), tuple(patterns), rule)
        for parameter, shape in source.parameters.items():
            self._check(parameter, shape, source)
            self.sources[parameter] = source
        self._runtime |= dict.fromkeys(names, first)

    def _check(self, parameter: str, shape: tuple[int, ...], source: Source) -> None:
        wanted = self._wanted.get(parameter)
        if wanted != shape:
            asked = "has no such parameter" if wanted is None else f"asks for {list(wanted)}"
            raise InputError(
                f"tensor {source.stored[0]!r} makes {parameter} {list(shape)}, config.json {asked}",
                "configuration and weights are not of one model",
                tensor=source.stored[0],
            )


def _tied(model: PreTrainedModel, sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the parameters that are in no file because they are another one, which is."""
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
