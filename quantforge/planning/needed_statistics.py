"""Statistics that calibration has to collect for a plan (for the method, static ranges and the KV cache).

Recipes that cannot be calibrated as they ask are refused here, including an importance file that does not have what the
method needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantforge.architectures.match import MEASURED_INPUTS, ModelLayout, needs_architecture
from quantforge.errors import RefusedError, UsageError
from quantforge.grids import GGML_BLOCKS
from quantforge.model.statistics import Statistic, statistics_for_inputs
from quantforge.planning.peak_memory import spread_experts
from quantforge.planning.weight_traffic import experts_per_token
from quantforge.plans import Action
from quantforge.quantizers import RTN, is_data_free, needs, parse_method, source_transforms
from quantforge.recipe import NO_DATA, Recipe

if TYPE_CHECKING:
    from quantforge.planning.partial_plan import PartialPlan

_RTN_ALONE = (RTN,)  # a method that only rounds to nearest


@dataclass(frozen=True, slots=True)
class NeededStatistics:
    """Decides which statistics calibration collects for a recipe, and refuses impossible requests."""

    recipe: Recipe

    @property
    def method_words(self) -> tuple[str, ...]:
        """Return the names of the transforms and of the rounder, in order."""
        transforms, rounder = parse_method(self.recipe.method)
        return (*transforms, rounder)

    @property
    def is_data_free(self) -> bool:
        """Return whether the method is a rounder alone, and one that needs no statistics."""
        return len(self.method_words) == 1 and is_data_free(self.method_words[0])

    @property
    def needs_declarations(self) -> bool:
        """Return whether the method or KV cache needs to know which linears read the same activation."""
        return not self.is_data_free or self.recipe.kv_cache != "none"

    @property
    def declarations_needed_by(self) -> str:
        """Return the name of what needs declarations, for `needs_architecture`."""
        return MEASURED_INPUTS if self.is_data_free else self.recipe.method

    @property
    def has_importance_file(self) -> bool:
        """Return whether the importance of columns comes from a file."""
        return self.recipe.calibration.importance_file is not None

    def for_method(self, model_layout: ModelLayout) -> frozenset[Statistic]:
        """Return the statistics that the method uses, as far as this model and recipe allow.

        Raises:
            InputError: the family is not declared, and the method needs its declaration.
            UsageError: an importance file is given that the method cannot use.
        """
        needed = needs(self.recipe.method, importance=self.recipe.rounding.weighs)
        if model_layout.architecture is None:
            if not self.is_data_free:
                raise needs_architecture(model_layout, self.recipe.method)
            needed = frozenset()  # nothing is known of activations
        if self.is_data_free and (
            self.has_importance_file or self.recipe.calibration.source == NO_DATA
        ):
            needed = frozenset()  # importance is from a file, or all columns are alike
        if self.has_importance_file:
            self._refuse_imatrix(needed)
        return needed

    def for_plan(
        self,
        model_layout: ModelLayout,
        partial_plan: PartialPlan,
        method_needs: frozenset[Statistic],
    ) -> frozenset[Statistic]:
        """Return the statistics to collect: those of the method if anything is quantized, and those of ranges.

        Args:
            model_layout: the model.
            partial_plan: actions on all tensors.
            method_needs: the result of `for_method`.

        Raises:
            UsageError: the method has nothing to do or no text, an importance file has no effect, or ggml's quantizer
                does not know a type.
            InputError: ranges have to be measured, and the family is not declared.
            RefusedError: there is no text to measure ranges on, or tokens pass through several experts that read inputs
                weighted by the router.
        """
        needed = self._if_quantized(partial_plan, method_needs) | self._for_ranges(
            model_layout, partial_plan
        )
        routed_to = experts_per_token(model_layout)
        if (needed or self.recipe.prune_experts) and routed_to > 1 and spread_experts(model_layout):
            raise RefusedError(
                f"a token is sent to {routed_to} experts (num_experts_per_tok), each of which reads what"
                " its router has weighed: they are calibrated where a token has one",
                "--method rtn --calibration none, which observes nothing",
                subject="config.json",
            )
        return needed

    def _if_quantized(
        self, partial_plan: PartialPlan, statistics: frozenset[Statistic]
    ) -> frozenset[Statistic]:
        """Return the ``statistics`` statistics if the plan quantizes anything, else none."""
        if self.recipe.scales == "reference":
            self._refuse_reference(partial_plan)
        if not any(t.action is Action.QUANTIZE or t.sparse for t in partial_plan.tensors):
            if self.method_words != _RTN_ALONE:
                raise UsageError(
                    f"--method {self.recipe.method}: nothing is rounded in {partial_plan.label}",
                    "leave --method out, or ask for fewer bits",
                )
            if self.has_importance_file:
                raise UsageError(
                    f"--imatrix: nothing is rounded in {partial_plan.label}",
                    "leave --imatrix out, or ask for fewer bits",
                )
            return frozenset()  # nothing is quantized
        if statistics and self.recipe.calibration.source == NO_DATA:
            raise UsageError(
                f"--method {self.recipe.method} observes what the layers read, and --calibration is {NO_DATA}",
                "give a text to calibrate on, --calibration builtin for instance, or take --method rtn",
            )
        return statistics

    def _for_ranges(
        self, model_layout: ModelLayout, partial_plan: PartialPlan
    ) -> frozenset[Statistic]:
        """Return the statistics for static ranges, outlier columns and KV cache, whatever the method uses."""
        inputs = [tensor.scheme.input for tensor in partial_plan.tensors if tensor.scheme]
        needed = (
            statistics_for_inputs(inputs)
            if any(activation.needs_calibration for activation in inputs if activation)
            else frozenset()
        )
        if self.recipe.kv_cache != "none":
            needed |= {Statistic.CACHE}
        if not needed:
            return needed
        if model_layout.architecture is None:
            raise needs_architecture(model_layout, MEASURED_INPUTS)
        if self.recipe.calibration.source == NO_DATA:
            raise RefusedError(
                f"static ranges, outlier columns and the KV cache have to be measured, and --calibration is {NO_DATA}",
                "give a text to calibrate on, or take dynamic inputs (int8:row:sym+int8:token:dynamic)"
                " and no --kv-cache",
            )
        return needed

    def _refuse_imatrix(self, statistics: frozenset[Statistic]) -> None:
        """Refuse an importance file (mean squares of inputs) for all but the scale search of plain rounding."""
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
        if statistics:
            raise UsageError(
                f"--imatrix: {' and '.join(self._words_without_rtn)} observes more of the inputs than the"
                " mean squares that such a file holds",
                "leave --imatrix out: the calibration text gives the importance too; or --method rtn",
            )

    def _refuse_reference(self, partial_plan: PartialPlan) -> None:
        """Refuse ggml's own quantizer for all but plain rounding into ggml's types."""
        if self.method_words != _RTN_ALONE:
            raise UsageError(
                f"--scales reference: llama.cpp rounds plainly, without {' or '.join(self._words_without_rtn)}",
                "--method rtn, or leave --scales out",
            )
        schemes = (tensor.scheme.weight for tensor in partial_plan.tensors if tensor.scheme)
        unknown = next((scheme for scheme in schemes if scheme.grid not in GGML_BLOCKS), None)
        if unknown is not None:
            raise UsageError(
                f"--scales reference: llama.cpp has no quantizer for {unknown}",
                "--format gguf, or leave --scales out",
            )

    @property
    def _words_without_rtn(self) -> tuple[str, ...]:
        return tuple(method for method in self.method_words if method not in _RTN_ALONE)
