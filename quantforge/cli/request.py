"""From options to a request: the recipe (a file or a built-in one, overridden by options) and how to run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from quantforge.cli import options
from quantforge.errors import InputError, UsageError, nearest
from quantforge.events import Policy
from quantforge.formats.targets import filled
from quantforge.recipe import Recipe, Rule, from_toml, read_recipe


def builtin_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    package = Path(__file__).parent.parent / "recipes"
    folder = package if package.is_dir() else Path(__file__).parent.parent.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_recipe(text: str | None) -> Recipe:
    """Read ``--recipe``: a file, or the name of a built-in recipe; None is the empty recipe."""
    if text is None:
        return Recipe()
    known = builtin_recipes()
    if Path(text).is_file():
        return read_recipe(Path(text))
    if text in known:
        return from_toml(known[text].read_text(encoding="utf-8"), text)
    raise InputError(f"no recipe '{text}': neither a file nor a built-in one", nearest(text, known))


def chosen(
    method: options.Method = None,
    bits: options.Bits = None,
    scheme: options.SchemeText = None,
    form: options.FormatKey = None,
    engine: options.Engine = None,
    tensor_parallel: options.TensorParallel = None,
    kind: options.MixtureType = None,
    pre: options.PreTokenizer = None,
    ignore: options.Ignore = None,
    rule: options.RuleText = None,
    recipe: options.RecipeFile = None,
    scales: options.Scales = None,
    inputs: options.Inputs = None,
    kv_cache: options.KvCache = None,
    head: options.Head = None,
    embedding: options.EmbeddingScheme = None,
    refine: options.Refine = None,
    calibration: options.Calibration = None,
    samples: options.Samples = None,
    length: options.Length = None,
    seed: options.Seed = None,
    chat_template: options.ChatTemplate = False,
    max_shard_bytes: options.Shard = None,
) -> Recipe:
    """Build the recipe from every option that is part of one: their only list (see `takes_recipe`)."""
    return build_recipe(
        recipe, method=method, bits=bits, scheme=scheme, format=form, engine=engine,
        tensor_parallel=tensor_parallel, type=kind, pre=pre, ignore=ignore, rules=rule, scales=scales,
        inputs=inputs, kv_cache=kv_cache, head=head, embedding=embedding, refine=refine,
        calibration=calibration, samples=samples, length=length, seed=seed,
        chat_template=chat_template, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip


def takes_recipe(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of `chosen` in place of its parameter ``wanted``, which gets the recipe."""
    asked = inspect.signature(chosen, eval_str=True).parameters
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        parameters += asked.values() if name == "wanted" else [parameter]

    @wraps(verb)
    def command(**given: Any) -> None:
        recipe = {name: given.pop(name) for name in asked}
        verb(**given, wanted=chosen(**recipe))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def build_recipe(base: str | None, **options: Any) -> Recipe:
    """Override a recipe by the options that were given (those that are not None)."""
    recipe = load_recipe(base)
    given = {key: value for key, value in options.items() if value is not None and value != []}
    if "engine" in given:
        given = filled(given["engine"], given)
    if {"bits", "scheme"} <= given.keys():
        raise UsageError(
            "--bits and --scheme are both given", "--bits is the dial, --scheme the expert's form"
        )
    calibration = {
        field: given.pop(option)
        for option, field in (
            ("calibration", "source"), ("samples", "samples"), ("length", "length"), ("seed", "seed"),
        )
        if option in given
    }  # fmt: skip
    if "source" in calibration:
        calibration["sha256"] = ()  # those of a recipe are of its own text
    if given.pop("chat_template", False):
        calibration["chat_template"] = True
    if "refine" in given:
        given["gptq"] = replace(recipe.gptq, refine=given.pop("refine"))
    if "rules" in given:
        given["rules"] = (*(_rule(text) for text in given["rules"]), *recipe.rules)
    if "ignore" in given:
        given["ignore"] = (*recipe.ignore, *given["ignore"])
    if "bits" in given:
        given["scheme"] = None
    if "scheme" in given and given["scheme"] is not None:
        given["bits"] = None
    return replace(recipe, calibration=replace(recipe.calibration, **calibration), **given)


def _rule(text: str) -> Rule:
    pattern, separator, scheme = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(
            f"--rule {text}: no scheme", "write --rule 'down_proj=int8:g128:sym' or PATTERN=keep"
        )
    return Rule(pattern, scheme)


def build_policy(strict: bool, allow: Sequence[str] | None) -> Policy:
    """Build the policy on events from ``--strict`` and ``--allow EVENT=N``."""
    limits: dict[str, int] = {}
    for text in allow or []:
        kind, separator, count = text.partition("=")
        if not separator or not count.isdecimal():
            raise UsageError(
                f"--allow {text}: no count", "write --allow EVENT=N, e.g. --allow damping-raised=2"
            )
        limits[kind] = int(count)
    return Policy(strict, limits)


def percent(text: str, option: str) -> float:
    """Parse ``2%`` or ``0.02`` to 0.02."""
    number = text.removesuffix("%")
    try:
        value = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise UsageError(f"{option} {text}: not a share", "write 2% or 0.02")
    return value


def plain(data: Mapping[str, object]) -> dict[str, object]:
    """Return a copy with lists for tuples, for JSON."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}
