"""Check whether transformers finds every parameter of a model in its files, by running its loader on the meta device.

`check_loading` takes the steps of ``from_pretrained``: it builds the class that the configuration names, lets the
quantizer of ``quantization_config`` replace modules, renames tensors by transformers' rules, and merges and splits them
with its converters. Only headers are read, except for a few small tensors whose values a loader needs. Code in a model
directory never runs, and the hub is never contacted.

If loading a quantized model cannot be tried (because the library of its quantizer is missing, for example), the same
model with decoded weights is tried instead. If that fails, the packed one fails too; if it succeeds, nothing is known.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantforge.architectures import text_config
from quantforge.errors import InputError
from quantforge.files.safetensors import torch_dtype
from quantforge.model.model_class import stock_model_class
from quantforge.model.skeleton import check_counts
from quantforge.plans import Action, EngineVerdict, StoredTensor, TensorPlan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_NAMES_SHOWN = 3  # names in a message
_META = torch.device("meta")
# Small tensors whose values a loader needs to interpret the others: bitsandbytes' description of a matrix.
_NEEDED_VALUES = re.compile(r"\.quant_state\.bitsandbytes__")
# Errors of a converter that needs values, which tensors on the meta device do not have.
_META_ERROR = re.compile(r"\bmeta\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class LoadingResult:
    """The result of loading tensors into a transformers model.

    Attributes:
        missing: parameters that no tensor fills; transformers would initialize them at random.
        mismatched: parameters whose tensor has another shape, as text with both shapes.
        failed: parameters whose tensors cannot be merged, split or unpacked.
        error: the exception that transformers raises although every parameter is filled; "" for none.
        not_tried: why loading could not be tried (then nothing is known); "" if it was.
    """

    missing: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    error: str = ""
    not_tried: str = ""

    @property
    def reason(self) -> str:
        """Return why the model cannot be loaded, for a message; "" if there is no known reason."""
        differences = (
            ("{} parameter(s) are in no file and would be random", self.missing),
            ("{} parameter(s) have another shape in the files", self.mismatched),
            ("the tensors of {} parameter(s) cannot be converted", self.failed),
        )
        reasons = [
            f"{text.format(len(names))}: {_shorten_names(names)}"
            for text, names in differences
            if names
        ]
        return "; ".join([*reasons, *filter(None, [self.error])])


def check_loading(
    config: Mapping[str, Any],
    stored: Iterable[StoredTensor],
    read_tensor: Callable[[str], Tensor],
    decoded: Callable[[], Iterable[StoredTensor]],
) -> LoadingResult:
    """Compare the tensors in a model's files with the parameters that transformers expects.

    Args:
        config: content of ``config.json``.
        stored: headers of all tensors.
        read_tensor: returns the values of a stored tensor by name.
        decoded: returns the headers of the same model with decoded weights, tried if the packed ones cannot be.
    """
    stored = tuple(stored)
    quantization_config = _copy_quantization_config(config)
    result = _try_loading(config, stored, read_tensor, quantization_config)
    if not result.not_tried or not quantization_config:
        return result
    try:
        plain_result = check_plain_loading(config, decoded())
    except InputError:  # whoever reads the weights gets this error, too
        return result
    # Only these count: a quantizer may split stacked experts, whose names have no such ending.
    missing_weights = tuple(name for name in plain_result.missing if name.endswith(".weight"))
    return (
        LoadingResult(missing_weights, plain_result.mismatched)
        if missing_weights or plain_result.mismatched
        else result
    )


def check_plain_loading(config: Mapping[str, Any], stored: Iterable[StoredTensor]) -> LoadingResult:
    """Check loading like `check_loading`, but ignore any quantization that the configuration declares."""
    return _try_loading(config, tuple(stored), _refuse_read, None)


def resolve_verdicts(
    verdicts: tuple[EngineVerdict, ...], config: Mapping[str, Any], tensors: Iterable[TensorPlan]
) -> tuple[EngineVerdict, ...]:
    """Fill in the verdicts of a plan whose ``loads`` is None, by the names and shapes of the planned tensors.

    Args:
        verdicts: the engine verdicts of the plan.
        config: configuration of the result, without its ``quantization_config``.
        tensors: the tensors of the plan.
    """
    if all(verdict.loads is not None for verdict in verdicts):
        return verdicts
    stored_plans = (item for item in tensors if item.action in {Action.KEEP, Action.QUANTIZE})
    result = check_plain_loading(
        config, [StoredTensor(item.name, item.dtype, item.shape) for item in stored_plans]
    )
    return tuple(
        _resolve_verdict(unresolved, result) if unresolved.loads is None else unresolved
        for unresolved in verdicts
    )


def _resolve_verdict(verdict: EngineVerdict, result: LoadingResult) -> EngineVerdict:
    if result.not_tried:
        return replace(verdict, reason=result.not_tried)
    return EngineVerdict(verdict.engine, not result.reason, result.reason or verdict.note)


def _refuse_read(name: str) -> Tensor:
    raise InputError(f"{name}: its values describe a quantized matrix", "", tensor=name)


def _try_loading(
    config: Mapping[str, Any],
    stored: tuple[StoredTensor, ...],
    read_tensor: Callable[[str], Tensor],
    quantized: Any,
) -> LoadingResult:
    try:
        check_counts(config)
        parsed, kind = stock_model_class(config)
        with _quiet():
            return _load_on_meta(
                parsed, kind, quantized, {item.name: _tensor(item, read_tensor) for item in stored}
            )
    except InputError as error:
        return LoadingResult(not_tried=error.message)
    except Exception as error:  # whatever constructors, quantizers and their libraries raise
        message = " ".join(str(error).split())
        return LoadingResult(not_tried=f"transformers: {message or type(error).__name__}"[:300])


def _load_on_meta(
    parsed: PreTrainedConfig, kind: type[PreTrainedModel], quantized: Any, tensors: dict[str, Any]
) -> LoadingResult:
    """Run the steps of ``from_pretrained`` that assign ``tensors`` (on the meta device) to parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import ContextManagers

    device_map: Any = {"": _META}
    quantizer: Any = None
    if quantized:
        from transformers.quantizers.auto import get_hf_quantizer

        parsed.quantization_config = quantized
        quantizer, parsed, device_map = get_hf_quantizer(parsed, None, device_map, True, {})
    dtype = torch.bfloat16
    with ContextManagers(kind.get_init_context(dtype, quantizer is not None, False, False)):
        model: Any = kind(parsed)
        if quantizer is not None:
            quantizer.preprocess_model(
                model=model,
                dtype=dtype,
                device_map=device_map,
                checkpoint_files=[],
                use_kernels=False,
            )
    settings = LoadStateDictConfig(
        device_map=device_map,
        dtype=dtype,
        hf_quantizer=quantizer,
        weight_mapping=get_model_conversion_mapping(model, None, quantizer),
    )
    info, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
    model.mark_tied_weights_as_initialized(info)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    if not info.missing_and_mismatched() and not info.conversion_errors:
        model._move_missing_keys_from_meta_to_device(set(), device_map, None, quantizer)
        try:
            model._initialize_missing_keys(quantizer is not None)
        except AttributeError as error:  # code of a family that reads the weights of packed layers
            return LoadingResult(error=f"transformers fails at it: {error}")
    conversion_errors = dict(info.conversion_errors)
    for name, message in conversion_errors.items():
        if _META_ERROR.search(message):
            return LoadingResult(not_tried=f"transformers converts {name} by its values")
    return LoadingResult(
        tuple(sorted(set(info.missing_keys) - conversion_errors.keys())),
        tuple(
            f"{name} {list(stored_shape)} instead of {list(model_shape)}"
            for name, stored_shape, model_shape in sorted(info.mismatched_keys)
        ),
        tuple(sorted(conversion_errors)),
    )


