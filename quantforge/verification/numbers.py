"""Every tensor of an artifact: readable, finite, and with a source at hand what the source says it should be.

One tensor is in memory at a time, beside the one that it is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantforge.architectures.match import MatchedTensor, Role
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.errors import InputError, IntegrityError
from quantforge.execution.progress import tell
from quantforge.grids import PerGroup
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import Activation, Scheme
from quantforge.verification.alone import SHIFTED, digest, odd_scales, odd_zeros, oddities
from quantforge.verification.cache_scales import check_cache
from quantforge.verification.compare import Figures, compare, outliers
from quantforge.verification.deviation import deviation, row
from quantforge.verification.explain import Explainer
from quantforge.verification.findings import Report, Severity
from quantforge.verification.folded import Factors, factors_of
from quantforge.verification.inputs import Inputs
from quantforge.verification.kept_tensors import check_absent
from quantforge.verification.limits import excesses
from quantforge.verification.opening import Artifact, Original
from quantforge.verification.own_groups import own_groups
from quantforge.verification.ranges import SIBLINGS, wrong_input
from quantforge.verification.stated_values import beyond_stated
from quantforge.verification.tuned_gains import TuningStated
from quantforge.verification.zeros import Zeros

WRONG = 0.5  # cosine of a matrix that does not come from where it should


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
        zeros: Zeros | None = None,
        tuned: TuningStated = TuningStated.NOT,
    ) -> None:
        """Look at ``artifact``.

        Args:
            report: gets the findings.
            artifact: whose tensors are looked at.
            source: what they are compared with.
            inputs: what its linears read, as far as that is known.
            twice: it was rounded twice, so that too much noise is a warning only.
            zeros: those that the manifest states; with any, no factors are looked for.
            tuned: scales and gains of norms; no factors are looked for where none were folded.
        """
        self._zeros, self._tuned = zeros, tuned
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
        self._bad: set[str] = set()  # stored names, not compared any more

    def check(self) -> None:
        """Check all tensors."""
        for block in range(-1, self._artifact.matched.blocks):
            tensors = [t for t in self._artifact.matched.tensors if t.block == block]
            for tensor in tensors:
                tell(tensor.name, block + 1, self._artifact.matched.blocks + 1)
                self._check_alone(tensor)
            if self._source is not None:
                factors = self._factors(block)
                self.factors.add(factors)
                for tensor in tensors:
                    if tensor.stored.name not in self._bad:
                        tell(f"{tensor.name} against the source")
                        self._compare(tensor, factors, self._source)
        if self._source is not None:
            check_absent(self._report, self._artifact, self._source)
        check_cache(self._report, self._artifact.checkpoint, self._inputs.caches)

    # what needs no source

    def _check_alone(self, tensor: MatchedTensor) -> None:
        layout = self._artifact.layout(tensor)
        try:
            if layout is None:
                name = tensor.stored.name
                scan_finite(name, self._artifact.checkpoint.read(name))
                return
            for name in layout.stored:
                if name != tensor.stored.name:  # codes, which float types may carry; decoded below
                    scan_finite(name, self._artifact.checkpoint.read(name))
            found = self._artifact.unpack(layout)
            scan_finite(tensor.stored.name, found.decode())
        except (InputError, IntegrityError) as error:
            self._bad.add(tensor.stored.name)
            self._report.add(error.fault, error.tensor or tensor.stored.name, error.message)
            return
        for text in odd_scales(found):
            self._report.add("scale", layout.module, text)
        if self._source is None:
            for check, text in (*odd_zeros(found), *oddities(found)):
                self._report.add(check, layout.module, text)
            if (own := digest(found)) is not None:
                other = self._codes.setdefault(own, layout.module)
                if other != layout.module:
                    self._report.add("swapped", layout.module, f"the same codes as {other}")

    # what does

    def _factors(self, block: int) -> Factors:
        matched = self._artifact.matched
        plain = self._zeros is not None or self._tuned is TuningStated.PLAIN
        if block < 0 or matched.architecture is None or plain:
            return Factors()
        assert self._source is not None
        factors = factors_of(matched, block, self._source.weight, self._found, self._tuned.slack)
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
                self._report.add("kept-changed", tensor.stored.name, "not in the source")
            return
        module, whole = tensor.name.removesuffix(".weight").removesuffix(".bias"), target
        if tensor.role is Role.LINEAR or (tensor.role is Role.OTHER and target.dim() == 2):
            # Of what a norm feeds, what stays takes its factor too.
            target = factors.applied(module, target)
        elif tensor.role is Role.BIAS and module in factors.rows:
            target = target * factors.rows[module]
        if layout is None:
            stored = self._artifact.checkpoint.read(tensor.stored.name)
            value = stored.T if tensor.transposed else stored
            text = beyond_stated(
                tensor,
                value,
                (whole, target),
                factors,
                self._zeros,
                self._tuned,
                self._artifact.matched,
            )
            if text:
                self._report.add("kept-changed", tensor.stored.name, text)
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
        scheme = layout.scheme.weight if scattered else own_groups(found)
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
        scattered = found.scheme.granularity == PerGroup(1)
        figures = compare(target, decoded, found, None if scattered else scheme)
        if figures.cosine < WRONG:
            self._report.tensors.append(row(name, found, figures, None))
            assert self._explainer is not None
            reason = self._explainer.explain(tensor, decoded, target)
            self._report.add(
                "swapped", name, f"cosine {figures.cosine:.3f} with the source: {reason}"
            )
            return
        apart = deviation(target, decoded, found, inputs, scheme)
        self._report.tensors.append(row(name, found, figures, apart))
        self.coherence[name] = apart.coherence
        if _shifted(figures):
            shift = float(figures.offsets.median())
            text = f"the median group is {shift:+.2f} steps off the source: a zero point off by one"
            self._report.add("zero-convention", name, text)
            return
        wanders = inputs is None and tensor.role is Role.LINEAR
        for excess in excesses(
            apart, scheme, wanders=wanders, tuned=self._tuned is not TuningStated.NOT
        ):
            check = "noise" if excess.whole else "groups"
            self._report.add(check, name, excess.text, self._noisy)
        for outlier in outliers(figures, scheme):
            self._report.add("groups", name, str(outlier))


def _shifted(figures: Figures) -> bool:
    return figures.step is not None and abs(float(figures.offsets.median())) > SHIFTED
