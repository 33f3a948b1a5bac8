"""Every tensor of an artifact: readable, finite, and with a source at hand the source's, as far as rounding leaves it.

A difference is an *error* where it is proven that nobody meant it: the tensor is another tensor of the source, or its
own with rows in another order, transposed, off by one code or multiplied by a number; or one part of it is wrong while
all the rest is exactly what rounding the source gives. Everything else that is unusual is a *warning*: more error than
plain rounding of the same tensor loses, in the whole tensor, a row or a column (`quantforge.verification.rounding`).
Nothing is divided by the size of what is compared: a tensor of zeros may stay one.

Without a source, tensors are looked at by themselves (`anomalies`), and nothing is proven. Trained weights are centered
on zero, no row or column of them is one number, groups are of comparable size, two matrices are never equal, and the
gains of a norm change slowly from block to block. Blocks may have been copied on purpose, though, and a network may
have learned anything.

One block of the artifact and of the source is in memory at a time, of experts one matrix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, IntegrityError
from quantforge.files.finite_values import scan_finite
from quantforge.packers.tensor import QuantizedTensor
from quantforge.progress import report_step
from quantforge.quantizers.tuning import MAX_RELATIVE_CHANGE
from quantforge.verification.findings import Report
from quantforge.verification.folded_scales import (
    RELATED,
    TUNING,
    UNCHANGED,
    Folds,
    absorbing_norms,
    folds_of,
    own_columns,
)
from quantforge.verification.forward import ForwardPass, check_cache, check_input
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.rounding import (
    SHIFTED,
    UNSEEN,
    WHOLE,
    RoundingError,
    damaged_part,
    group_width,
    measure_rounding,
    plain_rounding,
    rounded_in,
    unusual_errors,
)

# Cosine from which a tensor is the one that it resembles, and by how much more than its own: see also RELATED.
MATCHES, BETTER = 0.8, 0.1
# Tensors that resemble nothing, after which no other tensors are tried: it is another model.
MAX_UNRELATED = 8
# What is stored unquantized may differ by this: of a tensor with a fitted factor, squared and relative, also where the
# scales that it was fitted to were tuned; absolutely, what a gain loses that some files store less 1.
FITTED, FITTED_TUNED, TINY = 1e-3, 0.1, 2.0**-23
# Share of further zeros from which a tensor was made sparse, and by how much SparseGPT makes the rest of a row longer.
SPARSE, MAX_GROWTH = 0.2, 2.0
# Of tensors by themselves.
MIN_CODES = 32  # with fewer, equal codes are chance
LARGEST_PEAK = 2.0**14  # of the largest weight of a group, over that of the median group
OFF_ZERO = 0.15  # of the mean of the median group, over the mean magnitude of the weights
# How far from one the difference of two gains may be, where a family stores them less one.
OFF_BY_ONE = 0.3


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
        self._plainly, self._may_fold = plainly, folded
        self._tuning, self._fitted = (
            (MAX_RELATIVE_CHANGE, FITTED_TUNED) if tuned else (TUNING, FITTED)
        )
        self._may_move = sparsifier in {"", "sparsegpt"}
        # Of the block that is compared, by canonical name.
        self._quantized: dict[str, QuantizedTensor] = {}
        self._values: dict[str, Tensor] = {}
        self._plain: dict[str, Tensor] = {}
        self._folds = Folds()
        self._unreadable: set[str] = set()  # stored names
        self._digests: dict[tuple[str, str], str] = {}
        self._gains: dict[str, float] = {}  # the median gain of each norm, by its stored name
        self._input_scales: dict[str, float] = {}
        self._unrelated: list[str] = []  # stored names of tensors that resemble nothing
        self._approximate: dict[
            str, str
        ] = {}  # unquantized matrices near the source's, what differs
        self.folded: list[str] = []
        self.sparse: list[str] = []
        self._pass = ForwardPass(
            report, artifact, source, self.stored, self.plain, device, run=forward
        )

    def check(self) -> None:
        """Check all tensors, and the logits."""
        model_layout = self._artifact.model_layout
        outer = [t for t in model_layout.tensors if t.block < 0]
        self._check([t for t in outer if t.role is not Role.HEAD], -1)
        self._pass.begin()
        self._forget()
        for index in range(model_layout.blocks):
            report_step(model_layout.block_name(index), index + 1, model_layout.blocks + 1)
            self._pass.source_block(index)
            self._check([t for t in model_layout.tensors if t.block == index], index)
            self._pass.other_blocks(index)
            self._forget()
        self._pass.end_source()
        self._check([t for t in outer if t.role is Role.HEAD], -1)
        if self._source is not None:
            self._check_absent(self._source)
        check_cache(self._report, self._artifact.checkpoint, self._pass.inputs.caches)
        self._report_unrelated()
        self._report_approximate()
        for name, text in gains_off_by_one(self._gains) if self._source is None else ():
            self._report.warn("kept-changed", name, text)
        self._pass.finish()
        self._pass.close()

    def stored(self, name: str) -> Tensor | None:
        """Return a weight of the artifact in float32 by canonical name, linears as ``[out, in]``; None without it."""
        if name in self._values:
            return self._values[name]
        tensor = self._artifact.model_layout.by_name.get(name)
        if tensor is None or tensor.header.name in self._unreadable:
            return None
        found = self._unpacked(tensor)
        if found is not None:
            value = found.decode()
        else:
            value = self._artifact.checkpoint.read(tensor.header.name).float()
            value = value.T.contiguous() if tensor.transposed else value
        if tensor.expert < 0:
            self._values[name] = value
        return value

    def plain(self, name: str) -> Tensor | None:
        """Return a weight of the source, rounded plainly as the artifact's is; None where it is stored as it is."""
        if name in self._plain:
            return self._plain[name]
        tensor = self._artifact.model_layout.by_name.get(name)
        layout = None if tensor is None else self._artifact.layout(tensor)
        target = None if layout is None else self._target(name)
        if layout is None or target is None or target.shape != layout.shape:
            return None
        value = plain_rounding(target, layout.scheme.weight)
        return self._folds.removed(name.removesuffix(".weight"), value)

    def _unpacked(self, tensor: MatchedTensor) -> QuantizedTensor | None:
        """Return a quantized weight, None for one that is stored as it is."""
        if tensor.name in self._quantized:
            return self._quantized[tensor.name]
        layout = self._artifact.layout(tensor)
        found = None if layout is None else self._artifact.unpack(layout)
        if found is not None and tensor.expert < 0:
            self._quantized[tensor.name] = found
        return found

    def _at_ends(self, name: str) -> Tensor | None:
        """Mark the weights at the ends of their groups, which may have been clipped; None where it is not quantized."""
        value, found = self.stored(name), self._quantized.get(name)
        if value is None or found is None:
            return None
        groups = value.view(len(value), -1, group_width(rounded_in(found), value.shape[1]))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        return ((groups == low) | (groups == high)).view(value.shape)

    def _forget(self) -> None:
        for kept in (self._quantized, self._values, self._plain):
            kept.clear()

    def _target(self, name: str) -> Tensor | None:
        """Return the source's weight with the factors that were moved into it."""
        value = None if self._source is None else self._source.weight(name)
        module, _, leaf = name.rpartition(".")
        if value is not None and leaf == "bias":
            factor = self._folds.rows.get(module, self._folds.norms.get(module))
            return value if factor is None else value * factor
        if value is None or value.dim() != 2 or leaf != "weight":
            return value
        return self._folds.applied(module, value)

    def _check(self, tensors: list[MatchedTensor], block: int) -> None:
        """Check tensors of one block (-1: of none) by themselves, then against the source's."""
        for tensor in tensors:
            self._check_alone(tensor)
        if self._source is None:
            return
        model_layout, self._folds = self._artifact.model_layout, Folds()
        if block >= 0 and self._may_fold and model_layout.architecture is not None:
            self._folds = folds_of(
                model_layout, block, self._source.weight, self.stored, self._at_ends, self._tuning
            )
        for module, text in self._folds.problems.items():
            self._report.warn("fold", f"{module}.weight", text)
        self.folded += [*self._folds.norms, *self._folds.rows]
        for tensor in tensors:
            if tensor.header.name not in self._unreadable:
                self._compare(tensor, self._source)

    # checks without a source

    def _check_alone(self, tensor: MatchedTensor) -> None:
        """Check that a tensor is readable and finite, and looks like trained weights."""
        layout, name = self._artifact.layout(tensor), tensor.header.name
        try:
            for part in layout.tensor_names if layout else ():
                if part != name:  # codes, which float types may carry, are decoded below
                    scan_finite(part, self._artifact.checkpoint.read(part))
            found = self._unpacked(tensor)
            value = found.decode() if found is not None else self._artifact.checkpoint.read(name)
            scan_finite(name, value)
        except (InputError, IntegrityError) as error:
            self._unreadable.add(name)
            self._report.add(error.fault, error.tensor or name, error.message)
            return
        if layout is None or found is None:
            if value.dim() == 1 and name.endswith(".weight"):
                self._gains[name] = float(value.float().median())
            return
        if tensor.expert < 0:
            self._values[tensor.name] = value
        for check, text in anomalies(found, value) if self._source is None else ():
            self._report.warn(check, layout.module, text)
        for part, digest in fingerprints(found):
            other = self._digests.setdefault((part, digest), layout.module)
            if other != layout.module and not self._similar(layout.module, other):
                # Without a source, blocks may have been copied on purpose.
                say = self._report.warn if self._source is None else self._report.add
                say("swapped", layout.module, f"its {part} are those of {other}, bit for bit")

    def _similar(self, module: str, other: str) -> bool:
        """Return whether two linears of the source are alike, as in copied blocks, so that their codes may be equal."""
        names = {t.header.name: t.name for t in self._artifact.model_layout.tensors}
        first, second = (
            self._source.weight(names.get(f"{one}.weight", "")) if self._source else None
            for one in (module, other)
        )
        if first is None or second is None or first.shape != second.shape:
            return False
        return abs(_cosine(first, second)) > MATCHES

    # comparisons with the source

    def _compare(self, tensor: MatchedTensor, source: Original) -> None:
        """Compare a tensor with the source's in the way that its form and shape ask for."""
        name, module = tensor.header.name, tensor.name.removesuffix(".weight")
        target, layout = self._target(tensor.name), self._artifact.layout(tensor)
        if target is None:
            if tensor.role is not Role.FOREIGN:
                self._report.add("kept-changed", name, "the source has no such tensor")
            return
        shape = layout.shape if layout else tensor.header.shape[:: -1 if tensor.transposed else 1]
        if tuple(shape) != tuple(target.shape):
            text = f"its shape is {list(shape)}, the source's is {list(target.shape)}"
            self._report.add("kept-changed", name, text)
            return
        found = self._unpacked(tensor)
        if found is None:
            self._compare_unquantized(tensor, target, source)
            return
        if found.input is not None and "input_scale" in found.parameters:
            columns, inputs = self._folds.columns.get(module), self._pass.inputs
            check_input(self._report, module, found, inputs, columns, self._input_scales)
        self._compare_quantized(tensor, found, target)

    def _compare_quantized(
        self, tensor: MatchedTensor, found: QuantizedTensor, target: Tensor
    ) -> None:
        """Compare a quantized weight with the source's: first for what is proven, then for what is unusual."""
        name, module = tensor.header.name, tensor.name.removesuffix(".weight")
        value = self.stored(tensor.name)
        assert value is not None
        scheme = rounded_in(found)
        plain = plain_rounding(target, scheme, found.outlier_columns)
        if tensor.expert < 0:
            self._plain[tensor.name] = self._folds.removed(module, plain)
        inputs = self._pass.inputs.of(module)
        if inputs is not None and module in self._folds.columns:
            inputs = inputs / self._folds.columns[module]
        error = measure_rounding(target, value, plain, found, inputs, scheme)
        self._report.tensors.append({"name": name, "scheme": str(found.scheme), **error.to_json()})
        plainly = self._plainly and tensor.role is Role.LINEAR and not self._folds.touches(module)
        if plainly and not torch.equal(value, plain):
            text = "is not what rounding the source to nearest gives, which its manifest states"
            self._report.add("noise", name, text)
            return
        if (part := damaged_part(target, value, found, error)) is not None:
            text, proven = part
            (self._report.add if proven else self._report.warn)("groups", name, text)
            return
        if abs(error.shift) > SHIFTED:
            text = f"the median group is {error.shift:+.2f} steps of the grid off the source's"
            text += ": zero points or codes are off by one"
            self._report.add("zero-convention", name, text)
            return
        more = UNSEEN if inputs is None and tensor.role is Role.LINEAR else 1.0
        texts = [*unusual_errors(error, scheme, more)]
        if (
            texts
            and error.whole > WHOLE
            and (reason := self._explained(tensor, value, target, error))
        ):
            self._report.add("swapped", name, reason)
        elif texts and error.cosine < RELATED:
            self._unrelated.append(name)
        else:
            for text in texts:
                self._report.warn("noise" if error.whole > WHOLE else "groups", name, text)

    def _explained(
        self, tensor: MatchedTensor, value: Tensor, target: Tensor, error: RoundingError
    ) -> str | None:
        """Say what a matrix is instead of the source's, None where nothing explains it."""
        if error.cosine < MATCHES and len(self._unrelated) < MAX_UNRELATED:
            least = max(MATCHES, error.cosine + BETTER)
            other = self._other(tensor, value, lambda weight: _cosine(weight, value) > least)
            if other is not None:
                return f"holds the weights of {other}"
            if (text := _rearranged(value, target)) is not None:
                return text
        size = float((value * value).sum(dtype=torch.float64))
        factor = float((value * target).sum(dtype=torch.float64)) / (size or 1.0)
        left = float((factor * value - target).square().sum())
        usual = error.squared / max(error.whole, 1.0) * WHOLE
        if not size or abs(factor - 1) <= 0.02 or left >= min(usual, 0.5 * error.squared):
            return None
        if factor <= 0:
            return "all weights have the wrong sign"
        return f"all weights are {1 / factor:.4g} times the source's"

    def _other(
        self, tensor: MatchedTensor, value: Tensor, equals: Callable[[Tensor], bool]
    ) -> str | None:
        """Return the stored name of another tensor of the source that ``equals`` accepts.

        Those that may have been swapped are tried: of the same block first, then the same one of other blocks.
        """
        assert self._source is not None
        alike = [t for t in self._artifact.model_layout.tensors if t.role is tensor.role]
        leaf = tensor.name.partition(f".{tensor.block}.")[2]
        near = [t for t in alike if t.block == tensor.block and t is not tensor]
        far = [t for t in alike if t.block != tensor.block and t.name.endswith(f".{leaf}")]
        for other in near + far:
            weight = self._source.weight(other.name)
            if weight is not None and weight.shape == value.shape and equals(weight):
                return other.header.name
        return None

    def _compare_unquantized(self, tensor: MatchedTensor, target: Tensor, source: Original) -> None:
        """Compare a tensor that is stored as it is: it is the source's in its own type, with its factors."""
        name, (module, _, leaf) = tensor.header.name, tensor.name.rpartition(".")
        if module in self._folds.norms and leaf == "weight":
            return  # the layers that read it are compared with its factor
        value = self._artifact.checkpoint.read(name)
        value = value.T if tensor.transposed else value
        if target.dim() == 2 and leaf == "weight" and module in self._folds.columns:
            whole, columns = source.weight(tensor.name), self._folds.columns[module]
            assert whole is not None
            target = whole * own_columns(whole, value.float(), columns, self._tuning)
        error = (value.float() - target).abs()
        if module in self._folds.fitted:
            squared, size = float(error.square().sum()), float(target.square().sum())
            wrong = (error > 0) & (squared > self._fitted * size)
        elif module in self._folds.norms or self._folds.touches(module):
            wrong = (error > TINY) & (error > UNCHANGED * target.abs())
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
        if float(((value == 0) & (target != 0)).float().mean()) > SPARSE:
            self._compare_sparse(name, value, target)
        elif (
            other := self._other(tensor, value, lambda weight: _holds(value, weight))
        ) is not None:
            self._report.add("swapped", name, f"holds the values of {other}")
        elif target.dim() == 1 and self._may_be_tuned(tensor, value, target):
            self.folded.append(module)
        elif 2 * count <= target.numel():
            self._report.add("kept-changed", name, text)
        elif target.dim() != 2:
            self._report.warn("kept-changed", name, text)
        elif (cosine := _cosine(value.float(), target)) > MATCHES:
            self._approximate[name] = text
        elif (reason := _rearranged(value.float(), target)) is not None:
            self._report.add("swapped", name, reason)
        elif cosine < RELATED:
            self._unrelated.append(name)
        else:
            self._report.warn("kept-changed", name, text)

    def _may_be_tuned(self, tensor: MatchedTensor, value: Tensor, target: Tensor) -> bool:
        """Return whether gains of a norm, or its bias, differ by no more than tuning changes gains."""
        model_layout, (module, _, leaf) = self._artifact.model_layout, tensor.name.rpartition(".")
        norms = [norm for norm, _ in absorbing_norms(model_layout, tensor.block)]
        if module not in self._folds.norms and (leaf != "weight" or module not in norms):
            return False
        offset = model_layout.architecture.norm_offset if model_layout.architecture else 0.0
        most = (self._tuning + UNCHANGED) * (target + offset).abs() + TINY
        return bool(((value.float() - target).abs() <= most).all())

    def _compare_sparse(self, name: str, value: Tensor, target: Tensor) -> None:
        """Compare what a sparsifier has left of a tensor: it is the source's, or moved a little by SparseGPT."""
        left = value != 0
        wrong = left & ~_is_cast(value, target)
        own, source = value.float(), target.masked_fill(~left, 0.0)
        product, length, before = (own * source).sum(-1), own.norm(dim=-1), source.norm(dim=-1)
        bad = product < RELATED * length * before
        bad |= (length > MAX_GROWTH * before) | (before > MAX_GROWTH * length)
        if not bool(wrong.any()) or (self._may_move and not bool(bad.any())):
            self.sparse.append(name)
            return
        text = (
            f"{int(wrong.sum())} of the {int(left.sum())} nonzero values differ from the source's"
        )
        if bool(bad.any()):
            text += f"; row {int(bad.nonzero()[0])} does not resemble the source's"
        proven = not self._may_move or 2 * int(wrong.sum()) <= int(left.sum())
        (self._report.add if proven else self._report.warn)("kept-changed", name, text)

    # the whole model

    def _report_unrelated(self) -> None:
        """Report tensors that resemble neither the source's nor others: once where they are most of the model."""
        linears = sum(t.role is Role.LINEAR for t in self._artifact.model_layout.tensors)
        if 2 * len(self._unrelated) > linears:
            text = (
                f"this and {len(self._unrelated) - 1} more tensors do not resemble the source's: the model is in"
                " another basis (rotated), or it is another model; only the logits tell"
            )
            self._report.warn("swapped", self._unrelated[0], text)
            return
        for name in self._unrelated:
            self._report.warn("swapped", name, "does not resemble the source's tensor of this name")

    def _report_approximate(self) -> None:
        """Report unquantized matrices that differ everywhere: once where nearly all do, as in a decoded result."""
        linears = sum(t.role is Role.LINEAR for t in self._artifact.model_layout.tensors)
        first, count = next(iter(self._approximate), ""), len(self._approximate)
        if count > max(1, 0.9 * linears):
            text = f"this and {count - 1} more matrices are only near the source's: the model was quantized and"
            self._report.warn(
                "kept-changed", first, f"{text} decoded, or trained further; the logits tell"
            )
            return
        for name, text in self._approximate.items():
            self._report.warn("kept-changed", name, text)

    def _check_absent(self, source: Original) -> None:
        """Report tensors of the source that the artifact does not have."""
        model_layout = self._artifact.model_layout
        head = (
            f"{model_layout.architecture.head if model_layout.architecture else 'lm_head'}.weight"
        )
        for name, tensor in source.model_layout.by_name.items():
            if name in model_layout.by_name or tensor.role is Role.FOREIGN:
                continue
            if name == head and model_layout.tied:
                text = "tie_word_embeddings is true, and the source has a head of its own"
                self._report.add("configuration", name, text)
            else:
                self._report.add("incomplete", name, "the source has it, the artifact does not")


