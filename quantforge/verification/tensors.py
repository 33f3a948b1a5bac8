"""Check every tensor of an artifact: readable, finite, and equal to the source's up to rounding.

A difference is an *error* if it is proven to be unintended: the tensor is another tensor of the source, or has its rows
in another order, is transposed, off by one code or multiplied by a number; or one part of it is wrong while all the
rest is exactly the rounded source. Anything else that is unusual is a *warning*: a larger error than that of rounding
the same tensor to nearest, in the whole tensor, a row or a column (`quantforge.verification.rounding`). Nothing is
divided by the size of what is compared, so a tensor of zeros may stay zero.

Without a source, tensors are checked on their own (`anomalies`), and nothing is proven. Trained weights are centered on
zero, no row or column has one constant value, groups have comparable sizes, two matrices are never equal, and norm
weights change slowly from block to block. But blocks may have been copied on purpose, and a network may have learned
anything.

One block of the artifact and of the source is in memory at a time; for experts, one matrix.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.errors import InputError, IntegrityError
from quantforge.files.finite_values import check_finite
from quantforge.packers.tensor import QuantizedTensor
from quantforge.progress import report_step
from quantforge.quantizers.tuning import MAX_RELATIVE_CHANGE
from quantforge.verification.findings import Report
from quantforge.verification.folded_scales import (
    MAX_CAST_ERROR,
    MAX_TUNING_CHANGE,
    MIN_COSINE,
    FoldedScales,
    find_folded_scales,
    fit_column_scales,
    foldable_norms,
)
from quantforge.verification.forward import ForwardPass, check_cache_scales, check_input_scale
from quantforge.verification.opening import Artifact, SourceModel
from quantforge.verification.rounding import (
    MAX_TENSOR_ERROR,
    OFF_BY_ONE_SHIFT,
    WITHOUT_INPUTS_FACTOR,
    RoundingError,
    effective_scheme,
    find_damaged_part,
    group_width,
    measure_rounding,
    round_to_nearest,
    unusual_errors,
)

# Cosine similarity above which a tensor is another tensor of the source, and its minimal excess over that of its own.
MIN_MATCH_COSINE, MIN_COSINE_GAIN = 0.8, 0.1
# After this many tensors that resemble nothing, no more are compared with others: it is another model.
MAX_UNRELATED = 8
# Allowed errors of unquantized tensors: relative and squared for fitted scales, the same after tuning, and absolute for
# norm weights that some files store minus 1.
MAX_FITTED_ERROR, MAX_TUNED_ERROR, MAX_ABSOLUTE_ERROR = 1e-3, 0.1, 2.0**-23
# Share of additional zeros that makes a tensor sparse, and the largest growth of a row norm by SparseGPT.
MIN_SPARSITY, MAX_NORM_GROWTH = 0.2, 2.0
# Limits for tensors without a source.
MIN_CODES = 32  # with fewer codes, equality is chance
MAX_PEAK_RATIO = 2.0**14  # largest weight of a group relative to that of the median group
MAX_MEAN_RATIO = 0.15  # mean of the median group relative to the mean magnitude of weights
# Tolerance of a difference of one between norm weights, which some families store minus one.
OFF_BY_ONE_TOLERANCE = 0.3


class TensorChecks:
    """Checks of the tensors of one artifact, block by block.

    Attributes:
        scaled_modules: norms and linears with folded scales that cancel.
        sparse_tensors: stored names of tensors in which a sparsifier set weights to zero.
    """

    def __init__(
        self,
        report: Report,
        artifact: Artifact,
        source: SourceModel | None,
        *,
        device: str = "cpu",
        forward: bool = True,
        rounded_to_nearest: bool = False,
        may_be_folded: bool = True,
        tuned: bool = False,
        sparsifier: str = "",
    ) -> None:
        """Prepare the checks.

        Args:
            report: gets the findings.
            artifact: the artifact to check.
            source: the model that it is compared with.
            device: where the models of the forward pass run.
            forward: whether to run the forward pass.
            rounded_to_nearest: whether the manifest records rounding to nearest with absmax scales.
            may_be_folded: whether scales may have been folded between tensors.
            tuned: whether the manifest records that norm weights were learned.
            sparsifier: the method that set weights to zero according to the manifest, "" if unknown.
        """
        self._report, self._artifact, self._source = report, artifact, source
        self._rounded_to_nearest, self._may_fold = rounded_to_nearest, may_be_folded
        self._max_tuning, self._max_fitted_error = (
            (MAX_RELATIVE_CHANGE, MAX_TUNED_ERROR)
            if tuned
            else (MAX_TUNING_CHANGE, MAX_FITTED_ERROR)
        )
        self._may_change_values = sparsifier in {"", "sparsegpt"}
        # Of the block that is compared, by canonical name.
        self._quantized: dict[str, QuantizedTensor] = {}
        self._decoded: dict[str, Tensor] = {}
        self._rounded_source: dict[str, Tensor] = {}
        self._folded_scales = FoldedScales()
        self._unreadable: set[str] = set()  # stored names
        self._modules_by_digest: dict[tuple[str, str], str] = {}
        self._norm_gains: dict[str, float] = {}  # median weight of each norm, by its stored name
        self._input_scales: dict[str, float] = {}
        self._unrelated: list[
            str
        ] = []  # stored names of tensors that resemble no tensor of the source
        self._approximate_matrices: dict[
            str, str
        ] = {}  # unquantized matrices near the source's, what differs
        self.scaled_modules: list[str] = []
        self.sparse_tensors: list[str] = []
        self._forward_pass = ForwardPass(
            report,
            artifact,
            source,
            self.artifact_weight,
            self.rounded_source_weight,
            device,
            run=forward,
        )

    def run(self) -> None:
        """Check all tensors, and the logits."""
        model_layout = self._artifact.model_layout
        outer = [t for t in model_layout.tensors if t.block < 0]
        self._check_tensors([t for t in outer if t.role is not Role.HEAD], -1)
        self._forward_pass.embed_tokens()
        self._clear_block()
        for index in range(model_layout.blocks):
            report_step(model_layout.block_name(index), index + 1, model_layout.blocks + 1)
            self._forward_pass.run_source_block(index)
            self._check_tensors([t for t in model_layout.tensors if t.block == index], index)
            self._forward_pass.run_other_blocks(index)
            self._clear_block()
        self._forward_pass.finish_source()
        self._check_tensors([t for t in outer if t.role is Role.HEAD], -1)
        if self._source is not None:
            self._report_missing(self._source)
        check_cache_scales(
            self._report, self._artifact.checkpoint, self._forward_pass.inputs.cache_peaks
        )
        self._report_unrelated()
        self._report_approximate()
        for name, text in gains_off_by_one(self._norm_gains) if self._source is None else ():
            self._report.warn("unquantized-changed", name, text)
        self._forward_pass.check_logits()
        self._forward_pass.close()

    def artifact_weight(self, name: str) -> Tensor | None:
        """Return a float32 weight of the artifact by canonical name, linears as ``[out, in]``; None if missing."""
        if name in self._decoded:
            return self._decoded[name]
        tensor = self._artifact.model_layout.by_name.get(name)
        if tensor is None or tensor.header.name in self._unreadable:
            return None
        quantized = self._quantized_tensor(tensor)
        if quantized is not None:
            value = quantized.decode()
        else:
            value = self._artifact.checkpoint.read(tensor.header.name).float()
            value = value.T.contiguous() if tensor.transposed else value
        if tensor.expert < 0:
            self._decoded[name] = value
        return value

    def rounded_source_weight(self, name: str) -> Tensor | None:
        """Return a weight of the source, rounded to nearest in the artifact's scheme; None if it is not quantized."""
        if name in self._rounded_source:
            return self._rounded_source[name]
        tensor = self._artifact.model_layout.by_name.get(name)
        layout = None if tensor is None else self._artifact.layout(tensor)
        target = None if layout is None else self._scaled_source_weight(name)
        if layout is None or target is None or target.shape != layout.shape:
            return None
        value = round_to_nearest(target, layout.scheme.weight)
        return self._folded_scales.remove(name.removesuffix(".weight"), value)

    def _quantized_tensor(self, tensor: MatchedTensor) -> QuantizedTensor | None:
        """Return a quantized weight, None for one that is not quantized."""
        if tensor.name in self._quantized:
            return self._quantized[tensor.name]
        layout = self._artifact.layout(tensor)
        quantized = None if layout is None else self._artifact.unpack(layout)
        if quantized is not None and tensor.expert < 0:
            self._quantized[tensor.name] = quantized
        return quantized

    def _clipping_mask(self, name: str) -> Tensor | None:
        """Mark the extreme weights of each group, which may have been clipped; None if it is not quantized."""
        value, quantized = self.artifact_weight(name), self._quantized.get(name)
        if value is None or quantized is None:
            return None
        groups = value.view(
            len(value), -1, group_width(effective_scheme(quantized), value.shape[1])
        )
        low, high = groups.aminmax(dim=-1, keepdim=True)
        return ((groups == low) | (groups == high)).view(value.shape)

    def _clear_block(self) -> None:
        for cache in (self._quantized, self._decoded, self._rounded_source):
            cache.clear()

    def _scaled_source_weight(self, name: str) -> Tensor | None:
        """Return a weight of the source with the scales that were folded into it."""
        value = None if self._source is None else self._source.weight(name)
        module, _, parameter = name.rpartition(".")
        if value is not None and parameter == "bias":
            factor = self._folded_scales.row_scales.get(
                module, self._folded_scales.norm_scales.get(module)
            )
            return value if factor is None else value * factor
        if value is None or value.dim() != 2 or parameter != "weight":
            return value
        return self._folded_scales.apply(module, value)

    def _check_tensors(self, tensors: list[MatchedTensor], block: int) -> None:
        """Check tensors of one block (-1: outside of blocks) on their own, then against the source's."""
        for tensor in tensors:
            self._check_tensor_alone(tensor)
        if self._source is None:
            return
        model_layout, self._folded_scales = self._artifact.model_layout, FoldedScales()
        if block >= 0 and self._may_fold and model_layout.architecture is not None:
            self._folded_scales = find_folded_scales(
                model_layout,
                block,
                self._source.weight,
                self.artifact_weight,
                self._clipping_mask,
                self._max_tuning,
            )
        for module, text in self._folded_scales.problems.items():
            self._report.warn("scale-fold", f"{module}.weight", text)
        self.scaled_modules += [*self._folded_scales.norm_scales, *self._folded_scales.row_scales]
        for tensor in tensors:
            if tensor.header.name not in self._unreadable:
                self._compare_tensor(tensor, self._source)

    # Checks without a source.

    def _check_tensor_alone(self, tensor: MatchedTensor) -> None:
        """Check that a tensor is readable and finite, and looks like trained weights."""
        layout, name = self._artifact.layout(tensor), tensor.header.name
        try:
            for tensor_name in layout.tensor_names if layout else ():
                if tensor_name != name:  # codes, which float types may carry, are decoded below
                    check_finite(tensor_name, self._artifact.checkpoint.read(tensor_name))
            quantized = self._quantized_tensor(tensor)
            value = (
                quantized.decode()
                if quantized is not None
                else self._artifact.checkpoint.read(name)
            )
            check_finite(name, value)
        except (InputError, IntegrityError) as error:
            self._unreadable.add(name)
            self._report.add(error.fault, error.tensor or name, error.message)
            return
        if layout is None or quantized is None:
            if value.dim() == 1 and name.endswith(".weight"):
                self._norm_gains[name] = float(value.float().median())
            return
        if tensor.expert < 0:
            self._decoded[tensor.name] = value
        for run, text in anomalies(quantized, value) if self._source is None else ():
            self._report.warn(run, layout.module, text)
        for tensor_name, digest in fingerprints(quantized):
            other = self._modules_by_digest.setdefault((tensor_name, digest), layout.module)
            if other != layout.module and not self._are_similar(layout.module, other):
                # Without a source, blocks may have been copied on purpose.
                report = self._report.warn if self._source is None else self._report.add
                report(
                    "swapped-tensors",
                    layout.module,
                    f"its {tensor_name} are those of {other}, bit for bit",
                )

    def _are_similar(self, module: str, other: str) -> bool:
        """Return whether two linears of the source are similar, as in copied blocks, so that codes may be equal."""
        names = {t.header.name: t.name for t in self._artifact.model_layout.tensors}
        first, second = (
            self._source.weight(names.get(f"{module_name}.weight", "")) if self._source else None
            for module_name in (module, other)
        )
        if first is None or second is None or first.shape != second.shape:
            return False
        return abs(_cosine(first, second)) > MIN_MATCH_COSINE

    # Comparisons with the source.

    def _compare_tensor(self, tensor: MatchedTensor, source: SourceModel) -> None:
        """Compare a tensor with the source's, depending on whether it is quantized."""
        name, module = tensor.header.name, tensor.name.removesuffix(".weight")
        target, layout = self._scaled_source_weight(tensor.name), self._artifact.layout(tensor)
        if target is None:
            if tensor.role is not Role.FOREIGN:
                self._report.add("unquantized-changed", name, "the source has no such tensor")
            return
        shape = layout.shape if layout else tensor.header.shape[:: -1 if tensor.transposed else 1]
        if tuple(shape) != tuple(target.shape):
            text = f"its shape is {list(shape)}, the source's is {list(target.shape)}"
            self._report.add("unquantized-changed", name, text)
            return
        quantized = self._quantized_tensor(tensor)
        if quantized is None:
            self._compare_unquantized(tensor, target, source)
            return
        if quantized.input is not None and "input_scale" in quantized.parameters:
            columns, inputs = (
                self._folded_scales.column_scales.get(module),
                self._forward_pass.inputs,
            )
            check_input_scale(self._report, module, quantized, inputs, columns, self._input_scales)
        self._compare_quantized(tensor, quantized, target)

    def _compare_quantized(
        self, tensor: MatchedTensor, quantized: QuantizedTensor, target: Tensor
    ) -> None:
        """Compare a quantized weight with the source's: first for proven defects, then for unusual errors."""
        name, module = tensor.header.name, tensor.name.removesuffix(".weight")
        value = self.artifact_weight(tensor.name)
        assert value is not None
        scheme = effective_scheme(quantized)
        rounded_source_weight = round_to_nearest(target, scheme, quantized.outlier_columns)
        if tensor.expert < 0:
            self._rounded_source[tensor.name] = self._folded_scales.remove(
                module, rounded_source_weight
            )
        inputs = self._forward_pass.inputs.normalized(module)
        if inputs is not None and module in self._folded_scales.column_scales:
            inputs = inputs / self._folded_scales.column_scales[module]
        error = measure_rounding(target, value, rounded_source_weight, quantized, inputs, scheme)
        self._report.tensors.append(
            {"name": name, "scheme": str(quantized.scheme), **error.to_json()}
        )
        rounded_to_nearest = (
            self._rounded_to_nearest
            and tensor.role is Role.LINEAR
            and not self._folded_scales.has_scale(module)
        )
        if rounded_to_nearest and not torch.equal(value, rounded_source_weight):
            text = "is not what rounding the source to nearest gives, which its manifest states"
            self._report.add("quantization-error", name, text)
            return
        if (damage := find_damaged_part(target, value, quantized, error)) is not None:
            text, proven = damage
            (self._report.add if proven else self._report.warn)("group-error", name, text)
            return
        if abs(error.mean_shift) > OFF_BY_ONE_SHIFT:
            text = f"the median group is {error.mean_shift:+.2f} steps of the grid off the source's"
            text += ": zero points or codes are off by one"
            self._report.add("zero-points", name, text)
            return
        limit_factor = (
            WITHOUT_INPUTS_FACTOR if inputs is None and tensor.role is Role.LINEAR else 1.0
        )
        texts = [*unusual_errors(error, scheme, limit_factor)]
        if (
            texts
            and error.whole > MAX_TENSOR_ERROR
            and (reason := self._explain_matrix(tensor, value, target, error))
        ):
            self._report.add("swapped-tensors", name, reason)
        elif texts and error.cosine < MIN_COSINE:
            self._unrelated.append(name)
        else:
            for text in texts:
                self._report.warn(
                    "quantization-error" if error.whole > MAX_TENSOR_ERROR else "group-error",
                    name,
                    text,
                )

    def _explain_matrix(
        self, tensor: MatchedTensor, value: Tensor, target: Tensor, error: RoundingError
    ) -> str | None:
        """Describe what a matrix contains instead of the source's weights; None if there is no explanation."""
        if error.cosine < MIN_MATCH_COSINE and len(self._unrelated) < MAX_UNRELATED:
            min_cosine = max(MIN_MATCH_COSINE, error.cosine + MIN_COSINE_GAIN)
            other = self._find_equal_tensor(
                tensor, value, lambda weight: _cosine(weight, value) > min_cosine
            )
            if other is not None:
                return f"holds the weights of {other}"
            if (text := _describe_rearrangement(value, target)) is not None:
                return text
        size = float((value * value).sum(dtype=torch.float64))
        factor = float((value * target).sum(dtype=torch.float64)) / (size or 1.0)
        remaining_error = float((factor * value - target).square().sum())
        usual_error = error.squared_error / max(error.whole, 1.0) * MAX_TENSOR_ERROR
        if (
            not size
            or abs(factor - 1) <= 0.02
            or remaining_error >= min(usual_error, 0.5 * error.squared_error)
        ):
            return None
        if factor <= 0:
            return "all weights have the wrong sign"
        return f"all weights are {1 / factor:.4g} times the source's"

    def _find_equal_tensor(
        self, tensor: MatchedTensor, value: Tensor, equals: Callable[[Tensor], bool]
    ) -> str | None:
        """Return the stored name of another tensor of the source that ``equals`` accepts.

        Candidates are tensors that may have been swapped: of the same block first, then the same tensor of other
        blocks.
        """
        assert self._source is not None
        same_role = [t for t in self._artifact.model_layout.tensors if t.role is tensor.role]
        leaf = tensor.name.partition(f".{tensor.block}.")[2]
        same_block = [t for t in same_role if t.block == tensor.block and t is not tensor]
        other_blocks = [
            t for t in same_role if t.block != tensor.block and t.name.endswith(f".{leaf}")
        ]
        for other in same_block + other_blocks:
            weight = self._source.weight(other.name)
            if weight is not None and weight.shape == value.shape and equals(weight):
                return other.header.name
        return None

    def _compare_unquantized(
        self, tensor: MatchedTensor, target: Tensor, source: SourceModel
    ) -> None:
        """Compare an unquantized tensor: it must equal the source's in its own type, with folded scales applied."""
        name, (module, _, leaf) = tensor.header.name, tensor.name.rpartition(".")
        if module in self._folded_scales.norm_scales and leaf == "weight":
            return  # the layers that read it are compared with its factor
        value = self._artifact.checkpoint.read(name)
        value = value.T if tensor.transposed else value
        if target.dim() == 2 and leaf == "weight" and module in self._folded_scales.column_scales:
            source_weight, columns = (
                source.weight(tensor.name),
                self._folded_scales.column_scales[module],
            )
            assert source_weight is not None
            target = source_weight * fit_column_scales(
                source_weight, value.float(), columns, self._max_tuning
            )
        error = (value.float() - target).abs()
        if module in self._folded_scales.fitted_modules:
            squared, size = float(error.square().sum()), float(target.square().sum())
            is_wrong = (error > 0) & (squared > self._max_fitted_error * size)
        elif module in self._folded_scales.norm_scales or self._folded_scales.has_scale(module):
            is_wrong = (error > MAX_ABSOLUTE_ERROR) & (error > MAX_CAST_ERROR * target.abs())
        else:
            is_wrong = (error > MAX_ABSOLUTE_ERROR) & ~_is_cast(value, target)
        wrong_count = int(is_wrong.sum())
        if not wrong_count:
            return
        worst = int((error * is_wrong).flatten().argmax())
        text = (
            f"{wrong_count} of {target.numel()} values are not the source's, for example"
            f" {float(value.flatten()[worst]):.5g} in place of {float(target.flatten()[worst]):.5g}"
        )
        if float(((value == 0) & (target != 0)).float().mean()) > MIN_SPARSITY:
            self._compare_sparse(name, value, target)
        elif (
            other_tensor := self._find_equal_tensor(
                tensor, value, lambda weight: _has_values_of(value, weight)
            )
        ) is not None:
            self._report.add("swapped-tensors", name, f"holds the values of {other_tensor}")
        elif target.dim() == 1 and self._may_be_tuned(tensor, value, target):
            self.scaled_modules.append(module)
        elif 2 * wrong_count <= target.numel():
            self._report.add("unquantized-changed", name, text)
        elif target.dim() != 2:
            self._report.warn("unquantized-changed", name, text)
        elif (cosine := _cosine(value.float(), target)) > MIN_MATCH_COSINE:
            self._approximate_matrices[name] = text
        elif (reason := _describe_rearrangement(value.float(), target)) is not None:
            self._report.add("swapped-tensors", name, reason)
        elif cosine < MIN_COSINE:
            self._unrelated.append(name)
        else:
            self._report.warn("unquantized-changed", name, text)

    def _may_be_tuned(self, tensor: MatchedTensor, value: Tensor, target: Tensor) -> bool:
        """Return whether a norm weight or bias differs by no more than tuning changes it."""
        model_layout, (module, _, leaf) = self._artifact.model_layout, tensor.name.rpartition(".")
        norms = [norm for norm, _ in foldable_norms(model_layout, tensor.block)]
        if module not in self._folded_scales.norm_scales and (
            leaf != "weight" or module not in norms
        ):
            return False
        offset = model_layout.architecture.norm_offset if model_layout.architecture else 0.0
        max_difference = (self._max_tuning + MAX_CAST_ERROR) * (
            target + offset
        ).abs() + MAX_ABSOLUTE_ERROR
        return bool(((value.float() - target).abs() <= max_difference).all())

    def _compare_sparse(self, name: str, value: Tensor, target: Tensor) -> None:
        """Compare the nonzero weights of a sparse tensor: equal to the source's, or adjusted by SparseGPT."""
        is_nonzero = value != 0
        is_wrong = is_nonzero & ~_is_cast(value, target)
        weights, source = value.float(), target.masked_fill(~is_nonzero, 0.0)
        product, norms, source_norms = (
            (weights * source).sum(-1),
            weights.norm(dim=-1),
            source.norm(dim=-1),
        )
        dissimilar = product < MIN_COSINE * norms * source_norms
        dissimilar |= (norms > MAX_NORM_GROWTH * source_norms) | (
            source_norms > MAX_NORM_GROWTH * norms
        )
        if not bool(is_wrong.any()) or (self._may_change_values and not bool(dissimilar.any())):
            self.sparse_tensors.append(name)
            return
        text = f"{int(is_wrong.sum())} of the {int(is_nonzero.sum())} nonzero values differ from the source's"
        if bool(dissimilar.any()):
            text += f"; row {int(dissimilar.nonzero()[0])} does not resemble the source's"
        proven = not self._may_change_values or 2 * int(is_wrong.sum()) <= int(is_nonzero.sum())
        (self._report.add if proven else self._report.warn)("unquantized-changed", name, text)

    # Findings about the whole model.

    def _report_unrelated(self) -> None:
        """Report tensors that resemble no tensor of the source: only once if they are most of the model."""
        linears = sum(t.role is Role.LINEAR for t in self._artifact.model_layout.tensors)
        if 2 * len(self._unrelated) > linears:
            text = (
                f"this and {len(self._unrelated) - 1} more tensors do not resemble the source's: the model is in"
                " another basis (rotated), or it is another model; only the logits tell"
            )
            self._report.warn("swapped-tensors", self._unrelated[0], text)
            return
        for name in self._unrelated:
            self._report.warn(
                "swapped-tensors", name, "does not resemble the source's tensor of this name"
            )

    def _report_approximate(self) -> None:
        """Report unquantized matrices that differ everywhere: only once if nearly all do, as in a decoded model."""
        linears = sum(t.role is Role.LINEAR for t in self._artifact.model_layout.tensors)
        first, count = next(iter(self._approximate_matrices), ""), len(self._approximate_matrices)
        if count > max(1, 0.9 * linears):
            text = f"this and {count - 1} more matrices are only near the source's: the model was quantized and"
            self._report.warn(
                "unquantized-changed", first, f"{text} decoded, or trained further; the logits tell"
            )
            return
        for name, text in self._approximate_matrices.items():
            self._report.warn("unquantized-changed", name, text)

    def _report_missing(self, source: SourceModel) -> None:
        """Report tensors of the source that the artifact lacks."""
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


