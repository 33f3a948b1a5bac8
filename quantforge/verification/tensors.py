"""Every tensor of an artifact: readable, finite, and with a source at hand the source's, as far as rounding leaves it.

A difference is an *error* where it is proven that nobody meant it: the tensor is another tensor of the source, or its
own with rows in another order, transposed, off by one code or multiplied by a number; or one part of it is wrong while
all the rest is exactly what rounding the source gives. Everything else that is unusual is a *warning*: more error than
plain rounding of the same tensor loses, in the whole tensor, a row or a column (`quantforge.verification.rounding`).
Nothing is divided by the size of what is compared: a tensor of zeros may stay one.

One block of the artifact and of the source is in memory at a time, of experts one matrix.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantforge.architectures import Absorbs
from quantforge.architectures.match import MatchedTensor, Role
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.errors import InputError, IntegrityError
from quantforge.execution.progress import tell
from quantforge.formats.convert import as_integers
from quantforge.grids import GRIDS, PerGroup, PerTensor, Row
from quantforge.model.tuning_bounds import MOST
from quantforge.packers import packer_of
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Scheme
from quantforge.verification.findings import Report
from quantforge.verification.folds import SAME, TUNED, Folds, folds_of, own_columns
from quantforge.verification.forward import ForwardPass, Inputs
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.ranges import check_cache, check_input
from quantforge.verification.rounding import RoundingError, group_of, measure, plain_rounding

# Largest errors that are usual, in units of plain rounding of the same tensor: of a whole tensor, of a row, and the
# share of the tensor's error that one column may cause. Without inputs they are UNSEEN times as large: GPTQ moves
# weights further than it moves outputs.
WHOLE, ROW, COLUMN = 2.5, 16.0, 0.5
UNSEEN = 3.0
# Relative excess of the median group's scale that is still usual, by bit width (LONG: 4 bits and more), and relative
# shortfall: a search sacrifices outliers to the other weights of a group.
LONGER, LONG = {1: 0.1, 2: 0.08, 3: 0.05}, 0.03
SHORT = 0.08
# Cosine below which a tensor is not the source's, and from which it is the tensor that it resembles.
OTHER, MATCHES = 0.5, 0.8
# Steps of the grid by which the median group is off where zero points or codes are off by one. Without a source: the
# mean of the median group over the mean size of a weight; trained weights are centered on zero.
SHIFTED, OFF_ZERO = 0.7, 0.15
# Tensors that resemble nothing, after which no more others are tried: it is another model.
TRIED = 8
# Gains of a norm, beside the same norm of other blocks, are off by one where a family stores them less one.
OFF_BY_ONE = 0.3
# A tensor was rounded to nearest where in most of its groups nearly all codes are the nearest to the source's weights;
# then a group in which few are, and whose error is so many times that of plain rounding, is damaged.
NEAR, MOSTLY = 0.98, 0.75
FAR, WORSE, WORSE_ROW = 0.5, 4.0, 1.5
# Of its squared error, what is left with another scale where only the scale is wrong; no method chooses a scale that is
# so much too large.
RESCALED, HUGE = 0.25, 4.0
# Codes of a row or column: with fewer, equal ones are chance. A group whose largest weight is so many times that of the
# median group has a damaged scale.
LEAST, LARGEST_PEAK = 32, 2.0**14
# What is stored as it is may differ: relatively, where it was multiplied by a factor in 16 bits; in decibels, where the
# factor was fitted, and where the scales that it was fitted to were tuned; absolutely, what a gain loses that some
# files store less 1.
FOLDED, FITTED, FITTED_TUNED, TINY = 2.0**-7, 30.0, 10.0, 2.0**-23
# Share of further zeros from which a tensor was made sparse, and by how much SparseGPT makes the rest of a row longer.
PRUNED, LENGTH = 0.2, 2.0


class TensorChecks:
    """Checks of the tensors of one artifact, block by block.

    Attributes:
        folded: norms and linears that carry factors which cancel.
        sparse: tensors of which a sparsifier made weights zero, by their stored names.
    """

    def __init__(
        self,
        report: Report,
        artifact: Artifact,
        source: Original | None,
        *,
        device: str = "cpu",
        forward: bool = True,
        plainly: bool = False,
        folded: bool = True,
        tuned: bool = False,
        sparsifier: str = "",
    ) -> None:
        """Check ``artifact``.

        Args:
            report: gets the findings.
            artifact: whose tensors are looked at.
            source: what they are compared with.
            device: where the models run.
            forward: run them.
            plainly: the manifest says that the tensors were rounded to nearest, with scales that cover their range.
            folded: factors may have been moved between tensors.
            tuned: the manifest says that gains of norms were learned.
            sparsifier: the method that made weights zero by the manifest, "" where nobody says.
        """
        self._report, self._artifact, self._source = report, artifact, source
        self._plainly, self._folded = plainly, folded
        self._stored: dict[str, Tensor] = {}  # of the block that is compared, by canonical name
        self._rounded: dict[str, Tensor] = {}
        self._folds = Folds()
        self._norms: set[str] = set()  # of the block that is compared, whose gains may be tuned
        family = artifact.matched.architecture
        self._offset = family.norm_offset if family else 0.0
        self._digests: dict[str, str] = {}
        self._input_scales: dict[str, float] = {}
        self._gains: dict[str, float] = {}  # the median gain of each norm, by its stored name
        self._bad: set[str] = set()  # stored names that cannot be read
        self._tuning = MOST if tuned else TUNED
        self._may_move = sparsifier in {"", "sparsegpt"}
        self.folded: list[str] = []
        self.sparse: list[str] = []
        self._unlike: list[tuple[str, str]] = []
        self._pass = (
            ForwardPass(report, artifact, source, self.stored, self.plain, device)
            if forward
            else None
        )

    def check(self) -> None:
        """Check all tensors, and the logits."""
        matched = self._artifact.matched
        outer = [t for t in matched.tensors if t.block < 0]
        head = [t for t in outer if t.role is Role.HEAD]
        self._check([t for t in outer if t.role is not Role.HEAD])
        if self._pass:
            self._pass.begin()
        self._forget()
        for index in range(matched.blocks):
            tell(matched.block_name(index), index + 1, matched.blocks + 1)
            if self._pass:
                self._pass.source_block(index)
            tensors = [t for t in matched.tensors if t.block == index]
            self._check(tensors, index)
            if self._pass:
                self._pass.other_blocks(index)
            self._forget()
        if self._pass:
            self._pass.end_source()
        self._check(head)
        if self._source is not None:
            self._check_absent(self._source)
        check_cache(self._report, self._artifact.checkpoint, self._inputs.caches)
        self._tell_unlike()
        if self._source is None:
            self._check_gains()
        if self._pass:
            self._pass.finish()
            self._pass.close()

    def stored(self, name: str) -> Tensor | None:
        """Return a weight of the artifact in float32 by canonical name, linears as ``[out, in]``; None without it."""
        if name in self._stored:
            return self._stored[name]
        tensor = self._artifact.matched.by_name.get(name)
        if tensor is None or tensor.stored.name in self._bad:
            return None
        value = self._decoded(tensor)
        if tensor.expert < 0:
            self._stored[name] = value
        return value

    def plain(self, name: str) -> Tensor | None:
        """Return a weight of the source, rounded plainly as the artifact's is; None where it is stored as it is."""
        if name in self._rounded:
            return self._rounded[name]
        tensor = self._artifact.matched.by_name.get(name)
        layout = None if tensor is None else self._artifact.layout(tensor)
        target = self._target(name)
        if layout is None or target is None or target.shape != layout.shape:
            return None
        value = plain_rounding(target, layout.scheme.weight)
        return self._unfolded(name, value)

    @property
    def _inputs(self) -> Inputs:
        return self._pass.inputs if self._pass else Inputs()

    def _forget(self) -> None:
        self._stored.clear()
        self._rounded.clear()

    def _decoded(self, tensor: MatchedTensor) -> Tensor:
        layout = self._artifact.layout(tensor)
        if layout is not None:
            return self._artifact.unpack(layout).decode()
        value = self._artifact.checkpoint.read(tensor.stored.name).float()
        return value.T.contiguous() if tensor.transposed else value

    def _target(self, name: str) -> Tensor | None:
        """Return the source's weight with the factors that were moved into it."""
        if self._source is None:
            return None
        value, (module, _, leaf) = self._source.weight(name), name.rpartition(".")
        if value is None:
            return None
        if value.dim() == 2 and leaf == "weight":
            return self._folds.applied(module, value)
        if leaf == "bias" and module in self._folds.rows:
            return value * self._folds.rows[module]
        if leaf == "bias" and module in self._folds.norms:
            return value * self._folds.norms[module]
        return value

    def _unfolded(self, name: str, value: Tensor) -> Tensor:
        module = name.removesuffix(".weight")
        if module in self._folds.columns:
            value = value / self._folds.columns[module]
        if module in self._folds.rows:
            value = value / self._folds.rows[module][:, None]
        return value

    def _check(self, tensors: list[MatchedTensor], block: int = -1) -> None:
        for tensor in tensors:
            self._check_alone(tensor)
        if self._source is None:
            return
        self._folds, self._norms = Folds(), set()
        if 0 <= block < len(self._artifact.matched.layers):
            name = self._artifact.matched.block_name(block)
            inputs = self._artifact.matched.layers[block].inputs
            absorbers = [shared.absorber for shared in inputs if shared.absorber]
            self._norms = {
                f"{name}.{one.module}" for one in absorbers if one.kind is not Absorbs.ROWS
            }
        if block >= 0 and self._folded and self._artifact.matched.architecture is not None:
            self._folds = folds_of(
                self._artifact.matched, block, self._source.weight, self.stored, self._tuning
            )
        for module, text in self._folds.problems.items():
            self._report.warn("fold", f"{module}.weight", text)
        self.folded += [*self._folds.norms, *self._folds.rows]
        for tensor in tensors:
            if tensor.stored.name not in self._bad:
                self._compare(tensor)

    # checks without a source

    def _check_alone(self, tensor: MatchedTensor) -> None:
        layout, checkpoint, name = (
            self._artifact.layout(tensor),
            self._artifact.checkpoint,
            tensor.stored.name,
        )
        try:
            if layout is None:
                value = checkpoint.read(name)
                scan_finite(name, value)
                if value.dim() == 1 and name.endswith(".weight"):
                    self._gains[name] = float(value.float().median())
                return
            for part in layout.stored:
                if part != name:  # codes, which float types may carry, are decoded below
                    scan_finite(part, checkpoint.read(part))
            found = self._artifact.unpack(layout)
            value = found.decode()
            scan_finite(name, value)
        except (InputError, IntegrityError) as error:
            self._bad.add(name)
            self._report.add(error.fault, error.tensor or name, error.message)
            return
        if tensor.expert < 0:
            self._stored[tensor.name] = value
        for check, text in oddities(found, value) if self._source is None else ():
            self._report.warn(check, layout.module, text)
        self._check_repeated(layout.module, found)

    def _check_gains(self) -> None:
        """Report norms whose gains are one off those of the same norm in other blocks."""
        alike: dict[str, list[str]] = {}
        for name in self._gains:
            alike.setdefault(re.sub(r"\.\d+\.", ".#.", name), []).append(name)
        for names in alike.values():
            gains = [self._gains[name] for name in names]
            for index, name in enumerate(names):
                off = off_by_one(gains, index)
                if off:
                    size = "larger" if off > 0 else "smaller"
                    text = f"its gains are {abs(off):.2f} {size} than those of this norm in the blocks beside it"
                    self._report.warn("kept-changed", name, text)

    def _check_repeated(self, module: str, found: QuantizedTensor) -> None:
        """Report codes or scales that equal another tensor's bit for bit."""
        for what, value in (("codes", found.codes), ("scales", found.parameters.get("scales"))):
            if value is None or value.numel() < LEAST:
                continue
            raw = value.contiguous().flatten().view(torch.uint8)
            if len(torch.unique(raw[:4096])) < LEAST // 4:  # scales may well be all alike
                continue
            digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
            other = self._digests.setdefault(f"{what} {digest}", module)
            if other != module and not self._alike(module, other):
                # Without a source, blocks may have been copied on purpose.
                say = self._report.warn if self._source is None else self._report.add
                say("swapped", module, f"its {what} are those of {other}, bit for bit")

    def _alike(self, module: str, other: str) -> bool:
        """Return whether two linears of the source are alike, as in copied blocks, so that their codes may be equal."""
        if self._source is None:
            return False
        names = {t.stored.name: t.name for t in self._artifact.matched.tensors}
        first, second = (
            self._source.weight(names.get(f"{one}.weight", "")) for one in (module, other)
        )
        if first is None or second is None or first.shape != second.shape:
            return False
        return abs(_cosine(first, second)) > MATCHES

    # comparisons with the source

    def _compare(self, tensor: MatchedTensor) -> None:
        target = self._target(tensor.name)
        if target is None:
            if tensor.role is not Role.FOREIGN:
                self._report.add(
                    "kept-changed", tensor.stored.name, "the source has no such tensor"
                )
            return
        layout = self._artifact.layout(tensor)
        shape = tuple(
            layout.shape if layout else tensor.stored.shape[:: -1 if tensor.transposed else 1]
        )
        if shape != tuple(target.shape):
            text = f"its shape is {list(shape)}, the source's is {list(target.shape)}"
            self._report.add("kept-changed", tensor.stored.name, text)
        elif layout is None:
            self._compare_kept(tensor, target)
        else:
            found = self._artifact.unpack(layout)
            module = tensor.name.removesuffix(".weight")
            if found.input is not None and "input_scale" in found.parameters:
                columns = self._folds.columns.get(module)
                check_input(self._report, module, found, self._inputs, columns, self._input_scales)
            self._compare_rounded(tensor, found, target)

    def _compare_rounded(
        self, tensor: MatchedTensor, found: QuantizedTensor, target: Tensor
    ) -> None:
        name, module = tensor.stored.name, tensor.name.removesuffix(".weight")
        value = self.stored(tensor.name)
        assert value is not None
        scheme = rounded_in(found)
        plain = plain_rounding(target, scheme, found.outlier_columns)
        if tensor.expert < 0:
            self._rounded[tensor.name] = self._unfolded(tensor.name, plain)
        inputs = self._inputs.of(module)
        if inputs is not None and module in self._folds.columns:
            inputs = inputs / self._folds.columns[module]
        error = measure(target, value, plain, found, inputs, scheme)
        self._report.tensors.append(_row(name, found, error))
        plainly = self._plainly and tensor.role is Role.LINEAR and not self._folds.touches(module)
        if plainly and not torch.equal(value, plain):
            self._report.add(
                "noise",
                name,
                "is not what rounding the source to nearest gives, which its manifest states",
            )
            return
        more = UNSEEN if inputs is None and tensor.role is Role.LINEAR else 1.0
        texts = [*excesses(error, scheme, more)]
        if (part := damaged_part(target, value, found, error)) is not None:
            text, proven = part
            (self._report.add if proven else self._report.warn)("groups", name, text)
            return
        if abs(error.shift) > SHIFTED:
            text = (
                f"the median group is {error.shift:+.2f} steps of the grid off the source's: zero points or codes are"
                " off by one"
            )
            self._report.add("zero-convention", name, text)
            return
        if not texts:
            return
        if error.whole > WHOLE and (reason := self._explained(tensor, value, target, error)):
            self._report.add("swapped", name, reason)
            return
        if error.cosine < OTHER:
            self._unlike.append((name, texts[0]))
            return
        for text in texts:
            self._report.warn("noise" if error.whole > WHOLE else "groups", name, text)

    def _explained(
        self,
        tensor: MatchedTensor,
        value: Tensor,
        target: Tensor,
        error: RoundingError,
    ) -> str | None:
        """Say what a matrix is instead of the source's, None where nothing explains it."""
        if error.cosine < MATCHES and len(self._unlike) < TRIED:
            for other in self._candidates(tensor):
                assert self._source is not None
                candidate = self._source.weight(other.name)
                if (
                    candidate is not None
                    and candidate.shape == value.shape
                    and _cosine(candidate, value) > max(MATCHES, error.cosine + 0.1)
                ):
                    return f"holds the weights of {other.stored.name}"
            if (text := _rearranged(value, target)) is not None:
                return text
        usual = error.error / max(error.whole, 1.0) * WHOLE
        size = float((value * value).sum(dtype=torch.float64))
        factor = float((value * target).sum(dtype=torch.float64)) / size if size else 1.0
        if (
            float((factor * value - target).square().sum()) < min(usual, 0.5 * error.error)
            and abs(factor - 1) > 0.02
        ):
            return (
                f"all weights are {1 / factor:.4g} times the source's"
                if factor > 0
                else "all weights have the wrong sign"
            )
        return None

    def _candidates(self, tensor: MatchedTensor) -> Iterator[MatchedTensor]:
        """Yield the tensors that may have been swapped: of the same block first, then the same one of others."""
        leaf = tensor.name.partition(f".{tensor.block}.")[2]
        others = [
            t for t in self._artifact.matched.tensors if t is not tensor and t.role is tensor.role
        ]
        yield from (t for t in others if t.block == tensor.block)
        yield from (t for t in others if t.name.endswith(f".{leaf}") and t.block != tensor.block)

    def _compare_kept(self, tensor: MatchedTensor, target: Tensor) -> None:
        """Compare a tensor that is stored as it is: it is the source's in its own type, with its factors."""
        name, module = tensor.stored.name, tensor.name.rpartition(".")[0]
        if module in self._folds.norms and tensor.name.endswith(".weight"):
            return  # the layers that read it are compared with its factor
        stored = self._artifact.checkpoint.read(name)
        value = stored.T if tensor.transposed else stored
        module_name = tensor.name.removesuffix(".weight")
        if target.dim() == 2 and module_name in self._folds.columns and self._source is not None:
            whole = self._source.weight(tensor.name)
            assert whole is not None
            target = whole * own_columns(
                whole, value.float(), self._folds.columns[module_name], self._tuning
            )
        error = (value.float() - target).abs()
        if module in self._folds.fitted:
            signal, noise = float(target.square().sum()), float(error.square().sum())
            fitted = FITTED if self._tuning < MOST else FITTED_TUNED
            wrong = error > 0 if noise * 10 ** (fitted / 10) > signal else error < 0
        elif module in self._folds.norms or self._folds.touches(module):
            wrong = (error > TINY) & (error > FOLDED * target.abs())
        else:
            wrong = (error > TINY) & ~_is_cast(value, target)
        count = int(wrong.sum())
        if not count:
            return
        place = int((error * wrong).flatten().argmax())
        text = (
            f"{count} of {target.numel()} values are not the source's, for example"
            f" {float(value.flatten()[place]):.5g} in place of {float(target.flatten()[place]):.5g}"
        )
        if float(((value == 0) & (target != 0)).float().mean()) > PRUNED:
            self._compare_sparse(name, value, target)
        elif (other := self._equal(tensor, value)) is not None:
            self._report.add("swapped", name, f"holds the values of {other}")
        elif target.dim() == 1 and self._may_be_tuned(tensor.name, value, target):
            self.folded.append(module)
        elif 2 * count <= target.numel():
            self._report.add("kept-changed", name, text)
        elif target.dim() != 2 or (cosine := _cosine(value.float(), target)) > MATCHES:
            self._report.warn("kept-changed", name, text)
        elif (reason := _rearranged(value.float(), target)) is not None:
            self._report.add("swapped", name, reason)
        elif cosine < OTHER:
            self._unlike.append((name, text))
        else:
            self._report.warn("kept-changed", name, text)

    def _may_be_tuned(self, name: str, value: Tensor, target: Tensor) -> bool:
        """Return whether gains of a norm, or its bias, differ by no more than tuning changes gains."""
        module, _, leaf = name.rpartition(".")
        moved = module in self._folds.norms
        if not moved and (leaf != "weight" or module not in self._norms):
            return False
        least = self._tuning + SAME
        change = (value.float() - target).abs()
        return bool((change <= least * (target + self._offset).abs() + TINY).all())

    def _compare_sparse(self, name: str, value: Tensor, target: Tensor) -> None:
        """Compare what a sparsifier has left of a tensor: it is the source's, or moved a little by SparseGPT."""
        stays = value != 0
        wrong = stays & ~_is_cast(value, target)
        if not bool(wrong.any()):
            self.sparse.append(name)
            return
        found, left = value.float(), target.masked_fill(~stays, 0.0)
        product, own, other = (found * left).sum(-1), found.norm(dim=-1), left.norm(dim=-1)
        bad = product < OTHER * own * other
        bad |= (own > LENGTH * other) | (other > LENGTH * own)
        if self._may_move and not bool(bad.any()):
            self.sparse.append(name)
            return
        text = (
            f"{int(wrong.sum())} of the {int(stays.sum())} nonzero values differ from the source's"
        )
        if bool(bad.any()):
            text += f"; row {int(bad.nonzero()[0])} does not resemble the source's"
        known = not self._may_move or 2 * int(wrong.sum()) <= int(stays.sum())
        (self._report.add if known else self._report.warn)("kept-changed", name, text)

    def _equal(self, tensor: MatchedTensor, value: Tensor) -> str | None:
        """Return the stored name of another tensor of the source that has these values."""
        assert self._source is not None
        for other in self._candidates(tensor):
            candidate = self._source.weight(other.name)
            if (
                candidate is not None
                and candidate.shape == value.shape
                and bool(_is_cast(value, candidate).all())
                and bool((candidate != candidate.flatten()[0]).any())
            ):
                return other.stored.name
        return None

    def _tell_unlike(self) -> None:
        """Report tensors that resemble neither the source's nor others: once where they are most of the model."""
        linears = sum(t.role is Role.LINEAR for t in self._artifact.matched.tensors)
        if 2 * len(self._unlike) > linears:
            first = self._unlike[0][0]
            text = (
                f"and {len(self._unlike) - 1} more tensors do not resemble the source's: the model is in another basis"
                " (rotated), or it is another model; only the logits tell"
            )
            self._report.warn("swapped", first, text)
            return
        for name, _ in self._unlike:
            self._report.warn("swapped", name, "does not resemble the source's tensor of this name")

    def _check_absent(self, source: Original) -> None:
        """Report tensors of the source that the artifact does not have."""
        matched = self._artifact.matched
        head = f"{matched.architecture.head}.weight" if matched.architecture else "lm_head.weight"
        for name, tensor in source.matched.by_name.items():
            if name in matched.by_name or tensor.role is Role.FOREIGN:
                continue
            if name == head and matched.tied:
                text = "tie_word_embeddings is true, and the source has a head of its own"
                self._report.add("configuration", name, text)
            else:
                self._report.add("incomplete", name, "the source has it, the artifact does not")


