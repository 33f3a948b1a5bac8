"""Every tensor of an artifact: readable, finite, and with a source at hand what the source says it should be.

One tensor is in memory at a time, beside the one that it is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.checkpoint.reader import scan_finite
from quantforge.errors import InputError, IntegrityError
from quantforge.formats import ModuleLayout, kv_scales
from quantforge.formats.checks import positive
from quantforge.grids import PerGroup, Zero
from quantforge.packers.tensor import QuantizedTensor
from quantforge.runtime.kv_cache import read_scales
from quantforge.scheme import Activation, Scheme
from quantforge.verification.alone import digest, oddities
from quantforge.verification.artifact import Artifact, Original
from quantforge.verification.compare import Figures, compare, outliers
from quantforge.verification.deviation import Deviation, deviation
from quantforge.verification.explain import Explainer
from quantforge.verification.findings import Report, Severity
from quantforge.verification.folded import Factors, factors_of
from quantforge.verification.inputs import Inputs
from quantforge.verification.limits import excesses
from quantforge.verification.ranges import SIBLINGS, wrong_cache, wrong_input

LARGEST_SCALE = 2.0**14  # of the median scale of its tensor
FOLDED = 2.0**-7  # relative, of a tensor that was multiplied with a factor, both stored in 16 bits
TINY = 2.0**-23  # what a gain loses that some files store less 1
FOLDED_SNR = 30.0  # decibels, of a kept tensor whose factors were fitted
WRONG = 0.5  # cosine of a matrix that does not come from where it should
SHIFTED = 0.55  # steps by which the median group is off under the wrong convention


class Numbers:
    """Checker of the tensors of one artifact, block by block."""

    def __init__(
        self,
        report: Report,
        artifact: Artifact,
        source: Original | None,
        inputs: Inputs | None = None,
        *,
        twice: bool = False,
    ) -> None:
        """Look at ``artifact``.

        Args:
            report: gets the findings.
            artifact: whose tensors are looked at.
            source: what they are compared with.
            inputs: what its linears read, as far as that is known.
            twice: the manifest says that it was quantized before, with the loss of that.
        """
        self._inputs = inputs or Inputs()
        self.coherence: dict[str, float] = {}  # by stored name, of what was compared
        self._codes: dict[str, str] = {}  # digest of codes: the first module that has them
        self._input_scales: dict[str, float] = {}  # of the first linear of each shared input
        self.factors = Factors()  # of all blocks, once they are checked
        self._noisy = Severity.WARNING if twice else Severity.ERROR
        self._report = report
        self._artifact = artifact
        self._source = source
        self._explainer = Explainer(artifact.matched, source) if source else None
        self._bad: set[str] = set()  # stored names that are not compared any more

    def check(self) -> None:
        """Check all tensors."""
        for block in range(-1, self._artifact.matched.blocks):
            tensors = [t for t in self._artifact.matched.tensors if t.block == block]
            for tensor in tensors:
                self._check_alone(tensor)
            if self._source is not None:
                factors = self._factors(block)
                self.factors.add(factors)
                for tensor in tensors:
                    if tensor.stored.name not in self._bad:
                        self._compare(tensor, factors, self._source)
        if self._source is not None:
            self._check_absent(self._source)
        self._check_cache()

    def _check_cache(self) -> None:
        """Check scales of the KV cache against what the source shows; `kv_scales.found` checks that all are there."""
        checkpoint = self._artifact.checkpoint
        headers = {name: entry.stored() for name, entry in checkpoint.entries.items()}
        found = kv_scales.found(checkpoint.config, headers)
        for name in sorted(found.stored):
            try:
                positive(name, checkpoint.read(name))
            except InputError as error:
                self._report.add("scale", name, error.message)
                return
        scales = read_scales(checkpoint, found, torch.device("cpu"))
        for block, seen in self._inputs.caches.items():
            for which, text in wrong_cache(scales[block], seen) if block in scales else ():
                self._report.add("scale", found.names[block]["kv".index(which)], text)

    # what needs no source

    def _check_alone(self, tensor: MatchedTensor) -> None:
        layout = self._artifact.layout(tensor)
        try:
            if layout is None:
                name = tensor.stored.name
                scan_finite(name, self._artifact.checkpoint.read(name))
                return
            for name in layout.stored:
                scan_finite(name, self._artifact.checkpoint.read(name))
            found = self._artifact.unpack(layout)
            scan_finite(tensor.stored.name, found.decode())
        except (InputError, IntegrityError) as error:
            self._bad.add(tensor.stored.name)
            self._report.add(error.fault, error.tensor or tensor.stored.name, error.message)
            return
        self._check_scales(layout, found)
        if self._source is None:
            self._check_zeros(layout, found)
            for check, text in oddities(found):
                self._report.add(check, layout.module, text)
            if (own := digest(found)) is not None:
                other = self._codes.setdefault(own, layout.module)
                if other != layout.module:
                    self._report.add("swapped", layout.module, f"the same codes as {other}")

    def _check_scales(self, layout: ModuleLayout, found: QuantizedTensor) -> None:
        """Report scales far above all others, and scales that are all zero."""
        scales = found.parameters.get("scales")
        if scales is None:
            return
        sizes = scales.float().abs().flatten()
        typical = float(sizes.median())
        if typical > 0 and float(sizes.max()) > LARGEST_SCALE * typical:
            text = f"scale {float(sizes.max()):.3g}, the median is {typical:.3g}"
            self._report.add("scale", layout.module, text)
        if typical == 0 and bool((sizes == 0).all()):
            self._report.add("scale", layout.module, "all scales are zero")

    def _check_zeros(self, layout: ModuleLayout, found: QuantizedTensor) -> None:
        """Report zero points that are read wrongly: weights are centred, so the median group is not a step off zero."""
        zeros = found.parameters.get("zeros")
        # At 7 and 8 bits a step is less than the mean of many a healthy group.
        if zeros is None or not 3 <= found.scheme.bits <= 6 or found.scheme.zero is not Zero.INT:
            return
        rows, groups = zeros.shape
        mean = found.codes.view(rows, groups, -1).double().mean(-1) - zeros.double()
        shift = float(mean.median())
        if abs(shift) > SHIFTED:
            text = f"the median group is {shift:+.2f} steps off zero: a zero point off by one"
            self._report.add("zero-convention", layout.module, text)

    # what does

    def _factors(self, block: int) -> Factors:
        matched = self._artifact.matched
        if block < 0 or matched.architecture is None or matched.dimensions is None:
            return Factors()
        assert self._source is not None
        factors = factors_of(
            matched.architecture,
            matched.dimensions,
            matched.block_name(block),
            self._source.weight,
            self._found,
        )
        for module, text in factors.problems:
            self._report.add("fold", module, text)
        return factors

    def _found(self, name: str) -> Tensor | None:
        """Return an artifact's weight in float32 by canonical name, linears as ``[out, in]``, None without it."""
        tensor = self._artifact.matched.by_name.get(name)
        if tensor is None or tensor.stored.name in self._bad:
            return None
        layout = self._artifact.layout(tensor)
        if layout is not None:
            return self._artifact.unpack(layout).decode()
        value = self._artifact.checkpoint.read(tensor.stored.name).float()
        return value.T.contiguous() if tensor.transposed else value

    def _compare(self, tensor: MatchedTensor, factors: Factors, source: Original) -> None:
        target = source.weight(tensor.name)
        layout = self._artifact.layout(tensor)
        if target is None:
            if tensor.role is not Role.FOREIGN:
                self._report.add(
                    "kept-changed", tensor.stored.name, "the source has no such tensor"
                )
            return
        module = tensor.name.removesuffix(".weight").removesuffix(".bias")
        if tensor.role is Role.LINEAR:
            target = factors.applied(module, target)
        elif tensor.role is Role.BIAS and module in factors.rows:
            target = target * factors.rows[module]
        if layout is None:
            self._compare_kept(tensor, target, factors)
            return
        found = self._artifact.unpack(layout)
        if found.shape != tuple(target.shape):
            text = f"{list(found.shape)}, the source has {list(target.shape)}"
            self._report.add("kept-changed", tensor.stored.name, text)
            return
        if found.input is not None and "input_scale" in found.parameters:
            self._check_input(module, found.input, found.parameters["input_scale"], factors)
        inputs = self._inputs.of(module)
        if inputs is not None and module in factors.columns:
            inputs = inputs / factors.columns[module]
        scattered = found.scheme.granularity == PerGroup(1)
        scheme = layout.scheme.weight if scattered else found.scheme
        self._judge(tensor, found, scheme, target, inputs)

    def _check_input(
        self, module: str, activation: Activation, scale: Tensor, factors: Factors
    ) -> None:
        """Check the range of a static input against what the source shows, and against others that read the same."""
        key = self._inputs.shared.get(module, module)
        other = self._input_scales.setdefault(key, float(scale))
        if max(other, float(scale)) > SIBLINGS * min(other, float(scale)):
            text = f"input scale {float(scale):.4g}, {key} reads the same and has {other:.4g}"
            self._report.add("scale", module, text)
        raw, peaks = self._inputs.raw(module), self._inputs.peak(module)
        if raw is None or peaks is None:
            return
        columns = factors.columns.get(module, torch.ones(()))
        problem = wrong_input(activation, scale, raw / columns, peaks / columns)
        if problem is not None:
            self._report.add("scale", module, f"input scale {float(scale):.4g} {problem}")

    def _judge(
        self,
        tensor: MatchedTensor,
        found: QuantizedTensor,
        scheme: Scheme,
        target: Tensor,
        inputs: Tensor | None,
    ) -> None:
        name, decoded = tensor.stored.name, found.decode()
        figures = compare(target, decoded, found)
        if figures.cosine < WRONG:
            self._report.tensors.append(_row(name, found, figures, None))
            assert self._explainer is not None
            reason = self._explainer.explain(tensor, decoded, target)
            self._report.add(
                "swapped", name, f"cosine {figures.cosine:.3f} with the source: {reason}"
            )
            return
        apart = deviation(target, decoded, found, inputs, scheme)
        self._report.tensors.append(_row(name, found, figures, apart))
        self.coherence[name] = apart.coherence
        if _shifted(figures):
            shift = float(figures.offsets.median())
            text = f"the median group is {shift:+.2f} steps off the source: a zero point off by one"
            self._report.add("zero-convention", name, text)
            return
        wanders = inputs is None and tensor.role is Role.LINEAR
        for excess in excesses(apart, scheme, wanders=wanders):
            check = "noise" if excess.whole else "groups"
            self._report.add(check, name, excess.text, self._noisy)
        for outlier in outliers(figures, found.scheme):
            self._report.add("groups", name, str(outlier))

    def _compare_kept(self, tensor: MatchedTensor, target: Tensor, factors: Factors) -> None:
        """Check that a plain tensor is the source's in the type in which it is stored: exactly, except for factors."""
        name, module = tensor.stored.name, tensor.name.rpartition(".")[0]
        if module in factors.norms and tensor.name.endswith(".weight"):
            return  # its quotient with the source is the factor that its readers are checked with
        stored = self._artifact.checkpoint.read(name)
        found = stored.T if tensor.transposed else stored
        if found.shape != target.shape:
            text = f"{list(found.shape)}, the source has {list(target.shape)}"
            self._report.add("kept-changed", name, text)
            return
        folded = module in factors.norms or factors.touches(module)
        if module in factors.norms:
            target = target * factors.norms[module]
        error = (found.float() - target).abs()
        if module in factors.fitted:
            signal, noise = float(target.square().sum()), float(error.square().sum())
            if noise * 10 ** (FOLDED_SNR / 10) > signal:
                text = "differs from the source, beyond its factors"
                self._report.add("kept-changed", name, text)
            return
        wrong = error > TINY
        if folded:
            wrong &= error > FOLDED * target.abs()
        else:
            wrong &= ~_is_cast(found, target)
        if bool(wrong.any()):
            place = (error * wrong).flatten().argmax()
            text = (f"{int(wrong.sum())} of {target.numel()} values differ from the source, e.g. "
                    f"{float(found.flatten()[place]):.5g} for {float(target.flatten()[place]):.5g}")  # fmt: skip
            self._report.add("kept-changed", name, text)

    def _check_absent(self, source: Original) -> None:
        matched = self._artifact.matched
        head = f"{matched.architecture.head}.weight" if matched.architecture else "lm_head.weight"
        for name, tensor in source.matched.by_name.items():
            if name not in matched.by_name and tensor.role is not Role.FOREIGN:
                if name == head and matched.tied:
                    text = "tie_word_embeddings is true, the source has a head of its own"
                    self._report.add("configuration", name, text)
                else:
                    self._report.add("incomplete", name, "the source has it, the artifact does not")