# Checks of single tensors.


def anomalies(tensor: QuantizedTensor, value: Tensor) -> Iterator[tuple[str, str]]:
    """Yield checks and descriptions of what is unusual about a matrix on its own.

    ``value`` is the decoded matrix, ``[out, in]``.
    """
    width = group_width(tensor.scheme, value.shape[1])
    peaks = value.abs().view(len(value), -1, width).amax(-1)
    peaks = peaks[peaks > 0]  # scales of groups of zeros mean nothing
    if peaks.numel() and float(peaks.max()) > MAX_PEAK_RATIO * float(peaks.median()):
        text = f"the largest weight is {float(peaks.max()):.3g}, that of the median group {float(peaks.median()):.3g}"
        yield "scale", f"{text}: its scale may be wrong"
    mean_magnitude = float(value.abs().mean())
    groups = tensor.scheme.groups(value.shape[1])
    if value.shape[1] % groups == 0 and value.shape[1] // groups >= MIN_CODES // 2:
        means = value.view(len(value), groups, -1).mean(-1)
        if abs(float(means.median())) > MAX_MEAN_RATIO * mean_magnitude:
            yield (
                "zero-points",
                "its weights are not centered on zero: zero points or codes may be off by one",
            )
    codes = tensor.codes.view(torch.uint8) if tensor.codes.is_floating_point() else tensor.codes
    for dim, axis_name in ((0, "column"), (1, "row")):
        if codes.shape[dim] < MIN_CODES or codes.shape[1] != value.shape[1]:
            continue
        constant = (codes.amin(dim) == codes.amax(dim)) & (
            value.abs().amax(dim) > 0.1 * mean_magnitude
        )
        if constant_groups := constant.nonzero().flatten().tolist():
            more_suffix = (
                f", and {len(constant_groups) - 1} more" if len(constant_groups) > 1 else ""
            )
            yield (
                "group-error",
                f"{axis_name} {constant_groups[0]} has the same code everywhere{more_suffix}",
            )