def rounded_in(found: QuantizedTensor) -> Scheme:
    """Return the scheme that a tensor was rounded by: with longer groups, where its own repeat their parameters.

    An export states one scale of a row, or of a long group, as equal scales of all groups that its format has. Columns
    whose groups are scattered (act-order) are one group.
    """
    if found.scheme.granularity == PerGroup(1):
        return replace(found.scheme, granularity=Row())
    tensor = as_integers(found)
    scheme, shape = tensor.scheme, tensor.scheme.parameter_shape(tensor.shape)
    kept = (tensor.parameters.get(key) for key in ("scales", "zeros", "mins"))
    values = [value.float() for value in kept if value is not None]
    if (
        not scheme.integer
        or not isinstance(scheme.granularity, PerGroup | Row)
        or not values
        or any(tuple(value.shape) != shape for value in values)
    ):
        return found.scheme
    if all(bool((value == value[0, 0]).all()) for value in values):
        return replace(scheme, granularity=PerTensor())
    rows, groups = shape
    for count in range(groups, 1, -1):
        if groups % count == 0 and all(
            bool((runs == runs[..., :1]).all())
            for runs in (value.view(rows, -1, count) for value in values)
        ):
            whole = scheme.group_size(tensor.shape[1]) * count
            return replace(scheme, granularity=Row() if count == groups else PerGroup(whole))
    return found.scheme


