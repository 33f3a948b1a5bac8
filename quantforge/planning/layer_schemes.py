"""Schemes of linears in a format that stores module by module: the default, and finer ones where groups do not divide.

A scheme whose groups do not divide a row is replaced by the next smaller group of the same grid that does, at last by
one scale per row; an unusual group that divides none of the rows that it was asked for is a mistake, and refused. A
matrix in whose shape a format holds none of these is kept; a scheme that it holds in no shape is refused, with the
formats that would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.formats import KEEP, Fit, Format, Verdict
from quantforge.formats.format_choice import base_scheme, holders
from quantforge.grids import GRIDS, PerGroup, Row
from quantforge.notation import parse_layer
from quantforge.planning.choice import QUANTIZABLE, Decision, Fitted
from quantforge.planning.embedding_choice import tied_rule
from quantforge.planning.rules import Choice
from quantforge.recipe import LayerChoices
from quantforge.scheme import Activation, LayerScheme, Scheme

SMALLER_GROUPS = (128, 64, 32, 16)
WHOLE = 1024  # a shape of multiples of it has a place wherever its scheme has one
LEAST_COLUMNS = 8  # a word of codes: with fewer, scales take more than is saved


class LayerSchemes:
    """Schemes of a format for the linears of one model; None for a tensor that is kept.

    Args:
        form: the format.
        wanted: what the recipe says.
        model_dtype: F16, BF16 or F32: scales whose type is left open may follow it.
        tied: whether the head is the embedding.
    """

    def __init__(self, form: Format, wanted: LayerChoices, model_dtype: str, *, tied: bool) -> None:
        self._form, self._model_dtype = form, model_dtype
        self._rounds_embedding = tied and bool(form.ABOUT.embedding_tool)
        self._rounds_heads = wanted.mtp == "quantize"
        self._scale = form.scale_type(model_dtype)
        base = base_scheme(form, wanted)
        self.base = None if base == KEEP else parse_layer(base)
        self._asked: dict[
            LayerScheme, list[tuple[int, int]]
        ] = {}  # matrices by what they were to hold
        self._judged: dict[
            tuple[LayerScheme, tuple[int, int]], list[tuple[LayerScheme, Fit]]
        ] = {}  # hundreds of thousands of experts have a handful of shapes

    def stated(self, tensor: MatchedTensor, choice: Choice) -> LayerScheme | None:
        """Return the scheme as it is asked for."""
        del tensor
        return choice.scheme

    def default(self, tensor: MatchedTensor) -> Decision[LayerScheme | None]:
        """Return the scheme of all linears, and of a tied embedding where the format rounds it; all else is kept."""
        if (
            tensor.role is Role.LINEAR
            and tensor.stored.shape[not tensor.transposed] < LEAST_COLUMNS
        ):
            return Decision(None, f"fewer than {LEAST_COLUMNS} input columns: kept")
        if tensor.role is Role.LINEAR:
            return Decision(self.base, "default")
        if tensor.role is Role.EMBEDDING and self._rounds_embedding:
            return Decision(self.base, tied_rule(self._form))
        if tensor.further:
            form = self.base if self._rounds_heads and tensor.shared else None
            return Decision(
                form, f"predicts further tokens: {'--mtp quantize' if form else 'kept'}"
            )
        return Decision(None, f"{tensor.role.value} kept")

    def fitted(self, tensor: MatchedTensor, form: LayerScheme | None) -> Fitted[LayerScheme | None]:
        """Return the scheme with the type of its scales, or the next finer one that fits.

        Raises:
            InputError: the tensor has a type that is not quantized.
            RefusedError: the format holds neither; formats that do are named.
        """
        if form is None:
            return Fitted(None)
        rows, columns = tensor.stored.shape[::-1] if tensor.transposed else tensor.stored.shape
        if tensor.stored.dtype not in QUANTIZABLE:
            raise InputError(
                f"{tensor.stored.name}: type {tensor.stored.dtype} cannot be quantized",
                f"quantizable: {', '.join(QUANTIZABLE)}", tensor=tensor.stored.name,
            )  # fmt: skip
        self._asked.setdefault(form, []).append((rows, columns))
        reason = ""
        for found, fit in self._near(form, (rows, columns)):
            if fit.verdict is not Verdict.IMPOSSIBLE:
                change = f"{form.weight} -> {found.weight}" if reason else ""
                return Fitted(found, change, reason)
            reason = reason or fit.reason
        others = holders(form, (rows, columns), self._model_dtype)
        module = tensor.stored.name.removesuffix(".weight")
        raise RefusedError(
            f"{tensor.stored.name}: {form} does not fit {self._form.KEY}: {reason}",
            f"--format {' or '.join(others)} holds it"
            if others
            else f"add --ignore '{module}', or choose another scheme",
            tensor=tensor.stored.name,
        )

    def check_groups(self) -> None:
        """Refuse a group that divides the columns of no linear it was asked for, unless every recipe names such.

        Raises:
            UsageError: naming the groups that divide most.
        """
        for form, matrices in self._asked.items():
            group = form.weight.granularity
            if not isinstance(group, PerGroup) or group.size in SMALLER_GROUPS:
                continue
            if any(columns % group.size == 0 for _, columns in matrices):
                continue
            widths = ", ".join(map(str, sorted({columns for _, columns in matrices})))
            raise UsageError(
                f"scheme {form}: groups of {group.size} divide the columns of no linear ({widths})",
                self._groups_that_fit(form, matrices),
            )

    def _groups_that_fit(self, form: LayerScheme, matrices: Sequence[tuple[int, int]]) -> str:
        """Return a hint that names the usual groups which most linears hold, or one scale for each row."""

        def held(size: int) -> int:
            scheme = replace(form.weight.stored_as(self._scale), granularity=PerGroup(size))
            fits = (self._check(scheme, form.input, matrix).verdict for matrix in matrices)
            return sum(fit is not Verdict.IMPOSSIBLE for fit in fits)

        counts = {size: held(size) for size in SMALLER_GROUPS}
        most = max(counts.values())
        fitting = [f"g{size}" for size, count in counts.items() if most and count == most]
        return (
            f"groups that fit: {', '.join(fitting)}" if fitting else "one scale for each row: row"
        )

    def left(
        self, tensor: MatchedTensor, form: LayerScheme | None
    ) -> Fitted[LayerScheme | None] | None:
        """Return that a tensor is kept where the format holds its scheme, but nothing near it in this shape."""
        if form is None or tensor.stored.dtype not in QUANTIZABLE or len(tensor.stored.shape) != 2:
            return None
        rows, columns = tensor.stored.shape[::-1] if tensor.transposed else tensor.stored.shape
        fits = [fit for _, fit in self._near(form, (rows, columns))]
        even = (-(-rows // WHOLE) * WHOLE, -(-columns // WHOLE) * WHOLE)
        if (
            any(fit.verdict is not Verdict.IMPOSSIBLE for fit in fits)
            or self._near(form, even)[0][1].verdict is Verdict.IMPOSSIBLE
        ):
            return None
        return Fitted(None, f"{form.weight} -> kept", fits[0].reason)

    def _near(self, form: LayerScheme, matrix: tuple[int, int]) -> list[tuple[LayerScheme, Fit]]:
        """Return the scheme and finer ones that a matrix may get, each with how it fits."""
        found = self._judged.get((form, matrix))
        if found is None:
            schemes = _candidates(form.weight.stored_as(self._scale), matrix[1])
            found = [
                (LayerScheme(scheme, form.input), self._check(scheme, form.input, matrix))
                for scheme in schemes
            ]
            self._judged[form, matrix] = found
        return found

    def _check(self, scheme: Scheme, activation: Activation | None, matrix: tuple[int, int]) -> Fit:
        size = scheme.group_size(matrix[1])
        if matrix[1] % size:
            return Fit(Verdict.IMPOSSIBLE, f"{matrix[1]} input columns are no multiple of {size}")
        return self._form.check(LayerScheme(scheme, activation), matrix)


def _candidates(scheme: Scheme, columns: int) -> list[Scheme]:
    """Return the scheme, then finer groups where its own do not divide the columns, then one scale per row."""
    found = [scheme]
    if isinstance(scheme.granularity, PerGroup) and columns % scheme.granularity.size:
        smaller = [size for size in SMALLER_GROUPS if size < scheme.granularity.size]
        if GRIDS[scheme.grid].free:
            found += [replace(scheme, granularity=PerGroup(size)) for size in smaller]
        if scheme.integer:
            found.append(replace(scheme, granularity=Row()))
    return found