def _copy_quantization_config(config: Mapping[str, Any]) -> Any:
    """Return a copy of ``quantization_config``, also from within ``text_config``; None if there is none."""
    quantization = config.get("quantization_config") or text_config(config).get(
        "quantization_config"
    )
    return dict(quantization) if isinstance(quantization, Mapping) else None


class _RealTensor:
    """A real tensor among those on the meta device: loaders may slice or move it, and always get all its values."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def __getitem__(self, _: object) -> _RealTensor:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def to(self, **_: object) -> Tensor:
        return self._value


def _tensor(stored: StoredTensor, read_tensor: Callable[[str], Tensor]) -> Any:
    if _NEEDED_VALUES.search(stored.name):
        return _RealTensor(read_tensor(stored.name))
    return torch.empty(stored.shape, dtype=torch_dtype(stored.dtype), device=_META)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence progress bars, prints and warnings, and keep transformers off the network."""
    from huggingface_hub import constants
    from transformers.utils import logging

    offline_before, level = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    with ExitStack() as stack:
        stack.callback(setattr, constants, "HF_HUB_OFFLINE", offline_before)
        stack.callback(logging.set_verbosity, level)
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(redirect_stdout(io.StringIO()))
        constants.HF_HUB_OFFLINE = True
        logging.set_verbosity(logging.CRITICAL)
        yield


def _shorten_names(names: tuple[str, ...]) -> str:
    more_suffix = (
        f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    )
    return f"{', '.join(names[:MAX_NAMES_SHOWN])}{more_suffix}"
