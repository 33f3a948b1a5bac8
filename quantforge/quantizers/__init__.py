"""Quantization methods: optional transforms of the weights, followed by one rounder.

``awq`` is ``awq+rtn``; ``awq+gptq`` runs GPTQ on the transformed weights. Every method is of one `MethodKind`; the
interface of each kind is below. `METHODS` holds modules as text, so that planning imports no torch; adding a method is
one file and one record here.

In this folder:

    awq          AWQ: scale important columns up before rounding
    matrices     Shared steps of all rounders: check matrices, stack them, fit parameters, and report lost values
    rotate       Rotations folded into weights: an orthogonal matrix spreads outliers over all channels
    rtn          Round to nearest: each weight is rounded to the nearest point of its grid
    scale_pairs  Fold factors between a producer and its readers, shared by all transforms that move scales between them
    smooth       SmoothQuant: move outliers of an activation into the weights that read it
    sparsity     Sparsity: set weights of each row to zero by their cost, and compensate in the remaining weights
    gptq/        GPTQ: round the columns of a matrix in turn
    guidance/    Guidance: weight calibration tokens by the gradients of the loss at the outputs of linears
    tuning/      Tuning: fine-tune scales, norm gains and codes of a rounded model to match the outputs of its source
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from quantforge.errors import UnknownNameError, UsageError, nearest_hint
from quantforge.events import Event
from quantforge.model.statistics import Statistic

if TYPE_CHECKING:
    from torch import Tensor

    from quantforge.files.reader import Checkpoint
    from quantforge.model.block import DecoderBlock
    from quantforge.model.statistics import Statistics
    from quantforge.packers.tensor import QuantizedTensor
    from quantforge.recipe import Rounding
    from quantforge.scheme import LayerScheme, Scheme

RTN = "rtn"  # the default data-free rounder: used if a method names none, or one that needs missing statistics
# Measured best: GPTQ on most grids, AWQ+GPTQ on integers below 8 bits
GPTQ, AWQ_GPTQ = "gptq", "awq+gptq"


class MethodKind(StrEnum):
    """Kind of a method, which determines its interface.

    A rounder turns the matrices that read one activation into codes (`Rounder`). A transform rewrites one block without
    changing its function, so that rounding it loses less (`Transform`). A source transform rewrites the whole source
    before planning (`apply_source_transforms`). A sparsifier sets weights to zero (`sparsity.sparsify`).
    """

    ROUNDER = "rounder"
    TRANSFORM = "transform"
    SOURCE_TRANSFORM = "source transform"
    SPARSIFIER = "sparsifier"


@dataclass(frozen=True, slots=True)
class MethodMemory:
    """Peak memory of a method, as a number of float32 copies; must be updated when the code of the method changes.

    Attributes:
        matrices: copies of the largest matrix of a shared input; for a transform, which also runs a sub-block on
            captured inputs, of all its matrices; for a source transform, of a matrix whose strips are read.
        part: copies of the part of a matrix's rows that is processed at a time.
        factorizing: copies of the Hessian of a shared input during its factorization.
        factor: copies of the Hessian afterwards.
        compiler: bytes that stay allocated after compiling loops for large matrices: numba itself, and the loops.
    """

    matrices: float = 0.0
    part: float = 0.0
    factorizing: float = 0.0
    factor: float = 0.0
    compiler: int = 0


@dataclass(frozen=True, slots=True)
class MethodWork:
    """Work of a method excluding the scale search, in units of equivalent float32 multiplications.

    Measured on one thread (docs/memory-and-cost.md); must be updated when the code of the method changes.

    Attributes:
        weights: work per weight.
        columns: work per weight and column of its matrix.
        sweep_columns: as ``columns``, for each sweep of a refinement.
        cubes: work per cubed number of columns of a shared input.
        tries: number of factors that a transform tries on ``rows`` of each matrix.
        rows: number of rows used for tries.
        finalists: number of factors that are tried on all rows.
    """

    weights: float = 0.0
    columns: float = 0.0
    sweep_columns: float = 0.0
    cubes: float = 0.0
    tries: int = 0
    rows: int = 512
    finalists: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    """Properties of a method that are needed without importing its code.

    Attributes:
        module: dotted path of its code.
        kind: kind of the method, which determines its interface.
        needs: statistics that it needs of each shared input.
        workspace: peak memory, for the forecast.
        work: work, for the forecast of time.
    """

    module: str
    kind: MethodKind
    needs: frozenset[Statistic]
    workspace: MethodMemory
    work: MethodWork = field(default_factory=MethodWork)


METHODS: Mapping[str, Method] = {
    "rtn": Method(
        "quantforge.quantizers.rtn", MethodKind.ROUNDER, frozenset(), MethodMemory(matrices=2.5, compiler=86_000_000)
    ),
    "gptq": Method(
        "quantforge.quantizers.gptq.gptq", MethodKind.ROUNDER, frozenset({Statistic.HESSIAN}),
        MethodMemory(part=5.0, factorizing=4.0, factor=1.0, compiler=110_000_000),
        MethodWork(weights=5800.0, columns=2.0, sweep_columns=2.0, cubes=1.6),
    ),
    "awq": Method(
        "quantforge.quantizers.awq", MethodKind.TRANSFORM, frozenset({Statistic.SQUARES}), MethodMemory(matrices=8.0),
        MethodWork(tries=63, finalists=8),
    ),
    "smooth": Method(
        "quantforge.quantizers.smooth", MethodKind.TRANSFORM, frozenset({Statistic.PEAKS}), MethodMemory(matrices=8.0),
        MethodWork(tries=21, finalists=2),
    ),
    "rotate": Method(
        "quantforge.quantizers.rotate", MethodKind.SOURCE_TRANSFORM, frozenset(), MethodMemory(matrices=1.5),
        MethodWork(weights=1500.0),
    ),
    "magnitude": Method(
        "quantforge.quantizers.sparsity", MethodKind.SPARSIFIER, frozenset({Statistic.SQUARES}),
        MethodMemory(matrices=6.0),
    ),
    "wanda": Method(
        "quantforge.quantizers.sparsity", MethodKind.SPARSIFIER, frozenset({Statistic.SQUARES}),
        MethodMemory(matrices=6.0),
    ),
    "sparsegpt": Method(
        "quantforge.quantizers.sparsity", MethodKind.SPARSIFIER, frozenset({Statistic.HESSIAN}),
        MethodMemory(matrices=6.0, factorizing=4.0, factor=1.0),
    ),
}  # fmt: skip
# Names used by other tools, looked up by `nearest_hint`.
METHOD_ALIASES: Mapping[str, str] = {
    "gptqmodel autogptq gptqmodifier gptqv2 gptaq gptqmarlin gptvq": "--method gptq",
    "autoawq awqmodifier awqmarlin llmawq mlxawq": "--method awq",
    "smoothquant smoothquantmodifier sq": "--method smooth+gptq, or smooth alone",
    "none nearest round roundtonearest naive minmax plain quantizationmodifier data free datafree": "--method rtn",
    "autoround signround quip quipsharp hqq aqlm adaround omniquant brecq dwq":
        "it is not here; without --method what measured best is taken, below 8 bits --method awq+gptq",
    "quarot spinquant hadamard rotation rotations": "--method rotate+gptq",
    "auto best default": "leave --method out: what measured best is taken",
    "bnb bitsandbytes nf4 fp4 qlora": "this is a format: --format bnb",
    "llmint8": "this is a scheme: --scheme LLM_INT8",
    "gguf ggml llamacpp kquant kquants": "this is a format: --format gguf",
    "imatrix": "quantforge quantize MODEL --imatrix FILE --method rtn --format gguf",
    "fp8 fp8dynamic": "this is a scheme: --scheme FP8_DYNAMIC",
    "w4a16 w8a8 w8a16 int4 int8": "this is a scheme: --scheme W4A16, or --bits 4",
    "prune pruning sparse sparsity": "--method wanda --sparsity 50%",
    "dynamicquant mixed mixedprecision": "`quantforge allocate` chooses a scheme for each layer",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """A rounded matrix with its events and figures.

    ``figures`` are numbers for progress lines and the manifest, e.g. ``{"error": 0.0031}`` (relative error under the
    method's objective).
    """

    tensor: QuantizedTensor
    events: tuple[Event, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


class Rounder(Protocol):
    """Interface of a rounder's module; it receives the options of a `Rounding`, not the whole recipe."""

    def round_matrices(
        self,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        schemes: Mapping[str, Scheme],
        rounding: Rounding,
    ) -> dict[str, Rounded]:
        """Round all matrices ``[out, in]`` that read one shared input; keys are those of ``weights``.

        ``statistics`` of that input include at least those listed in the method's ``needs``.
        """


class TransformResult(NamedTuple):
    """Result of applying a transform to a block.

    Attributes:
        statistics: updated statistics of the inputs, by `SharedInput.key`.
        events: pairs that were skipped.
        figures: numbers and words for the journal and the manifest, by `SharedInput.key`.
    """

    statistics: dict[str, Statistics]
    events: tuple[Event, ...]
    figures: dict[str, dict[str, Any]]


class Transform(Protocol):
    """Interface of a transform's module."""

    def apply(
        self,
        part: DecoderBlock,
        statistics: Mapping[str, Statistics],
        layers: Mapping[str, LayerScheme],
        rounding: Rounding,
    ) -> TransformResult:
        """Change one block in place without changing its function, so that rounding it loses less.

        Args:
            part: the block.
            statistics: statistics by `SharedInput.key`.
            layers: schemes of the linears that will be quantized.
            rounding: options of the rounder.
        """


def parse_method(text: str) -> tuple[tuple[str, ...], str]:
    """Split a method such as ``awq+gptq`` into its sparsifiers and transforms, and its rounder (default ``rtn``).

    Source transforms, which come before them, are not returned; see `source_transforms`.

    Raises:
        UsageError: an unknown word, a repeated word, two rounders, or words in the wrong order.
    """
    steps = text.lower().split("+")
    for step in steps:
        if step not in METHODS:
            raise _unknown_method(step, text)
    last = METHODS[steps[-1]].kind is MethodKind.ROUNDER
    rounder = steps.pop() if last else RTN
    kinds = [METHODS[step].kind for step in steps]
    num_source_transforms = kinds.count(MethodKind.SOURCE_TRANSFORM)
    sparse = kinds.count(MethodKind.SPARSIFIER)
    order = [MethodKind.SOURCE_TRANSFORM] * num_source_transforms + [MethodKind.SPARSIFIER] * sparse
    order += [MethodKind.TRANSFORM] * (len(kinds) - len(order))
    if kinds != order or len(set(steps)) != len(steps):
        first = "transforms of the whole source, then " if num_source_transforms else ""
        raise UsageError(
            f"method '{text}': {first}transforms come first, then one rounder",
            "e.g. --method awq+gptq",
        )
    return tuple(steps[num_source_transforms:]), rounder


def _unknown_method(unknown: str, text: str) -> UnknownNameError:
    """Return the error for an unknown word in a method; if all its parts are methods, the hint is the correct sum."""
    context = f" in '{text}'" if unknown != text.lower() else ""
    typed_names = re.findall(r"\w+", text.lower())
    if len(typed_names) < 2 or not METHODS.keys() >= {*typed_names}:
        hint = nearest_hint(unknown, METHODS, METHOD_ALIASES)
    else:
        typed_names.sort(key=lambda method_name: METHODS[method_name].kind == "rounder")
        hint = f"--method {'+'.join(typed_names)}"
    return UnknownNameError(f"unknown method '{unknown}'{context}", hint)


def source_transforms(method: str) -> tuple[str, ...]:
    """Return the source transforms of a method in order, ignoring other words."""
    known_steps = [step for step in method.lower().split("+") if step in METHODS]
    return tuple(step for step in known_steps if METHODS[step].kind is MethodKind.SOURCE_TRANSFORM)


def apply_source_transforms(source: Checkpoint, transforms: Iterable[str]) -> Checkpoint:
    """Apply source transforms to a checkpoint; the result has other tensors but computes the same function.

    Examples are rotations, permutations and folded norms. The module of such a transform has a function ``prepare``
    that takes and returns a checkpoint. It only reads headers and does not import torch, since `plan` calls it; tensors
    are computed when they are read, see `quantforge.files.computed_tensors`. Planning, the run and `verify --source`
    see only the result. A quantized source is returned unchanged: planning refuses it.

    Args:
        source: checkpoint of the model.
        transforms: names of source transforms, in order.

    Raises:
        InputError: the family has no declarations, or not the required ones.
    """
    if "quantization_config" not in source.config:
        for transform in transforms:
            source = import_module(METHODS[transform].module).prepare(source)
    return source


def needs(method: str, *, importance: bool = False) -> frozenset[Statistic]:
    """Return the statistics that ``method`` needs; ``importance`` adds the mean squares for a scale search."""
    transforms, rounder = parse_method(method)
    needed = METHODS[rounder].needs.union(*(METHODS[transform].needs for transform in transforms))
    if importance and Statistic.HESSIAN not in needed:
        needed |= {Statistic.SQUARES}
    return needed


def is_data_free(rounder: str) -> bool:
    """Return whether a rounder needs no statistics of the inputs of a layer."""
    return not METHODS[rounder].needs


def load_rounder(name: str) -> Rounder:
    """Import and return the module of a rounder."""
    return cast("Rounder", import_module(METHODS[name].module))


def load_transform(name: str) -> Transform:
    """Import and return the module of a transform."""
    return cast("Transform", import_module(METHODS[name].module))


def is_sparse(method: str) -> bool:
    """Return whether a method includes a sparsifier."""
    steps = method.lower().split("+")
    return any(step in METHODS and METHODS[step].kind is MethodKind.SPARSIFIER for step in steps)