# Tensors by themselves.


def anomalies(tensor: QuantizedTensor, value: Tensor) -> Iterator[tuple[str, str]]:
    """Yield checks and descriptions of what is unusual about a matrix, ``value`` ``[out, in]`` when it is decoded."""
    width = group_width(tensor.scheme, value.shape[1])
    peaks = value.abs().view(len(value), -1, width).amax(-1)
    peaks = peaks[peaks > 0]  # scales of groups of zeros mean nothing
    if peaks.numel() and float(peaks.max()) > LARGEST_PEAK * float(peaks.median()):
        text = f"the largest weight is {float(peaks.max()):.3g}, that of the median group {float(peaks.median()):.3g}"
        yield "scale", f"{text}: its scale may be wrong"
    usual = float(value.abs().mean())
    groups = tensor.scheme.groups(value.shape[1])
    if value.shape[1] % groups == 0 and value.shape[1] // groups >= MIN_CODES // 2:
        means = value.view(len(value), groups, -1).mean(-1)
        if abs(float(means.median())) > OFF_ZERO * usual:
            yield (
                "zero-convention",
                "its weights are not centered on zero: zero points or codes may be off by one",
            )
    codes = tensor.codes.view(torch.uint8) if tensor.codes.is_floating_point() else tensor.codes
    for dim, what in ((0, "column"), (1, "row")):
        if codes.shape[dim] < MIN_CODES or codes.shape[1] != value.shape[1]:
            continue
        constant = (codes.amin(dim) == codes.amax(dim)) & (value.abs().amax(dim) > 0.1 * usual)
        if places := constant.nonzero().flatten().tolist():
            more = f", and {len(places) - 1} more" if len(places) > 1 else ""
            yield "groups", f"{what} {places[0]} has the same code everywhere{more}"


