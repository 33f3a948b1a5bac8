"""The recipe: what is wanted, as typed data, read from and written to TOML.

A recipe holds intent only; the plan decides. Every key has one meaning and a default, an unknown key is an error
that names the nearest one, and ``from_toml(recipe.to_toml()) == recipe``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from quantforge.arguments import strict_fields
from quantforge.checkpoint.files import FILES
from quantforge.checkpoint.recipe_fields import (
    built,
    check_fields,
    lines,
    named_after,
    read_toml,
    write_small,
)
from quantforge.errors import InputError
from quantforge.notation import parse_sparsity, share_of
from quantforge.scheme import Sparsity
from quantforge_files.roles import RECIPE

# Keys whose values are in small letters.
WORDS = ("method", "effort", "format", "engine", "scales", "inputs", "kv_cache", "mtp")
IMATRIX = "imatrix:"  # then a name: the importance comes from a file
NO_DATA = "none"  # the calibration source of those who want none


@strict_fields
@dataclass(frozen=True, slots=True)
class GptqOptions:
    """``[gptq]``: see `quantforge.quantizers.gptq`."""

    damping: float = 0.01  # of the mean of the Hessian's diagonal
    shrinkage: float | None = (
        None  # of the Hessian's diagonal, added to it; None: as the grid has it
    )
    refine: int = 2  # sweeps of coordinate descent over the codes, a refit of the scales after each
    runs: int = 0  # of error feedback, each with scales fitted to what the last one rounded; 0: as the grid has it

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.damping < 1:
            raise InputError(f"recipe: gptq.damping = {self.damping}", "between 0 and 1, e.g. 0.01")

    def runs_of(self, grid: int) -> int:
        """Return how often error feedback runs on a grid that has it run ``grid`` times."""
        return self.runs or (grid if self.refine else 1)


@strict_fields
@dataclass(frozen=True, slots=True)
class AwqOptions:
    """``[awq]``: see `quantforge.quantizers.awq`."""

    rows: int = 16  # calibration rows that the search compares outputs on

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Rounding:
    """The part of a recipe that methods see: how scales are chosen, and the options of each method."""

    scales: str = "search"  # as of `Recipe`
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)

    @property
    def weighs(self) -> bool:
        """Return whether scales are chosen by what the layers read, where that is known."""
        return self.scales != "absmax"


@strict_fields
@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """``[calibration]``: where the text comes from and how it is cut."""

    source: str = "builtin"
    samples: int = 128  # rows
    length: int = 512  # tokens of a row
    seed: int = 0
    random: float | None = (
        None  # share of the rows whose tokens are drawn at random, see `planning.calibration_rows`
    )
    chat_template: bool = False  # render `messages` documents through the model's chat template
    micro_batch: int = 2  # rows of one forward; part of the recipe because sums depend on it
    precision: str = "float32"  # of the products of the forward: float32 | bfloat16, twice as fast where it is native
    experts: str = "routed"  # tokens that calibrate an expert: those sent to it | all
    min_expert_tokens: int = 128  # of an expert that saw fewer an event tells
    sha256: tuple[str, ...] = ()  # `DIGEST  NAME` of the source's files, see `planning.cited_files`

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def importance_file(self) -> str | None:
        """Return the name of the file that importance comes from, None where there is none."""
        found = self.source.removeprefix(IMATRIX)
        return None if found == self.source else found

    @property
    def writes_own_text(self) -> bool:
        """Return whether text is sampled from the model (the source ``self``, alone or in a mixture)."""
        sources = self.source.split(",")
        return any(source.partition("=")[0].strip() == "self" for source in sources)


@strict_fields
@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """``[adapter]``: what is merged into the source before anything else looks at it; see `formats.sources.adapter`."""

    source: str = ""  # its directory; none when empty
    sha256: tuple[str, ...] = ()  # `DIGEST  NAME` of its files, see `planning.cited_files`

    def __post_init__(self) -> None:
        check_fields(self)


@strict_fields
@dataclass(frozen=True, slots=True)
class Rule:
    """``[[rule]]``: the scheme of the tensors that a pattern matches (``keep`` leaves them alone)."""

    match: str
    scheme: str

    def __post_init__(self) -> None:
        check_fields(self)


@strict_fields
@dataclass(frozen=True, slots=True)
class Recipe:
    """Choices that decide the result for a model. ``bits`` is the one dial; ``scheme`` is the expert's."""

    method: str = ""  # "": what measured best (`planning.method_choice`)
    effort: str = "medium"  # low | medium | high: what is left at its default for time or quality (`planning.effort`)
    bits: int | None = None
    scheme: str | None = None
    format: str = ""  # "": by name, type, engine or scheme (`formats.format_choice`)
    scales: str = "search"  # absmax | search | reference (ggml's own quantizer)
    guide: int | None = (
        None  # strips of rows with a Hessian guided by gradients; 0: a plain one; None: by effort
    )
    tune: int | None = None  # epochs in which scales, norms and codes are learned; None: by effort
    ignore: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    inputs: str = "absmax"  # range of static inputs: absmax | percentile | mse
    kv_cache: str = "none"  # measured scales of an fp8 cache: none | fp8 (per tensor) | fp8_head
    engine: str | None = None  # that has to load the result
    tensor_parallel: int = 1  # devices that it is split over
    head: str = "keep"  # scheme of the output projection, or keep
    embedding: str = ""  # its scheme, or keep; "": as the tool of the format has it
    mtp: str = "keep"  # heads that predict further tokens: keep | quantize (plainly) | drop
    max_shard_bytes: int | None = None  # None: 5 GB for safetensors, one file for GGUF
    type: str | None = None  # GGUF: the mixture, e.g. Q4_K_M
    pre: str | None = None  # GGUF: llama.cpp's name of a pre-tokenizer that is not recognised
    prune_experts: str | None = None  # the share of every layer's experts that is removed: "25%"
    sparsity: str | None = None  # zeros of every row: a share, or how many of neighbours stay
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    calibration: CalibrationOptions = field(default_factory=CalibrationOptions)
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)

    def __post_init__(self) -> None:
        write_small(self, WORDS)
        check_fields(self)
        if self.prune_experts is not None:
            share_of(self.prune_experts, "prune_experts")
        self.zeros  # noqa: B018 - raises
        if self.bits is not None and self.scheme is not None:
            raise InputError("recipe: 'bits' and 'scheme' are both given", "--bits or --scheme")
        if self.type is not None and (self.bits is not None or self.scheme is not None):
            beside = "recipe: 'type' is given beside 'bits' or 'scheme'"
            raise InputError(beside, "a type decides every tensor")

    @property
    def zeros(self) -> Sparsity | None:
        """Return which part of the weights is made zero, None for none; errors as `parse_sparsity`."""
        return None if self.sparsity is None else parse_sparsity(self.sparsity)

    @property
    def rounding(self) -> Rounding:
        """Return the part of the recipe that methods see."""
        return Rounding(self.scales, self.gptq, self.awq)

    def to_toml(self) -> str:
        """Write the recipe as TOML, every key spelled out, in the order of the classes."""
        data = asdict(self)
        rules = data.pop("rules")
        tables = {key: data.pop(key) for key in list(data) if isinstance(data[key], dict)}
        written = lines(data)
        for rule in rules:
            written += ["", "[[rule]]", *lines(rule)]
        for name, table in tables.items():
            written += ["", f"[{name}]", *lines(table)]
        return "\n".join(written) + "\n"


def from_toml(text: str, origin: str = "recipe") -> Recipe:
    """Parse a recipe.

    Raises:
        InputError: not TOML, an unknown key (the nearest one is named), or a value of the wrong type.
    """
    data = read_toml(text, origin)
    if "rules" in data:
        raise InputError(f"{origin}: unknown key 'rules'", "did you mean '[[rule]]'?")
    if "rule" in data:
        data["rules"] = data.pop("rule")
    with named_after(origin):
        recipe: Recipe = built(Recipe, data, origin)
    return recipe


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file; errors as `Opener.text` and `from_toml`."""
    return from_toml(FILES.text(path, RECIPE, None), str(path))