def oddities(found: QuantizedTensor, value: Tensor) -> Iterator[tuple[str, str]]:
    """Yield the check and what is odd about a tensor by itself."""
    peaks = value.abs().view(len(value), -1, group_of(found.scheme, value.shape[1])).amax(-1)
    peaks = peaks[peaks > 0]  # scales of groups of zeros mean nothing
    if peaks.numel() and float(peaks.max()) > LARGEST_PEAK * float(peaks.median()):
        text = f"the largest weight is {float(peaks.max()):.3g}, that of the median group {float(peaks.median()):.3g}"
        yield "scale", f"{text}: its scale may be wrong"
    usual = float(value.abs().mean())
    groups = found.scheme.groups(value.shape[1])
    if value.shape[1] % groups == 0 and value.shape[1] // groups >= LEAST // 2:
        means = value.view(len(value), groups, -1).mean(-1)
        if abs(float(means.median())) > OFF_ZERO * usual:
            yield (
                "zero-convention",
                "its weights are not centered on zero: zero points or codes may be off by one",
            )
    codes = found.codes.view(torch.uint8) if found.codes.dtype.is_floating_point else found.codes
    for dim, what in ((0, "column"), (1, "row")):
        if codes.shape[dim] < LEAST or codes.shape[1] != value.shape[1]:
            continue
        constant = (codes.amin(dim) == codes.amax(dim)) & (value.abs().amax(dim) > 0.1 * usual)
        if places := constant.nonzero().flatten().tolist():
            more = f", and {len(places) - 1} more" if len(places) > 1 else ""
            yield "groups", f"{what} {places[0]} has the same code everywhere{more}"