def fingerprints(tensor: QuantizedTensor) -> Iterator[tuple[str, str]]:
    """Yield "codes" and "scales" with a digest of each, unless equality with another matrix could be chance."""
    for part_name, value in (("codes", tensor.codes), ("scales", tensor.parameters.get("scales"))):
        if value is None or value.numel() < MIN_CODES:
            continue
        raw = value.contiguous().flatten().view(torch.uint8)
        if len(torch.unique(raw[:4096])) >= MIN_CODES // 4:  # scales may well be all alike
            yield part_name, hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def gains_off_by_one(gains: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yield names and descriptions of norms whose weights are off by one relative to the same norm in other blocks.

    Args:
        gains: the median weight of each norm by its stored name, in the order of blocks.
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
    """Return how far one of ``gains``, in the order of blocks, is off the others; 0 if that is not about one.

    Norm weights may grow with depth, so each is compared with its neighbors, and only if the others agree with theirs.
    """
    other_gains = [*gains[:index], *gains[index + 1 :]]
    if len(other_gains) < 3:
        return 0.0
    offset = _difference_from_neighbors(gains, index)
    usual_offset = max(
        abs(_difference_from_neighbors(other_gains, position))
        for position in range(len(other_gains))
    )
    return (
        offset
        if abs(abs(offset) - 1) < OFF_BY_ONE_TOLERANCE and usual_offset < OFF_BY_ONE_TOLERANCE
        else 0.0
    )


def _difference_from_neighbors(norm_medians: Sequence[float], index: int) -> float:
    """Return how much the median weight of one block's norm differs from those of the neighboring blocks.

    Compared with the mean of both neighbors; at the ends, with the neighbor or the extrapolation of two.
    """
    if 0 < index < len(norm_medians) - 1:
        return norm_medians[index] - (norm_medians[index - 1] + norm_medians[index + 1]) / 2
    near, far = (
        (norm_medians[1], norm_medians[2]) if index == 0 else (norm_medians[-2], norm_medians[-3])
    )
    return min(norm_medians[index] - near, norm_medians[index] - (2 * near - far), key=abs)


# Explanations of what a tensor contains.


def _describe_rearrangement(value: Tensor, target: Tensor) -> str | None:
    """Describe how a matrix is a rearrangement of the source's; None if it is not."""
    if _cosine(-value, target) > MIN_MATCH_COSINE:
        return "all weights have the wrong sign"
    if value.shape[0] == value.shape[1] and _cosine(value.T, target) > MIN_MATCH_COSINE:
        return "the matrix is transposed"
    for kind, matrix, source in (("rows", value, target), ("columns", value.T, target.T)):
        directions, source_directions = _unit_rows(matrix[:512]), _unit_rows(source)
        best, best_row = (directions @ source_directions.T).max(1)
        is_moved = (best > MIN_MATCH_COSINE) & (
            (directions * source_directions[: len(directions)]).sum(1) < MIN_MATCH_COSINE
        )
        moved_share, distinct = (
            float(is_moved.float().mean()),
            len(torch.unique(best_row[is_moved])),
        )
        if moved_share > 0.25 and distinct > 0.9 * int(is_moved.sum()):
            return f"the {kind} are in another order: {moved_share:.0%} of them are another one of the source's"
    return None


def _unit_rows(matrix: Tensor) -> Tensor:
    """Return the rows, normalized to length 1, of at most 2048 columns."""
    return torch.nn.functional.normalize(matrix[:, :2048], dim=1)


def _cosine(first: Tensor, second: Tensor) -> float:
    norm = float(first.norm()) * float(second.norm())
    return float((first * second).sum()) / norm if norm else 0.0


def _is_cast(value: Tensor, target: Tensor) -> Tensor:
    """Mark where ``value`` equals ``target`` after a cast to its type, possibly through another 16-bit type."""
    equal = value == target.to(value.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        equal |= value == target.to(dtype).to(value.dtype)
    return equal


def _has_values_of(value: Tensor, weight: Tensor) -> bool:
    """Return whether ``value`` equals ``weight`` after a cast to its type; constants do not count."""
    constant = bool((weight == weight.flatten()[0]).all())
    return not constant and bool(_is_cast(value, weight).all())
