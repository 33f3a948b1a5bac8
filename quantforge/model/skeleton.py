"""A model without weights: stock transformers modules whose parameters take no memory.

Linear layers, embeddings and Conv1D allocate their weights with `torch.empty`. While a model is constructed, a
`FunctionMode` sends exactly that function to the meta device, and zeros and ones of the shape of stacked experts, which
some families begin with. Everything else stays real: rotary frequencies and embedding scales, which are computed and
not loaded, and the few ones and zeros of the norms. A plain
``with torch.device("meta")`` would lose the computed buffers, and they would have to be rebuilt family by family.

Which class that is, `quantforge.model.model_class` says.

Some of what a configuration says is only read when the model runs (the kinds of layers, when the cache is made). What
transformers raises there is an error in the configuration as well; what our own kernels and hooks raise below it is
not, and stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from quantforge.architectures import text_config
from quantforge.architectures.routers import experts_of, is_stack
from quantforge.errors import InputError, NotRunnableError, RefusedError
from quantforge.model.model_class import class_of
from quantforge.numerics.function_mode import Function, FunctionMode

_FILLING = frozenset({"torch.nn.init", "transformers.initialization"})

MOST = 1 << 16
_COUNTED = re.compile(r"layer|expert|block|depth")
_WORDS = re.compile(r"vocab")  # of an embedding for every layer

# What constructors of transformers raise on values that they do not expect.
_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


class _EmptyOnMeta(FunctionMode):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._experts = experts_of(config) | experts_of(text_config(config))

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kwargs = dict(kwargs)
        constant = function is torch.zeros or function is torch.ones
        if function is torch.empty or (constant and self._stacked(args, kwargs)):
            kwargs["device"] = "meta"
        if getattr(function, "__module__", "") in _FILLING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor  # without memory there is nothing to fill, and torch would load its compiler
        return function(*args, **kwargs)

    def _stacked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        size = kwargs.get("size", args[0] if len(args) == 1 else args)
        known = isinstance(size, Sequence) and all(type(one) is int for one in size)
        return known and is_stack(tuple(size), self._experts)


def build(config: Mapping[str, Any], *, whole: bool = False) -> PreTrainedModel:
    """Build the model of a ``config.json`` in float32: parameters on the meta device, buffers real.

    It is the text model of a declared family, unless ``whole``; else whatever the configuration names, with all its
    towers.

    Running it raises InputError where transformers cannot run this configuration, and RefusedError where the model
    needs more than tokens.

    Raises:
        InputError: transformers does not know the ``model_type`` as a decoder, or refuses the configuration.
    """
    model_type = config.get("model_type")
    check_counts(config)
    try:
        parsed, kind = class_of(config, whole=whole)
        with _EmptyOnMeta(config):
            model: PreTrainedModel = kind(parsed)
        if getattr(parsed, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa has no cap
        # One expert after another: torch's grouped products cannot be cut, and their bits depend on threads.
        model.set_experts_implementation("eager")
    except _REFUSALS as error:
        raise InputError(
            f"config.json: transformers refuses the {model_type} configuration: {error}",
            "compare it with the model's publication",
        ) from error
    for module in {model, model.base_model}:
        module.forward = _refusing(module.forward, str(model_type))
    return model.eval().requires_grad_(False)


def check_counts(config: Mapping[str, Any]) -> None:
    """Refuse a number of layers or experts that no model has: a module would be made for each of them.

    Raises:
        InputError: the key and its value.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif type(value) is int and value > MOST and _counts(key):
            raise InputError(
                f"config.json: {key} = {value}", "compare it with the model's publication"
            )


def _counts(key: str) -> bool:
    return _COUNTED.search(key) is not None and not _WORDS.search(key)


@contextmanager
def as_refusals(what: str) -> Iterator[None]:
    """Turn errors of a trial run on random tokens and weights into refusals.

    Args:
        what: is run, by transformers' code.

    Raises:
        RefusedError: in the place of what transformers or torch raise.
    """
    try:
        yield
    except _REFUSALS as error:
        said = " ".join(str(error).split())[:160]
        raise RefusedError(f"{what} does not run alone: {said}", "--method rtn") from error


def _refusing(forward: Callable[..., Any], model_type: str) -> Callable[..., Any]:
    parameters = signature(forward)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise RefusedError(
                f"a {model_type} model does not run on tokens alone: {error}",
                "evaluate it with the engine that serves it",
            ) from error
        try:
            return forward(*args, **kwargs)
        except _REFUSALS as error:
            if not _from_transformers(error.__traceback__):
                raise
            raise NotRunnableError(
                f"config.json: transformers cannot run this {model_type} configuration: {error}",
                "compare it with the model's publication",
            ) from error

    return run


def _from_transformers(trace: TracebackType | None) -> bool:
    """Return whether an error was raised by transformers' code, not by torch's or ours."""
    name = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return bool(name.partition(".")[0] == "transformers")
