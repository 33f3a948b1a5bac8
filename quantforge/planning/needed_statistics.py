"""Statistics that calibration has to observe for a plan: of the method, of static ranges and of the KV cache.

A recipe that observes and has nothing to observe is refused here, and so is one whose importance comes from a file that
does not hold what the method asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.architectures.match import MEASURED, ModelLayout, needs_architecture
from quantforge.errors import RefusedError, UsageError
from quantforge.grids import GGML_BLOCKS
from quantforge.model.statistics import Statistic, statistics_for_inputs
from quantforge.planning.peak_memory import spread_experts
from quantforge.planning.weight_traffic import chosen_experts
from quantforge.plans import Action
from quantforge.quantizers import RTN, needs, parse_method, source_transforms
from quantforge.recipe import NO_DATA, Recipe

if TYPE_CHECKING:
    from quantforge.planning.draft import Draft

_RTN_ALONE = (RTN,)  # the words of a method that only rounds


@dataclass(frozen=True, slots=True)
class Observation:
    """What a recipe observes."""

    recipe: Recipe

    @property
    def words(self) -> tuple[str, ...]:
        """Return the transforms and the rounder."""
        transforms, rounder = parse_method(self.recipe.method)
        return (*transforms, rounder)

    @property
    def needs_declarations(self) -> bool:
        """Return whether the method or the KV cache has to know which linears read the same activation."""
        return self.words != _RTN_ALONE or self.recipe.kv_cache != "none"

    @property
    def declaring(self) -> str:
        """Return what needs declarations, as `needs_architecture` takes it."""
        return MEASURED if self.words == _RTN_ALONE else self.recipe.method

    @property
    def is_known(self) -> bool:
        """Return whether the importance of columns is known from a file."""
        return self.recipe.calibration.importance_file is not None

    def of_method(self, model_layout: ModelLayout) -> frozenset[Statistic]:
        """Return what the method needs to be observed, as far as this model and this recipe let it be.

        Raises:
            InputError: the family is not declared, and the method needs to know it.
            UsageError: an importance matrix is given, and does not help.
        """
        wanted = needs(self.recipe.method, importance=self.recipe.rounding.weighs)
        if model_layout.architecture is None:
            if self.words != _RTN_ALONE:
                raise needs_architecture(model_layout, self.recipe.method)
            wanted = frozenset()  # nothing is known of activations
        if self.words == _RTN_ALONE and (
            self.is_known or self.recipe.calibration.source == NO_DATA
        ):
            wanted = frozenset()  # importance is from a file, or all columns are alike
        if self.is_known:
            self._refuse_imatrix(wanted)
        return wanted

    def of_draft(
        self, model_layout: ModelLayout, draft: Draft, of_method: frozenset[Statistic]
    ) -> frozenset[Statistic]:
        """Return what has to be observed for a draft: what the method needs if anything is rounded, and ranges.

        Raises:
            UsageError: the method has nothing to do or to see, an importance matrix helps nothing, or ggml's quantizer
                does not know a type.
            InputError: ranges are measured of a family that is not declared.
            RefusedError: there is no text to measure them on; or each token would pass several experts whose inputs the
                router weighs.
        """
        observed = self._if_rounded(draft, of_method) | self._of_ranges(model_layout, draft)
        chosen = chosen_experts(model_layout)
        if (observed or self.recipe.prune_experts) and chosen > 1 and spread_experts(model_layout):
            raise RefusedError(
                f"config.json: a token is sent to {chosen} experts (num_experts_per_tok), each of which reads what its"
                " router has weighed: they are calibrated where a token has one",
                "--method rtn --calibration none, which observes nothing",
            )
        return observed

    def _if_rounded(self, draft: Draft, wanted: frozenset[Statistic]) -> frozenset[Statistic]:
        """Return the ``wanted`` statistics if the draft rounds anything, else none."""
        if self.recipe.scales == "reference":
            self._refuse_reference(draft)
        if not any(t.action is Action.QUANTIZE or t.sparse for t in draft.tensors):
            if self.words != _RTN_ALONE:
                raise UsageError(
                    f"--method {self.recipe.method}: nothing is rounded in {draft.label}",
                    "leave --method out, or ask for fewer bits",
                )
            if self.is_known:
                raise UsageError(
                    f"--imatrix: nothing is rounded in {draft.label}",
                    "leave --imatrix out, or ask for fewer bits",
                )
            return frozenset()  # a mere conversion
        if wanted and self.recipe.calibration.source == NO_DATA:
            raise UsageError(
                f"--method {self.recipe.method} observes what the layers read, and --calibration is {NO_DATA}",
                "give a text to calibrate on, --calibration builtin for instance, or take --method rtn",
            )
        return wanted

    def _of_ranges(self, model_layout: ModelLayout, draft: Draft) -> frozenset[Statistic]:
        """Return what static ranges, outlier columns and the KV cache need, whatever the method needs."""
        inputs = [tensor.scheme.input for tensor in draft.tensors if tensor.scheme]
        wanted = (
            statistics_for_inputs(inputs)
            if any(item.measured for item in inputs if item)
            else frozenset()
        )
        if self.recipe.kv_cache != "none":
            wanted |= {Statistic.CACHE}
        if not wanted:
            return wanted
        if model_layout.architecture is None:
            raise needs_architecture(model_layout, MEASURED)
        if self.recipe.calibration.source == NO_DATA:
            raise RefusedError(
                f"static ranges, outlier columns and the KV cache have to be measured, and --calibration is {NO_DATA}",
                "give a text to calibrate on, or take dynamic inputs (int8:row:sym+int8:token:dynamic)"
                " and no --kv-cache",
            )
        return wanted

    def _refuse_imatrix(self, wanted: frozenset[Statistic]) -> None:
        """Refuse an importance matrix, a file of mean squares, for all but the search for scales of plain rounding."""
        method, scales = self.recipe.method, self.recipe.scales
        if source_transforms(method):
            raise UsageError(
                f"--imatrix: its mean squares are of the model as it was, and --method {method} changes all of it",
                "leave --imatrix out: the calibration text gives the importance too",
            )
        if not self.recipe.rounding.weighs:
            raise UsageError(
                f"--imatrix: --scales {scales} takes them from the weights alone, importance is for a search",
                "--scales search, or leave --imatrix out",
            )
        if wanted:
            raise UsageError(
                f"--imatrix: {' and '.join(self._beside_rounding)} observes more of the inputs than the"
                " mean squares that such a file holds",
                "leave --imatrix out: the calibration text gives the importance too; or --method rtn",
            )

    def _refuse_reference(self, draft: Draft) -> None:
        """Refuse ggml's own quantizer for all but plain rounding into its own types."""
        if self.words != _RTN_ALONE:
            raise UsageError(
                f"--scales reference: llama.cpp rounds plainly, without {' or '.join(self._beside_rounding)}",
                "--method rtn, or leave --scales out",
            )
        schemes = (tensor.scheme.weight for tensor in draft.tensors if tensor.scheme)
        unknown = next((scheme for scheme in schemes if scheme.grid not in GGML_BLOCKS), None)
        if unknown is not None:
            raise UsageError(
                f"--scales reference: llama.cpp has no quantizer for {unknown}",
                "--format gguf, or leave --scales out",
            )

    @property
    def _beside_rounding(self) -> tuple[str, ...]:
        return tuple(word for word in self.words if word not in _RTN_ALONE)