def off_by_one(gains: Sequence[float], index: int) -> float:
    """Return how far one of ``gains``, in the order of blocks, is off the others; 0 where that is not about one.

    Gains may grow with depth: each is compared with those beside it, and only where the others agree in that way.
    """
    others = [*gains[:index], *gains[index + 1 :]]
    if len(others) < 3:
        return 0.0
    off = gains[index] - _between(gains, index)
    usual = max(abs(gain - _between(others, place)) for place, gain in enumerate(others))
    return off if abs(abs(off) - 1) < OFF_BY_ONE and usual < OFF_BY_ONE else 0.0


def _between(gains: Sequence[float], index: int) -> float:
    """Return the gain that those beside it tell, on a line through them."""
    if index == 0:
        return 2 * gains[1] - gains[2]
    if index == len(gains) - 1:
        return 2 * gains[-2] - gains[-3]
    return (gains[index - 1] + gains[index + 1]) / 2


def excesses(error: RoundingError, scheme: Scheme, more: float = 1.0) -> Iterator[str]:
    """Yield what is larger than plain rounding explains; limits of errors are ``more`` times wider."""
    if error.whole > WHOLE * more:
        yield f"its error is {error.whole:.3g} times that of plain rounding to {scheme}"
    if error.longer > 1 + LONGER.get(scheme.weight_bits, LONG):
        yield f"the median scale is {error.longer:.3f} times what fits the source's weights"
    if error.shorter > 1 + SHORT:
        yield f"the median scale is {1 / error.shorter:.3f} times what fits the source's weights"
    beyond = error.rows > ROW * more
    if bool(beyond.any()):
        worst = f"row {int(error.rows.argmax())}: its error is {float(error.rows.max()):.3g} times"
        yield f"{worst} that of plain rounding{_others(beyond)}"
    share = float(error.columns.max())
    if share > COLUMN * more:
        place = int(error.columns.argmax())
        yield f"column {place}: its error alone is {share:.2g} times that of plain rounding of the whole tensor"


