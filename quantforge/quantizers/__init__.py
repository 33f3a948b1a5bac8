"""Methods: transforms, which rewrite the model so that it rounds better, then one rounder.

``awq`` is ``awq+rtn``; ``awq+gptq`` runs GPTQ on the transformed weights. Every method is of one `MethodKind`; the
interface of each kind is below. `METHODS` holds modules as text, so that planning imports no torch; adding a method is
one file and one record here.

In this folder:

    awq          AWQ: scale the columns that matter before rounding, and let what produces them take the inverse
    matrices     What every rounder does with matrices: check them, stack them, fit their parameters
    rotate       Rotations folded into weights: an orthogonal matrix spreads every outlier over all channels
    rtn          Rounding to nearest: each weight goes to the nearest point of its grid, whatever its neighbours do
    scale_pairs  Pairs of a producer and its readers: what every transform that moves factors between them has to see to
    smooth       SmoothQuant: hand outliers of an activation over to the weights that read it (Xiao et al.
    sparsity     Zeros in weights: which of each row go, by the cost of each, and what those that stay do about it
    gptq/        GPTQ: round the columns of a matrix in turn
    guidance/    Guidance: gradients of the loss at the outputs of linears, which weight calibration tokens
    tuning/      Tuning: fine-tune scales, gains of norms and codes of a rounded model
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from quantforge.errors import UnknownNameError, UsageError, nearest
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

RTN = "rtn"  # the rounder without data: of methods that name none, and of what has no statistics
GPTQ, AWQ_GPTQ = "gptq", "awq+gptq"  # measured best on most grids; on integers below 8 bits


class MethodKind(StrEnum):
    """Kind of a method, by its scope.

    A rounder turns the matrices that read one activation into codes (`Rounder`). A transform rewrites one block,
    keeping its function, so that it rounds better (`Transform`). A transform of the whole source changes the model
    before anything else looks at it (`prepared`). What makes weights zero is one function (`sparsity.sparsify`).
    """

    ROUNDER = "rounder"
    TRANSFORM = "transform"
    SOURCE_TRANSFORM = "source transform"
    SPARSIFIER = "sparsifier"


@dataclass(frozen=True, slots=True)
class MethodMemory:
    """Memory of a method at its worst moment, in float32 copies; changes only when the code of the method does.

    Attributes:
        matrices: of the largest matrix of a shared input; of a transform, which also runs a sub-block on captured
            inputs, of all of them; of a transform of the whole source, of a matrix whose strips are read.
        part: of the part of a matrix's rows that is worked on at a time.
        factorizing: of the Hessian of a shared input, while it is factorized.
        factor: of the Hessian, afterwards.
        compiler: bytes that stay when loops for large matrices have been compiled: numba itself, and the loops.
    """

    matrices: float = 0.0
    part: float = 0.0
    factorizing: float = 0.0
    factor: float = 0.0
    compiler: int = 0


@dataclass(frozen=True, slots=True)
class MethodWork:
    """Operations of a method beside the search of scales, in float32 products that take as long.

    Measured on one thread (docs/memory-and-cost.md); they change only when the code of the method does.

    Attributes:
        weights: for each weight.
        columns: for each weight and column of its matrix.
        sweep_columns: the same, of each sweep of a refinement.
        cubes: for each column of a shared input, cubed.
        tries: of a transform: factors that are tried on ``rows`` of each matrix.
        finalists: of these, how many are tried on all rows.
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
    """One method: everything that others need to know of it without importing it.

    Attributes:
        module: dotted path of its code.
        kind: what it works on, and so its interface.
        needs: statistics of the activation that a shared input reads.
        workspace: for the forecast of memory.
        work: for the forecast of time.
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
# Words of other tools, as `nearest` looks them up.
METHOD_WORDS: Mapping[str, str] = {
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
    """One rounded matrix with what there is to tell about it.

    ``figures`` are plain numbers for progress lines and the manifest, e.g. ``{"error": 0.0031}`` (relative error
    under the method's objective).
    """

    tensor: QuantizedTensor
    events: tuple[Event, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


class Rounder(Protocol):
    """Interface of the module of a rounder; it gets the options of a `Rounding`, never the whole recipe."""

    def round_shared(
        self,
        weights: Mapping[str, Tensor],
        statistics: Statistics,
        schemes: Mapping[str, Scheme],
        rounding: Rounding,
    ) -> dict[str, Rounded]:
        """Round every matrix ``[out, in]`` that reads one shared input; keys are those of ``weights``.

        ``statistics`` of that input hold at least what the method's record needs.
        """


class Transformed(NamedTuple):
    """Report of a transform on the block that it has changed.

    Attributes:
        statistics: of the inputs as they are now, by `SharedInput.key`.
        events: what could not be done.
        figures: plain numbers and words for the journal and the manifest, by `SharedInput.key`.
    """

    statistics: dict[str, Statistics]
    events: tuple[Event, ...]
    figures: dict[str, dict[str, Any]]


class Transform(Protocol):
    """Interface of the module of a transform."""

    def apply(
        self,
        part: DecoderBlock,
        statistics: Mapping[str, Statistics],
        layers: Mapping[str, LayerScheme],
        rounding: Rounding,
    ) -> Transformed:
        """Change one block in place, so that it computes what it did and rounds better.

        Args:
            part: the block.
            statistics: by `SharedInput.key`.
            layers: the linears that will be quantized.
            rounding: how they will be.
        """


def parse_method(text: str) -> tuple[tuple[str, ...], str]:
    """Split ``awq+gptq`` into its sparsifiers and transforms, and its rounder (by default ``rtn``).

    Transforms of the whole source, which come before them, are left to `source_transforms`.

    Raises:
        UsageError: an unknown word, a word twice, two rounders, or words in another order.
    """
    words = text.lower().split("+")
    for word in words:
        if word not in METHODS:
            raise _unknown_method(word, text)
    last = METHODS[words[-1]].kind is MethodKind.ROUNDER
    rounder = words.pop() if last else RTN
    kinds = [METHODS[word].kind for word in words]
    whole = kinds.count(MethodKind.SOURCE_TRANSFORM)
    sparse = kinds.count(MethodKind.SPARSIFIER)
    order = [MethodKind.SOURCE_TRANSFORM] * whole + [MethodKind.SPARSIFIER] * sparse
    order += [MethodKind.TRANSFORM] * (len(kinds) - len(order))
    if kinds != order or len(set(words)) != len(words):
        first = "transforms of the whole source, then " if whole else ""
        raise UsageError(
            f"method '{text}': {first}transforms come first, then one rounder",
            "e.g. --method awq+gptq",
        )
    return tuple(words[whole:]), rounder


def _unknown_method(word: str, text: str) -> UnknownNameError:
    """Return the refusal of a word of a sum of methods; the hint is the sum, where all its words are methods."""
    where = f" in '{text}'" if word != text.lower() else ""
    words = re.findall(r"\w+", text.lower())
    if len(words) < 2 or not METHODS.keys() >= {*words}:
        hint = nearest(word, METHODS, METHOD_WORDS)
    else:
        words.sort(key=lambda one: METHODS[one].kind == "rounder")
        hint = f"--method {'+'.join(words)}"
    return UnknownNameError(f"unknown method '{word}'{where}", hint)


def source_transforms(method: str) -> tuple[str, ...]:
    """Return the transforms of the whole source in a method, in their order; other words are passed over."""
    known = [word for word in method.lower().split("+") if word in METHODS]
    return tuple(word for word in known if METHODS[word].kind is MethodKind.SOURCE_TRANSFORM)


def prepared(source: Checkpoint, transforms: Iterable[str]) -> Checkpoint:
    """Return the source as the model is from now on: it computes what it did, with other tensors.

    Rotations, permutations, folded norms. The module of such a transform has a function ``prepare``, which takes and
    returns a checkpoint. It only reads headers, and imports no torch, since `plan` calls it; tensors are computed when
    they are read, see `quantforge.files.computed_tensors`. Planning, the run and `verify --source` see the result
    alone. A quantized source is left as it is: planning refuses it.

    Args:
        source: the model.
        transforms: of the whole source, in their order.

    Raises:
        InputError: the family has no declarations, or not those that are needed.
    """
    if "quantization_config" not in source.config:
        for word in transforms:
            source = import_module(METHODS[word].module).prepare(source)
    return source


def needs(method: str, *, importance: bool = False) -> frozenset[Statistic]:
    """Return the statistics that ``method`` needs; ``importance`` adds the squares for a scale search."""
    transforms, rounder = parse_method(method)
    wanted = METHODS[rounder].needs.union(*(METHODS[word].needs for word in transforms))
    if importance and Statistic.HESSIAN not in wanted:
        wanted |= {Statistic.SQUARES}
    return wanted


def rounder_of(name: str) -> Rounder:
    """Import the module of a rounder."""
    return cast("Rounder", import_module(METHODS[name].module))


def transform_of(name: str) -> Transform:
    """Import the module of a transform."""
    return cast("Transform", import_module(METHODS[name].module))


def is_sparse(method: str) -> bool:
    """Return whether a method makes weights zero."""
    words = method.lower().split("+")
    return any(word in METHODS and METHODS[word].kind is MethodKind.SPARSIFIER for word in words)


if TYPE_CHECKING:  # the type checker holds the modules to the interfaces
    from quantforge.quantizers import awq, rtn, smooth
    from quantforge.quantizers.gptq import gptq

    _ROUNDERS: tuple[Rounder, ...] = (rtn, gptq)
    _TRANSFORMS: tuple[Transform, ...] = (awq, smooth)