def _shifted(figures: Figures) -> bool:
    return figures.step is not None and abs(float(figures.offsets.median())) > SHIFTED


def _is_cast(found: Tensor, target: Tensor) -> Tensor:
    """Mark where ``found`` is ``target`` in its own type, perhaps by way of another type of 16 bits."""
    equal = found == target.to(found.dtype)
    for dtype in (torch.bfloat16, torch.float16):
        equal |= found == target.to(dtype).to(found.dtype)
    return equal


def _row(
    name: str, found: QuantizedTensor, figures: Figures, apart: Deviation | None
) -> dict[str, object]:
    """Return what the report says of one tensor."""
    large = figures.tt > 0
    cosines = figures.cosines[large]
    gains = figures.gains[large]
    return {
        "name": name,
        "scheme": str(found.scheme),
        "snr_db": round(figures.snr, 3),
        "cosine": round(figures.cosine, 6),
        "worst_cosine": round(float(cosines.min()), 4) if len(cosines) else None,
        "gains": [round(float(gains.min()), 4), round(float(gains.max()), 4)]
        if len(gains)
        else None,
        "over_rounding": round(apart.whole, 4) if apart else None,
        "worst_row_over_rounding": round(float(apart.rows.max()), 4) if apart else None,
        "worst_column": round(float(apart.columns.max()), 4) if apart else None,
        "gain_off": round(apart.gain, 5) if apart else None,
        "worst_offset_steps": round(float(figures.offsets.abs().max()), 4),
    }