def _others(beyond: Tensor) -> str:
    count = int(beyond.sum()) - 1
    return f", and {count} more" if count else ""


def damaged_part(
    target: Tensor, value: Tensor, found: QuantizedTensor, error: RoundingError
) -> tuple[str, bool] | None:
    """Say which part of a tensor is not the source's, where all the rest is the source's rounded to nearest.

    With the stored scales given, the code nearest to every weight of the source is known. A wrong scale is not proven:
    a method may give up a group for one important weight, as ggml does.

    Returns:
        A description, and whether codes are wrong and not only scales; None where no part is damaged.
    """
    packer, scheme = packer_of(found.scheme), found.scheme
    if GRIDS[scheme.grid].weights_per_code > 1:
        return None
    nearest = packer.decode(
        packer.encode(target, found.parameters, scheme), found.parameters, scheme
    )
    if found.outlier_columns is not None:
        nearest[:, found.outlier_columns] = target[:, found.outlier_columns]
    allowed = (nearest - target).abs() + 1e-3 * target.abs().amax(1, keepdim=True)
    near = (value - target).abs() <= allowed
    groups = error.groups.shape[1]
    shares = near.view(len(near), groups, -1).float().mean(-1)
    if float((shares >= NEAR).float().mean()) < MOSTLY:
        return None
    bad, width = (shares < FAR) & (error.groups > WORSE), value.shape[1] // groups
    bad &= (
        error.rows[:, None] > WORSE_ROW
    )  # else the rest of the row makes up for it, as GPTQ sees to
    if not bool(bad.any()):
        return None
    t, q = (one.view(len(near), groups, -1) for one in (target, value))
    size = q.square().sum(-1)
    factor = (q * t).sum(-1) / torch.where(size > 0, size, 1.0)
    left = (factor[..., None] * q - t).square().sum(-1)
    codes = bad & ((left > RESCALED * (q - t).square().sum(-1)) | (factor < 1 / HUGE))
    shown = codes if bool(codes.any()) else bad
    row, group = divmod(int((error.groups * shown).argmax()), groups)
    place = f"row {row}, columns {group * width} to {(group + 1) * width - 1}{_others(shown)}"
    if not bool(codes.any()):
        return (
            f"{place}: the scale is {1 / float(factor[row, group]):.3g} times what fits the source's weights",
            False,
        )
    share = f"{float(near.float().mean()):.2%}"
    return (
        f"{place}: the codes are not those nearest to the source's weights, as {share} of the tensor are",
        True,
    )


