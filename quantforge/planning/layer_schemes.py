"""Schemes of linears in formats that store a model module by module: defaults and substitutes.

A scheme whose group size does not divide a row is replaced by the next smaller usual group size of the same grid that
does, and at last by one scale per row. An unusual group size that divides no row at all is a mistake and is refused. In
a format with one group size for the whole model, all matrices that are to have the same group size get the largest one
that divides all of them. A matrix whose shape cannot hold any of these is kept; a scheme that the format cannot hold in
any shape is refused, with the formats that can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import KEEP, Compatibility, Format, Verdict
from quantforge.formats.refusal_reasons import COMMON_GROUP_SIZES, summarize_names
from quantforge.grids import GRIDS, PerGroup, Row
from quantforge.notation import parse_layer
from quantforge.planning.embedding_choice import tied_rule
from quantforge.planning.format_choice import base_scheme, formats_holding
from quantforge.planning.scheme_rules import (
    QUANTIZABLE,
    ChosenScheme,
    FittedScheme,
    FormatSchemes,
    RequestedScheme,
)
from quantforge.recipe import Recipe
from quantforge.scheme import Activation, LayerScheme, Scheme

Widths = Mapping[int, Sequence[str]]  # names of matrices by their input columns
DIVISIBLE_SIZE = 1024  # every usual group size and block divides its multiples
LEAST_COLUMNS = 8  # one 32-bit word of codes: with fewer, scales take more than is saved


class LayerSchemes(FormatSchemes[LayerScheme | None]):
    """Schemes of a format for the linears of one model; None for a tensor that is kept.

    Args:
        file_format: the format.
        recipe: the recipe.
        model_dtype: F16, BF16 or F32, which scales follow if their type is left open.
        tied: whether the head is tied to the embedding.
    """

    def __init__(
        self, file_format: Format, recipe: Recipe, model_dtype: str, *, tied: bool
    ) -> None:
        self._format, self._model_dtype = file_format, model_dtype
        self._rounds_embedding = tied and file_format.INFO.quantizes_tied_embedding
        self._rounds_heads = recipe.mtp == "quantize"
        self._scale_type = file_format.default_scale_type(model_dtype)
        base = base_scheme(file_format, recipe)
        self.base = None if base == KEEP else parse_layer(base)
        self._requested_shapes: dict[
            LayerScheme, list[tuple[int, int]]
        ] = {}  # shapes of matrices, by requested scheme
        self._fits: dict[
            tuple[LayerScheme, tuple[int, int]], list[tuple[LayerScheme, Compatibility]]
        ] = {}  # cached: many thousands of experts share a few shapes
        self._widths_by_group: dict[int, Widths] = {}  # by requested group size

    def share_groups(self, decisions: Iterable[tuple[MatchedTensor, LayerScheme | None]]) -> None:
        """Give matrices with the same requested group size one size that divides all, if files store only one.

        Matrices that no group size divides are left out. If no size divides all others, each gets its own, and the
        mixture of sizes is refused later.
        """
        if not self._format.INFO.single_group_size:
            return
        widths_by_group: dict[int, dict[int, list[str]]] = {}
        for tensor, layer in decisions:
            if (
                layer is not None
                and (group := _group(layer.weight))
                and self._has_group(layer, tensor)
            ):
                widths = widths_by_group.setdefault(group, {})
                widths.setdefault(_matrix(tensor)[1], []).append(tensor.header.name)
        self._fits.clear()
        self._widths_by_group = {
            group: widths
            for group, widths in widths_by_group.items()
            if group in COMMON_GROUP_SIZES
            or len(_undivided(group, widths)) < len(widths)  # else `check_groups` refuses it
            if any(not _undivided(size, widths) for size in _size_and_smaller(group))
        }

    def _has_group(self, layer: LayerScheme, tensor: MatchedTensor) -> bool:
        """Return whether a matrix can have groups of the requested size or smaller."""
        return any(
            _group(candidate.weight) and compatibility.verdict is not Verdict.IMPOSSIBLE
            for candidate, compatibility in self._candidate_fits(layer, _matrix(tensor))
        )

    def from_request(self, tensor: MatchedTensor, request: RequestedScheme) -> LayerScheme | None:
        """Return the requested scheme unchanged."""
        del tensor
        return request.scheme

    def default(self, tensor: MatchedTensor) -> ChosenScheme[LayerScheme | None]:
        """Return the scheme of all linears (and of a tied embedding if the format quantizes it); keep all else."""
        if (
            tensor.role is Role.LINEAR
            and tensor.header.shape[not tensor.transposed] < LEAST_COLUMNS
        ):
            return ChosenScheme(None, f"fewer than {LEAST_COLUMNS} input columns: kept")
        if tensor.role is Role.LINEAR:
            return ChosenScheme(self.base, "default")
        if tensor.role is Role.EMBEDDING and self._rounds_embedding:
            return ChosenScheme(self.base, tied_rule(self._format))
        if tensor.draft_head:
            layer = self.base if self._rounds_heads and tensor.shared_input else None
            return ChosenScheme(
                layer, f"predicts further tokens: {'--mtp quantize' if layer else 'kept'}"
            )
        return ChosenScheme(None, f"{tensor.role.value} kept")

    def fit_to_shape(
        self, tensor: MatchedTensor, layer: LayerScheme | None
    ) -> FittedScheme[LayerScheme | None]:
        """Return the scheme with its scale type, or the next finer scheme that fits the tensor.

        Raises:
            InputError: tensors of this dtype are not quantized.
            RefusedError: the format can hold neither; formats that can are named.
        """
        if layer is None:
            return FittedScheme(None)
        if tensor.header.dtype not in QUANTIZABLE:
            raise InputError(
                f"{tensor.header.name}: type {tensor.header.dtype} cannot be quantized",
                f"quantizable: {', '.join(QUANTIZABLE)}",
                tensor=tensor.header.name,
            )
        matrix = _matrix(tensor)
        self._requested_shapes.setdefault(layer, []).append(matrix)
        reason = ""
        for candidate, compatibility in self._candidate_fits(layer, matrix):
            if compatibility.verdict is not Verdict.IMPOSSIBLE:
                change = f"{layer.weight} -> {candidate.weight}" if reason else ""
                return FittedScheme(candidate, change, reason)
            reason = reason or compatibility.reason
        other_formats = formats_holding(layer, matrix, self._model_dtype)
        any_shape_fit = self._fit_for_any_shape(layer, matrix)
        if any_shape_fit.verdict is Verdict.IMPOSSIBLE:  # in every shape
            reason, other_formats = (
                any_shape_fit.reason,
                other_formats or formats_holding(layer, None, self._model_dtype),
            )
        module = tensor.header.name.removesuffix(".weight")
        raise RefusedError(
            f"{tensor.header.name}: {layer} does not fit {self._format.KEY}: {reason}",
            f"--format {' or '.join(other_formats)} holds it"
            if other_formats
            else f"add --ignore '{module}', or choose another scheme",
            tensor=tensor.header.name,
        )

    def check_groups(self) -> None:
        """Refuse an unusual group size that divides the columns of none of the linears that it was requested for.

        Raises:
            UsageError: naming the group sizes that divide most.
        """
        for layer, matrices in self._requested_shapes.items():
            group = layer.weight.granularity
            if not isinstance(group, PerGroup) or group.size in COMMON_GROUP_SIZES:
                continue
            if any(columns % group.size == 0 for _, columns in matrices):
                continue
            widths = ", ".join(map(str, sorted({columns for _, columns in matrices})))
            raise UsageError(
                f"scheme {layer}: groups of {group.size} divide the columns of no linear ({widths})",
                self._groups_that_fit(layer, matrices),
            )

    def _groups_that_fit(self, layer: LayerScheme, matrices: Sequence[tuple[int, int]]) -> str:
        """Return a hint that names the usual group sizes that most linears can have, or one scale per row."""

        def count_fitting(size: int) -> int:
            scheme = replace(layer.weight.with_scale(self._scale_type), granularity=PerGroup(size))
            group_verdicts = (
                self._check(scheme, layer.input, matrix).verdict for matrix in matrices
            )
            return sum(verdict is not Verdict.IMPOSSIBLE for verdict in group_verdicts)

        counts = {size: count_fitting(size) for size in COMMON_GROUP_SIZES}
        max_count = max(counts.values())
        fitting_groups = [
            f"g{size}" for size, count in counts.items() if max_count and count == max_count
        ]
        return (
            f"groups that fit: {', '.join(fitting_groups)}"
            if fitting_groups
            else "one scale for each row: row"
        )

    def unquantized_fallback(
        self, tensor: MatchedTensor, layer: LayerScheme | None
    ) -> FittedScheme[LayerScheme | None] | None:
        """Return that a tensor is kept if the format holds its scheme, but nothing similar in this shape."""
        if layer is None or tensor.header.dtype not in QUANTIZABLE or len(tensor.header.shape) != 2:
            return None
        rows, columns = _matrix(tensor)
        candidate_fits = [
            compatibility for _, compatibility in self._candidate_fits(layer, (rows, columns))
        ]
        scheme = layer.weight.with_scale(self._scale_type)
        if (
            any(compatibility.verdict is not Verdict.IMPOSSIBLE for compatibility in candidate_fits)
            or self._fit_for_any_shape(layer, (rows, columns)).verdict is Verdict.IMPOSSIBLE
        ):
            return None
        row_scheme = replace(scheme, granularity=Row())
        row_fit = self._format.INFO.single_group_size and self._check(
            row_scheme, layer.input, (rows, columns)
        )
        row_fits = row_fit and row_fit.verdict is not Verdict.IMPOSSIBLE
        text = f"{row_scheme.grid}:{row_scheme.granularity}:{row_scheme.zero}"
        hint = f"; --scheme {text} holds it, with one scale for each row of all"
        return FittedScheme(
            None, f"{layer.weight} -> kept", candidate_fits[0].reason + (hint if row_fits else "")
        )

    def _fit_for_any_shape(self, layer: LayerScheme, matrix: tuple[int, int]) -> Compatibility:
        """Judge a scheme for a larger shape that everything divides, to exclude the effect of the shape."""
        step = math.lcm(DIVISIBLE_SIZE, _group(layer.weight) or 1)
        rows, columns = (-(-size // step) * step for size in matrix)
        return self._check(layer.weight.with_scale(self._scale_type), layer.input, (rows, columns))

    def _candidate_fits(
        self, layer: LayerScheme, matrix: tuple[int, int]
    ) -> list[tuple[LayerScheme, Compatibility]]:
        """Return the scheme and finer substitutes for a matrix, each with how it fits."""
        fits = self._fits.get((layer, matrix))
        if fits is None:
            widths = self._widths_by_group.get(_group(layer.weight), {})
            fits = [
                (LayerScheme(scheme, layer.input), self._fit(scheme, layer.input, matrix, widths))
                for scheme in _candidates(
                    layer.weight.with_scale(self._scale_type), matrix[1], widths
                )
            ]
            self._fits[layer, matrix] = fits
        return fits

    def _fit(
        self,
        scheme: Scheme,
        activation: Activation | None,
        matrix: tuple[int, int],
        widths: Widths,
    ) -> Compatibility:
        """Judge whether a matrix can have a scheme, and so can all matrices that have to share its group size."""
        compatibility, size = self._check(scheme, activation, matrix), _group(scheme)
        if compatibility.verdict is Verdict.IMPOSSIBLE or not (
            undivided := _undivided(size, widths)
        ):
            return compatibility
        columns, names = next(iter(undivided.items()))
        reason = (
            f"one group size for the whole model in {self._format.KEY}, and {columns} input columns"
        )
        reason += f" ({summarize_names(names)}) are no multiple of {size}"
        return Compatibility(Verdict.IMPOSSIBLE, reason)

    def _check(
        self, scheme: Scheme, activation: Activation | None, matrix: tuple[int, int]
    ) -> Compatibility:
        size = scheme.group_size(matrix[1])
        if matrix[1] % size:
            return Compatibility(
                Verdict.IMPOSSIBLE, f"{matrix[1]} input columns are no multiple of {size}"
            )
        return self._format.check_layer(LayerScheme(scheme, activation), matrix)


def _candidates(scheme: Scheme, columns: int, shared_widths: Widths) -> list[Scheme]:
    """Return the scheme, then smaller groups if its own do not divide the columns, then one scale per row.

    The columns are those of the matrix and of all matrices that have to share its group size; the latter get no scale
    per row.
    """
    schemes = [scheme]
    if (group := _group(scheme)) and _undivided(group, {columns: (), **shared_widths}):
        if GRIDS[scheme.grid].has_parameters:
            schemes += [
                replace(scheme, granularity=PerGroup(size)) for size in _size_and_smaller(group)[1:]
            ]
        if scheme.integer and not shared_widths:
            schemes.append(replace(scheme, granularity=Row()))
    return schemes


def _matrix(tensor: MatchedTensor) -> tuple[int, int]:
    """Return the shape (out, in) of a linear."""
    rows, columns = tensor.header.shape[::-1] if tensor.transposed else tensor.header.shape
    return rows, columns


def _group(scheme: Scheme) -> int:
    """Return the group size of a scheme, 0 without groups."""
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else 0


def _size_and_smaller(group: int) -> list[int]:
    """Return a group size, then the usual sizes that are smaller."""
    return [group, *(size for size in COMMON_GROUP_SIZES if size < group)]


def _undivided(size: int, widths: Widths) -> dict[int, Sequence[str]]:
    """Return the widths that a group size does not divide, with the names of their matrices."""
    return {columns: names for columns, names in widths.items() if columns % size}
