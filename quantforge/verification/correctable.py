"""A quantized model beside its source, as far as an adapter of low rank can be made for it.

Linears may have been rounded after factors were moved between them: what they should compute with is then the source's
weight with the same factors, which the files of both tell (`quantforge.verification.folds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from quantforge.architectures.match import Role
from quantforge.checkpoint.finite_values import scan_finite
from quantforge.errors import InputError, IntegrityError, RefusedError, UsageError
from quantforge.model.declared_names import names_of
from quantforge.model.skeleton import build
from quantforge.results import manifest
from quantforge.verification.files import SourceMatch, check_source
from quantforge.verification.findings import Report
from quantforge.verification.folds import Folds, folds_of
from quantforge.verification.opening import (
    Artifact,
    DeclaredChanges,
    Original,
    check_adapter,
    folds_factors,
    open_artifact,
    open_source,
)


@dataclass(frozen=True, slots=True)
class Correctable:
    """A quantized model that can be corrected.

    Attributes:
        source: what it was made from.
        base: the model, decoded.
        modules: the module of the running model, by the canonical name of each linear that is corrected.
        shapes: ``(out, in)`` of each by module.
        others: linears of the running model that are not.
        folded: whether factors were moved between its linears.
    """

    source: Original
    base: Original
    modules: Mapping[str, str]
    shapes: Mapping[str, tuple[int, int]]
    others: frozenset[str]
    folded: bool

    @property
    def turned(self) -> bool:
        """Return whether its linears are stored ``[in, out]``."""
        family = self.base.matched.architecture
        return family is not None and family.transposed

    def aims(self, index: int) -> Callable[[str], Tensor]:
        """Return what the linears of a block should compute with, float32 ``[out, in]``, by canonical name."""
        factors = Folds()
        if self.folded:
            factors = folds_of(self.base.matched, index, self.source.weight, self.base.weight)
        return partial(self._aim, factors)

    def _aim(self, factors: Folds, linear: str) -> Tensor:
        weight = self.source.weight(f"{linear}.weight")
        assert weight is not None  # looked at when it was opened
        scan_finite(linear, weight)
        return factors.applied(linear, weight)


def open_correctable(source: Path, base: Path, adapter: Path | None, rank: int) -> Correctable:
    """Open both models, from headers and digests alone.

    Raises:
        RefusedError: PEFT names nothing that could be corrected.
        UsageError: the rank is above a side of a matrix.
        IntegrityError: by its manifest it was made from another source.
        InputError: as of `open_source`; the source lacks a weight, or has it in another shape.
    """
    if base.is_file():
        raise RefusedError(
            f"{base}: PEFT puts no adapter on a GGUF file",
            "correct a result in another format: quantforge formats",
        )
    document = manifest.read(base)
    report, declared = Report(base, source), DeclaredChanges.of(document)
    check_adapter(document, source, adapter)
    artifact = open_artifact(report, derive=True)
    if artifact is None:
        raise InputError(f"{base}: {report.unsupported or report.findings[0].detail}")
    if check_source(report, artifact, document, source) is not SourceMatch.COMPARABLE:
        raise IntegrityError(f"{base}: {report.findings[-1].detail}", "name what it was made from")
    if any(tensor.expert >= 0 for tensor in artifact.matched.tensors):
        raise RefusedError(
            f"{base}: it has experts, which transformers runs as stacks: PEFT names no parts of these",
            "spend the bytes on bits: quantforge allocate",
        )
    original = open_source(source, declared, adapter, derive=True)
    modules, shapes, others = _modules(artifact, rank)
    for name, module in modules.items():
        found = original.matched.by_name.get(f"{name}.weight")
        shape = None if found is None else found.stored.shape[:: -1 if found.transposed else 1]
        if shape != shapes[module]:
            raise InputError(
                f"{source}: {name}.weight is {'missing' if shape is None else list(shape)}, that of {base} is"
                f" {list(shapes[module])}",
                "name the model that it was made from",
                tensor=f"{name}.weight",
            )
    return Correctable(
        original, open_source(base, derive=True), modules, shapes, others, not document or folds_factors(document)
    )  # fmt: skip


def _modules(
    artifact: Artifact, rank: int
) -> tuple[dict[str, str], dict[str, tuple[int, int]], frozenset[str]]:
    """Return names and shapes of the linears that are corrected, and the other linears of the model."""
    path, matched = artifact.checkpoint.path, artifact.matched
    if matched.architecture is None:
        raise RefusedError(f"{path}: nothing declares its blocks, and nothing could be derived")
    model = build(artifact.checkpoint.config)
    names = names_of(model, matched, artifact.checkpoint.config)
    linears = {name for name, module in model.named_modules() if _is_linear(module)}
    modules, shapes = {}, {}
    for tensor in matched.tensors:
        layout = artifact.layout(tensor)
        if layout is None or tensor.role is not Role.LINEAR or tensor.block < 0:
            continue
        module = names.runtime(tensor.stored.name).removesuffix(".weight")
        if names.sources[f"{module}.weight"].rule is not None or module not in linears:
            raise RefusedError(
                f"{path}: transformers holds {tensor.stored.name} in another form: PEFT has no name for it",
                "spend the bytes on bits: quantforge allocate",
            )
        if rank > min(layout.shape):
            raise UsageError(
                f"--rank {rank}: {module} is {list(layout.shape)}", f"at most --rank {min(layout.shape)}"
            )  # fmt: skip
        modules[tensor.name.removesuffix(".weight")] = module
        shapes[module] = layout.shape
    if not modules:
        raise RefusedError(f"{path}: no linear of its blocks is quantized", "quantforge inspect")
    return modules, shapes, frozenset(linears - shapes.keys())


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