def _rearranged(value: Tensor, target: Tensor) -> str | None:
    """Say how a matrix is the source's in another arrangement, None where it is not."""
    if _cosine(-value, target) > MATCHES:
        return "all weights have the wrong sign"
    if value.shape[0] == value.shape[1] and _cosine(value.T, target) > MATCHES:
        return "the matrix is transposed"
    for what, own, other in (("rows", value, target), ("columns", value.T, target.T)):
        best, place = _matches(own, other)
        in_place = torch.cosine_similarity(own[: len(best)], other[: len(best)])
        moved = (best > MATCHES) & (in_place < MATCHES)
        share, distinct = float(moved.float().mean()), len(torch.unique(place[moved]))
        if share > 0.25 and distinct > 0.9 * int(moved.sum()):
            return f"the {what} are in another order: {share:.0%} of them are another one of the source's"
    return None


def _matches(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine of each of at most 512 rows with the most similar row of ``other``, and which that is."""
    columns = slice(0, 2048)
    directions = torch.nn.functional.normalize(other[:, columns], dim=1)
    best, place = (torch.nn.functional.normalize(own[:512, columns], dim=1) @ directions.T).max(1)
    return best, place


def _cosine(first: Tensor, second: Tensor) -> float:
    norm = float(first.norm()) * float(second.norm())
    return float((first * second).sum()) / norm if norm else 0.0


def _is_cast(found: Tensor, target: Tensor) -> Tensor:
    """Mark where ``found`` is ``target`` in its own type, perhaps by way of another type of 16 bits."""
    equal = found == target.to(found.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        equal |= found == target.to(dtype).to(found.dtype)
    return equal


def _row(name: str, found: QuantizedTensor, error: RoundingError) -> dict[str, object]:
    """Return the figures of one tensor for `Report.tensors`."""
    ratio = error.size / error.error if error.error else math.inf
    snr = 10 * math.log10(ratio) if 0 < ratio < math.inf else ratio or -math.inf
    return {
        "name": name,
        "scheme": str(found.scheme),
        "snr_db": round(snr, 3),
        "cosine": round(error.cosine, 6),
        "over_rounding": round(error.whole, 4),
        "worst_row_over_rounding": round(float(error.rows.max()), 4),
        "worst_column": round(float(error.columns.max()), 4),
        "longer": round(error.longer, 5),
        "shorter": round(error.shorter, 5),
    }
