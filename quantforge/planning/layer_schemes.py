"""Schemes of linears in a format that stores module by module: the default, and finer ones where groups do not divide.

A scheme whose groups do not divide a row is replaced by the next smaller group of the same grid that does, at last by
one scale per row; an unusual group that divides none of the rows that it was asked for is a mistake, and refused. In
a format with one group size for the whole model, matrices that are asked for the same group get the largest one that
divides all of them. A matrix in whose shape a format holds none of these is kept; a scheme that it holds in no shape is
refused, with the formats that would.
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
from quantforge.planning.choice import QUANTIZABLE, Choice, Decision, Fitted, Terms
from quantforge.planning.embedding_choice import tied_rule
from quantforge.planning.format_choice import base_scheme, holders
from quantforge.recipe import Recipe
from quantforge.scheme import Activation, LayerScheme, Scheme

Widths = Mapping[int, Sequence[str]]  # names of matrices by their input columns
WHOLE = 1024  # a shape of multiples of it has a place wherever its scheme has one
LEAST_COLUMNS = 8  # a word of codes: with fewer, scales take more than is saved


class LayerSchemes(Terms[LayerScheme | None]):
    """Schemes of a format for the linears of one model; None for a tensor that is kept.

    Args:
        file_format: the format.
        wanted: what the recipe says.
        model_dtype: F16, BF16 or F32: scales whose type is left open may follow it.
        tied: whether the head is the embedding.
    """

    def __init__(
        self, file_format: Format, wanted: Recipe, model_dtype: str, *, tied: bool
    ) -> None:
        self._format, self._model_dtype = file_format, model_dtype
        self._rounds_embedding = tied and file_format.INFO.quantizes_tied_embedding
        self._rounds_heads = wanted.mtp == "quantize"
        self._scale = file_format.default_scale_type(model_dtype)
        base = base_scheme(file_format, wanted)
        self.base = None if base == KEEP else parse_layer(base)
        self._asked: dict[
            LayerScheme, list[tuple[int, int]]
        ] = {}  # matrices by what they were to hold
        self._judged: dict[
            tuple[LayerScheme, tuple[int, int]], list[tuple[LayerScheme, Compatibility]]
        ] = {}  # hundreds of thousands of experts have a handful of shapes
        self._together: dict[int, Widths] = {}  # by the group that they are asked for

    def share_groups(self, decisions: Iterable[tuple[MatchedTensor, LayerScheme | None]]) -> None:
        """Give matrices that are asked for the same group one that divides all of them, where a file states only one.

        Matrices that no group divides are left out. Where no group divides all others, each gets its own, and the
        mixture is refused later.
        """
        if not self._format.INFO.single_group_size:
            return
        together: dict[int, dict[int, list[str]]] = {}
        for tensor, layer in decisions:
            if (
                layer is not None
                and (group := _group(layer.weight))
                and self._has_group(layer, tensor)
            ):
                widths = together.setdefault(group, {})
                widths.setdefault(_matrix(tensor)[1], []).append(tensor.header.name)
        self._judged.clear()
        self._together = {
            group: widths
            for group, widths in together.items()
            if group in COMMON_GROUP_SIZES
            or len(_odd(group, widths)) < len(widths)  # else `check_groups` refuses it
            if any(not _odd(size, widths) for size in _sizes(group))
        }

    def _has_group(self, layer: LayerScheme, tensor: MatchedTensor) -> bool:
        """Return whether a matrix can have groups of the size that it is asked for, or smaller ones."""
        return any(
            _group(found.weight) and fit.verdict is not Verdict.IMPOSSIBLE
            for found, fit in self._near(layer, _matrix(tensor))
        )

    def stated(self, tensor: MatchedTensor, choice: Choice) -> LayerScheme | None:
        """Return the scheme as it is asked for."""
        del tensor
        return choice.scheme

    def default(self, tensor: MatchedTensor) -> Decision[LayerScheme | None]:
        """Return the scheme of all linears, and of a tied embedding where the format rounds it; all else is kept."""
        if (
            tensor.role is Role.LINEAR
            and tensor.header.shape[not tensor.transposed] < LEAST_COLUMNS
        ):
            return Decision(None, f"fewer than {LEAST_COLUMNS} input columns: kept")
        if tensor.role is Role.LINEAR:
            return Decision(self.base, "default")
        if tensor.role is Role.EMBEDDING and self._rounds_embedding:
            return Decision(self.base, tied_rule(self._format))
        if tensor.draft_head:
            layer = self.base if self._rounds_heads and tensor.shared else None
            return Decision(
                layer, f"predicts further tokens: {'--mtp quantize' if layer else 'kept'}"
            )
        return Decision(None, f"{tensor.role.value} kept")

    def fitted(
        self, tensor: MatchedTensor, layer: LayerScheme | None
    ) -> Fitted[LayerScheme | None]:
        """Return the scheme with the type of its scales, or the next finer one that fits.

        Raises:
            InputError: the tensor has a type that is not quantized.
            RefusedError: the format holds neither; formats that do are named.
        """
        if layer is None:
            return Fitted(None)
        if tensor.header.dtype not in QUANTIZABLE:
            raise InputError(
                f"{tensor.header.name}: type {tensor.header.dtype} cannot be quantized",
                f"quantizable: {', '.join(QUANTIZABLE)}",
                tensor=tensor.header.name,
            )
        matrix = _matrix(tensor)
        self._asked.setdefault(layer, []).append(matrix)
        reason = ""
        for found, fit in self._near(layer, matrix):
            if fit.verdict is not Verdict.IMPOSSIBLE:
                change = f"{layer.weight} -> {found.weight}" if reason else ""
                return Fitted(found, change, reason)
            reason = reason or fit.reason
        others = holders(layer, matrix, self._model_dtype)
        whole = self._whole(layer, matrix)
        if whole.verdict is Verdict.IMPOSSIBLE:  # whatever the shape
            reason, others = whole.reason, others or holders(layer, None, self._model_dtype)
        module = tensor.header.name.removesuffix(".weight")
        raise RefusedError(
            f"{tensor.header.name}: {layer} does not fit {self._format.KEY}: {reason}",
            f"--format {' or '.join(others)} holds it"
            if others
            else f"add --ignore '{module}', or choose another scheme",
            tensor=tensor.header.name,
        )

    def check_groups(self) -> None:
        """Refuse a group that divides the columns of no linear it was asked for, unless every recipe names such.

        Raises:
            UsageError: naming the groups that divide most.
        """
        for layer, matrices in self._asked.items():
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
        """Return a hint that names the usual groups which most linears hold, or one scale for each row."""

        def held(size: int) -> int:
            scheme = replace(layer.weight.with_scale(self._scale), granularity=PerGroup(size))
            fits = (self._check(scheme, layer.input, matrix).verdict for matrix in matrices)
            return sum(fit is not Verdict.IMPOSSIBLE for fit in fits)

        counts = {size: held(size) for size in COMMON_GROUP_SIZES}
        most = max(counts.values())
        fitting = [f"g{size}" for size, count in counts.items() if most and count == most]
        return (
            f"groups that fit: {', '.join(fitting)}" if fitting else "one scale for each row: row"
        )

    def left(
        self, tensor: MatchedTensor, layer: LayerScheme | None
    ) -> Fitted[LayerScheme | None] | None:
        """Return that a tensor is kept where the format holds its scheme, but nothing near it in this shape."""
        if layer is None or tensor.header.dtype not in QUANTIZABLE or len(tensor.header.shape) != 2:
            return None
        rows, columns = _matrix(tensor)
        fits = [fit for _, fit in self._near(layer, (rows, columns))]
        scheme = layer.weight.with_scale(self._scale)
        if (
            any(fit.verdict is not Verdict.IMPOSSIBLE for fit in fits)
            or self._whole(layer, (rows, columns)).verdict is Verdict.IMPOSSIBLE
        ):
            return None
        row = replace(scheme, granularity=Row())
        by_row = self._format.INFO.single_group_size and self._check(
            row, layer.input, (rows, columns)
        )
        other = by_row and by_row.verdict is not Verdict.IMPOSSIBLE
        hint = f"; --scheme {row.grid}:{row.granularity}:{row.zero} holds it, with one scale for each row of all"
        return Fitted(None, f"{layer.weight} -> kept", fits[0].reason + (hint if other else ""))

    def _whole(self, layer: LayerScheme, matrix: tuple[int, int]) -> Compatibility:
        """Judge a scheme for the next larger shape that everything divides: what it says is not of the shape."""
        step = math.lcm(WHOLE, _group(layer.weight) or 1)
        rows, columns = (-(-size // step) * step for size in matrix)
        return self._check(layer.weight.with_scale(self._scale), layer.input, (rows, columns))

    def _near(
        self, layer: LayerScheme, matrix: tuple[int, int]
    ) -> list[tuple[LayerScheme, Compatibility]]:
        """Return the scheme and finer ones that a matrix may get, each with how it fits."""
        found = self._judged.get((layer, matrix))
        if found is None:
            widths = self._together.get(_group(layer.weight), {})
            found = [
                (LayerScheme(scheme, layer.input), self._fit(scheme, layer.input, matrix, widths))
                for scheme in _candidates(layer.weight.with_scale(self._scale), matrix[1], widths)
            ]
            self._judged[layer, matrix] = found
        return found

    def _fit(
        self,
        scheme: Scheme,
        activation: Activation | None,
        matrix: tuple[int, int],
        together: Widths,
    ) -> Compatibility:
        """Judge whether a matrix can have a scheme, and those that have to get the same group can too."""
        fit, size = self._check(scheme, activation, matrix), _group(scheme)
        if fit.verdict is Verdict.IMPOSSIBLE or not (odd := _odd(size, together)):
            return fit
        columns, names = next(iter(odd.items()))
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


def _candidates(scheme: Scheme, columns: int, together: Widths) -> list[Scheme]:
    """Return the scheme, then smaller groups where its own do not divide the columns, then one scale per row.

    The columns are those of the matrix and of all that have to get the same group; these have no scale per row.
    """
    found = [scheme]
    if (group := _group(scheme)) and _odd(group, {columns: (), **together}):
        if GRIDS[scheme.grid].free:
            found += [replace(scheme, granularity=PerGroup(size)) for size in _sizes(group)[1:]]
        if scheme.integer and not together:
            found.append(replace(scheme, granularity=Row()))
    return found


def _matrix(tensor: MatchedTensor) -> tuple[int, int]:
    """Return the shape (out, in) of a linear."""
    rows, columns = tensor.header.shape[::-1] if tensor.transposed else tensor.header.shape
    return rows, columns


def _group(scheme: Scheme) -> int:
    """Return the columns of a group, 0 of a scheme without groups."""
    return scheme.granularity.size if isinstance(scheme.granularity, PerGroup) else 0


def _sizes(group: int) -> list[int]:
    """Return a group size, then the usual ones that are smaller."""
    return [group, *(size for size in COMMON_GROUP_SIZES if size < group)]


def _odd(size: int, widths: Widths) -> dict[int, Sequence[str]]:
    """Return the widths that groups of one size do not divide."""
    return {columns: names for columns, names in widths.items() if columns % size}