def fingerprints(tensor: QuantizedTensor) -> Iterator[tuple[str, str]]:
    """Yield "codes" and "scales" with the digest of each, where two matrices have the same by no chance."""
    for part, value in (("codes", tensor.codes), ("scales", tensor.parameters.get("scales"))):
        if value is None or value.numel() < MIN_CODES:
            continue
        raw = value.contiguous().flatten().view(torch.uint8)
        if len(torch.unique(raw[:4096])) >= MIN_CODES // 4:  # scales may well be all alike
            yield part, hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def gains_off_by_one(gains: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the names of norms whose gains are one off those of the same norm in other blocks, with a description.

    Args:
        gains: the median gain of each norm by its stored name, in the order of blocks.
    """
    series: dict[str, list[str]] = {}
    for name in gains:
        series.setdefault(re.sub(r"\.\d+\.", ".#.", name), []).append(name)
    for names in series.values():
        values = [gains[name] for name in names]
        for index, name in enumerate(names):
            if off := off_by_one(values, index):
                size = "larger" if off > 0 else "smaller"
                yield (
                    name,
                    f"its gains are {abs(off):.2f} {size} than those of this norm in the blocks beside it",
                )


def off_by_one(gains: Sequence[float], index: int) -> float:
    """Return how far one of ``gains``, in the order of blocks, is off the others; 0 where that is not about one.

    Gains may grow with depth: each is compared with those beside it, and only where the others agree in that way.
    """
    others = [*gains[:index], *gains[index + 1 :]]
    if len(others) < 3:
        return 0.0
    off = _difference(gains, index)
    usual = max(abs(_difference(others, place)) for place in range(len(others)))
    return off if abs(abs(off) - 1) < OFF_BY_ONE and usual < OFF_BY_ONE else 0.0


def _difference(gains: Sequence[float], index: int) -> float:
    """Return what one gain is above the mean of those beside it, the first and last above one or the line of two."""
    if 0 < index < len(gains) - 1:
        return gains[index] - (gains[index - 1] + gains[index + 1]) / 2
    near, far = (gains[1], gains[2]) if index == 0 else (gains[-2], gains[-3])
    return min(gains[index] - near, gains[index] - (2 * near - far), key=abs)


# What a tensor is instead of the source's.


def _rearranged(value: Tensor, target: Tensor) -> str | None:
    """Say how a matrix is the source's in another arrangement, None where it is not."""
    if _cosine(-value, target) > MATCHES:
        return "all weights have the wrong sign"
    if value.shape[0] == value.shape[1] and _cosine(value.T, target) > MATCHES:
        return "the matrix is transposed"
    for what, found, source in (("rows", value, target), ("columns", value.T, target.T)):
        own, others = _directions(found[:512]), _directions(source)
        best, place = (own @ others.T).max(1)
        moved = (best > MATCHES) & ((own * others[: len(own)]).sum(1) < MATCHES)
        share, distinct = float(moved.float().mean()), len(torch.unique(place[moved]))
        if share > 0.25 and distinct > 0.9 * int(moved.sum()):
            return f"the {what} are in another order: {share:.0%} of them are another one of the source's"
    return None


def _directions(matrix: Tensor) -> Tensor:
    """Return rows of length 1, of at most 2048 columns."""
    return torch.nn.functional.normalize(matrix[:, :2048], dim=1)


def _cosine(first: Tensor, second: Tensor) -> float:
    norm = float(first.norm()) * float(second.norm())
    return float((first * second).sum()) / norm if norm else 0.0


def _is_cast(found: Tensor, target: Tensor) -> Tensor:
    """Mark where ``found`` is ``target`` in its own type, perhaps by way of another type of 16 bits."""
    equal = found == target.to(found.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        equal |= found == target.to(dtype).to(found.dtype)
    return equal


def _holds(found: Tensor, weight: Tensor) -> bool:
    """Return whether ``found`` is ``weight`` in its own type; a constant may be so by chance."""
    constant = bool((weight == weight.flatten()[0]).all())
    return not constant and bool(_is_cast(found, weight).all())
