"""A model without weights: stock transformers modules whose parameters take no memory.

Linear layers, embeddings and Conv1D allocate their weights with `torch.empty`. While a model is constructed, a
`TorchFunctionMode` sends exactly that function to the meta device. Everything else stays real: rotary frequencies
and embedding scales, which are computed and not loaded, and the few ones and zeros of the norms. A plain
``with torch.device("meta")`` would lose the computed buffers, and they would have to be rebuilt family by family.

The configuration class comes from transformers' own table by ``model_type``. Keys that make a loader run or fetch code
(``auto_map``, everything private) never reach it; nothing here touches the network.

Some of what a configuration says is only read when the model runs (the kinds of layers, when the cache is made). What
transformers raises there is an error in the configuration as well; what our own kernels and hooks raise below it is
not, and stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.overrides import TorchFunctionMode

from quantforge.architectures import text_config
from quantforge.errors import InputError
from quantforge.model.lean_imports import lean

with lean():
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

_STRIPPED = frozenset(
    {
        "auto_map",
        "trust_remote_code",
        "quantization_config",
        "attn_implementation",
        "dtype",
        "torch_dtype",
    }
)
_FILLING = frozenset({"torch.nn.init", "transformers.initialization"})

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


class _EmptyOnMeta(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        if getattr(func, "__module__", "") in _FILLING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor  # without memory there is nothing to fill, and torch would load its compiler
        return func(*args, **kwargs)


def build(config: Mapping[str, Any]) -> PreTrainedModel:
    """Build the text model of a ``config.json`` in float32: parameters on the meta device, buffers real.

    Running it raises InputError where transformers cannot run this configuration.

    Raises:
        InputError: transformers does not know the ``model_type`` as a decoder, or refuses the configuration.
    """
    tower = _clean(text_config(config))
    if "tie_word_embeddings" in config:
        tower.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    model_type = tower.pop("model_type", None)
    if model_type == "mistral" and "layer_types" in tower:
        model_type = (
            "ministral"  # as AutoConfig reads it: layers without a window are obeyed there alone
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type {model_type!r} is unknown to transformers",
            "remote code is never executed",
        )
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(tower)
        with lean():
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(parsed)]  # imports the family's module
        with _EmptyOnMeta():
            model: PreTrainedModel = kind(parsed)
        if getattr(parsed, "attn_logit_softcapping", None):
            model.set_attn_implementation(
                "eager"
            )  # else transformers before 5.21 leaves the cap out
        # One expert after another: torch's grouped products cannot be cut, and their bits depend on threads.
        model.set_experts_implementation("eager")
    except _REFUSALS as error:
        raise InputError(
            f"config.json: transformers refuses the {model_type} configuration: {error}",
            "compare it with the model's publication",
        ) from error
    for module in {model, model.base_model}:
        module.forward = _refusing(module.forward, model_type)
    return model.eval().requires_grad_(False)


def _refusing(forward: Callable[..., Any], model_type: str) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except _REFUSALS as error:
            if not _from_transformers(error.__traceback__):
                raise
            raise InputError(
                f"config.json: transformers cannot run this {model_type} configuration: {error}",
                "compare it with the model's publication",
            ) from error

    return run


def _from_transformers(trace: TracebackType | None) -> bool:
    """Return whether the innermost code is transformers', not torch's or ours."""
    name = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return bool(name.partition(".")[0] == "transformers")


def _clean(value: Any) -> Any:
    """Drop private keys and those that load code or quantized layers, at every depth."""
    if isinstance(value, Mapping):
        return {
            key: _clean(item)
            for key, item in value.items()
            if not key.startswith("_") and key not in _STRIPPED
        }
    return [_clean(item) for item in value] if isinstance(value, list) else value
