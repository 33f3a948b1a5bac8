"""Build a transformers model without weights: parameters on the meta device, buffers real.

Linear layers, embeddings and Conv1D allocate their weights with `torch.empty`. While a model is constructed, a
`FunctionMode` redirects that function to the meta device, and likewise zeros and ones with the shape of stacked
experts.
Everything else stays real: rotary frequencies and embedding scales, which are computed instead of loaded, and the few
ones and zeros of norms. A plain ``with torch.device("meta")`` would lose the computed buffers.

`quantforge.model.model_class` chooses the class.

Some configuration values are only read when the model runs (layer types, for instance, when the cache is created).
Exceptions of transformers at that point are configuration errors too; exceptions of our own kernels and hooks are not,
and pass unchanged.
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
from quantforge.architectures.routers import expert_counts, is_expert_stack
from quantforge.errors import InputError, NotRunnableError, RefusedError
from quantforge.model.model_class import model_class
from quantforge.numerics.function_mode import Function, FunctionMode

_INITIALIZER_MODULES = frozenset({"torch.nn.init", "transformers.initialization"})

MAX_COUNT = 1 << 16
_COUNT_KEYS = re.compile(r"layer|expert|block|depth")
_VOCABULARY_KEYS = re.compile(r"vocab")  # of an embedding for every layer

# What constructors of transformers raise on values that they do not expect.
_TRANSFORMERS_ERRORS = (
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
        self._expert_counts = expert_counts(config) | expert_counts(text_config(config))

    def call(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        kwargs = dict(kwargs)
        constant = function is torch.zeros or function is torch.ones
        if function is torch.empty or (constant and self._is_expert_stack(args, kwargs)):
            kwargs["device"] = "meta"
        if getattr(function, "__module__", "") in _INITIALIZER_MODULES:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor  # without memory there is nothing to fill, and torch would load its compiler
        return function(*args, **kwargs)

    def _is_expert_stack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        size = kwargs.get("size", args[0] if len(args) == 1 else args)
        is_known = isinstance(size, Sequence) and all(type(length) is int for length in size)
        return is_known and is_expert_stack(tuple(size), self._expert_counts)


def build_skeleton(config: Mapping[str, Any], *, whole: bool = False) -> PreTrainedModel:
    """Build the model of a ``config.json`` in float32: parameters on the meta device, buffers real.

    For a family with declarations this is the text decoder, unless ``whole``; otherwise the class that the
    configuration names, with all its towers. Running the model raises InputError if transformers cannot run this
    configuration, and RefusedError if the model needs more than tokens.

    Raises:
        InputError: transformers does not know the ``model_type`` as a decoder, or refuses the configuration.
    """
    model_type = config.get("model_type")
    check_counts(config)
    try:
        parsed, kind = model_class(config, whole=whole)
        with _EmptyOnMeta(config):
            model: PreTrainedModel = kind(parsed)
        if getattr(parsed, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa has no cap
        # One expert after another: torch's grouped products cannot be cut, and their bits depend on threads.
        model.set_experts_implementation("eager")
    except _TRANSFORMERS_ERRORS as error:
        raise InputError(
            f"transformers refuses the {model_type} configuration: {error}",
            "compare it with the model's publication",
            subject="config.json",
        ) from error
    for module in {model, model.base_model}:
        module.forward = _with_input_errors(module.forward, str(model_type))
    return model.eval().requires_grad_(False)


def check_counts(config: Mapping[str, Any]) -> None:
    """Refuse implausible numbers of layers or experts, before a module is created for each of them.

    Raises:
        InputError: naming the key and its value.
    """
    for key, value in config.items():
        if isinstance(value, Mapping):
            check_counts(value)
        elif type(value) is int and value > MAX_COUNT and _is_count_key(key):
            raise InputError(
                f"{key} = {value}", "compare it with the model's publication", subject="config.json"
            )


def _is_count_key(key: str) -> bool:
    return _COUNT_KEYS.search(key) is not None and not _VOCABULARY_KEYS.search(key)


@contextmanager
def errors_as_refusals(subject: str) -> Iterator[None]:
    """Turn exceptions of a trial run on random tokens and weights into RefusedError.

    Args:
        subject: what runs, for the message.

    Raises:
        RefusedError: in place of exceptions of transformers or torch.
    """
    try:
        yield
    except _TRANSFORMERS_ERRORS as error:
        message = " ".join(str(error).split())[:160]
        raise RefusedError(f"{subject} does not run alone: {message}", "--method rtn") from error


def _with_input_errors(forward: Callable[..., Any], model_type: str) -> Callable[..., Any]:
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
        except _TRANSFORMERS_ERRORS as error:
            if not _from_transformers(error.__traceback__):
                raise
            raise NotRunnableError(
                f"transformers cannot run this {model_type} configuration: {error}",
                "compare it with the model's publication",
                subject="config.json",
            ) from error

    return run


def _from_transformers(trace: TracebackType | None) -> bool:
    """Return whether an exception was raised by transformers' code rather than by torch or QuantForge."""
    name = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return bool(name.partition(".")[0] == "transformers")
