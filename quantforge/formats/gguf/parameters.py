"""Hyper-parameters: from ``config.json`` to the keys that llama.cpp builds its graph from.

llama.cpp knows most of a family by heart (activation, order of norms, attention scale, which layers slide) and reads
the rest from keys. What it knows by heart has to be what the configuration says, and anything else would load and
compute something different: it is refused here, because no key could carry it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantforge.architectures import architecture_of
from quantforge.architectures.dimensions import Dimensions, dimensions_of
from quantforge.architectures.llama_cpp import Family
from quantforge.errors import InputError
from quantforge.events import Event
from quantforge.formats.gguf.container import GgufTensor, Value, f32, u32
from quantforge.formats.gguf.rope import Rope, rope_keys, rope_of, rope_tensors, rounding
from quantforge.formats.gguf.stated_keys import check_graph, refused, stated_keys

# Keys that change what is computed, whose default is the family's.
_COMPUTED = (
    "rope_theta",
    "rms_norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
    "partial_rotary_factor",
    "rope_parameters",
    "original_max_position_embeddings",
)
_GEMMA2_27B = 46  # layers of the one release whose attention scale is another


@dataclass(frozen=True, slots=True)
class Parameters:
    """Keys of a model, the tensors that are computed from its configuration, and what there is to say."""

    keys: dict[str, Value]
    computed: tuple[GgufTensor, ...]
    dimensions: Dimensions
    experts: int = 0
    interleaved: bool = False
    plus_one: bool = False
    plain_norms: tuple[str, ...] = ()
    decays: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()


def parameters(config: Mapping[str, Any], family: Family) -> Parameters:
    """Translate the configuration of a text model.

    Raises:
        RefusedError: the configuration asks for something that llama.cpp's graph of the family does not do.
        InputError: a size is missing or impossible.
    """
    defaults = _defaults(config)
    declared = architecture_of(config)
    sizes = declared.dimensions(config) if declared else dimensions_of(config, defaults)
    config = _stated(config, defaults)
    mixed = family.experts if isinstance(family.experts, bool) else config.get(family.experts)
    experts = _experts(sizes) if mixed else 0
    _check(config, family, sizes)
    found: dict[str, Value] = {
        "block_count": u32(sizes.layers),
        "context_length": u32(sizes.positions),
        "embedding_length": u32(sizes.hidden),
        "feed_forward_length": u32(sizes.ffn),
        "attention.head_count": u32(sizes.heads),
    }
    if family.arch == "gpt2":
        found["attention.layer_norm_epsilon"] = f32(_epsilon(config, "layer_norm_epsilon", 1e-5))
        return Parameters(_keyed(family, found), (), sizes)
    found["attention.head_count_kv"] = u32(sizes.kv_heads)
    key, stated = family.epsilon
    found[key] = f32(_epsilon(config, stated, 1e-6 if stated == "rms_norm_eps" else 1e-5))
    found["attention.key_length"] = u32(sizes.head)
    found["attention.value_length"] = u32(sizes.head)
    rope = rope_of(config, family, sizes)
    _check_part(rope, family, sizes, defaults)
    found |= rope_keys(rope, family)
    found |= _of_family(config, family, sizes, rope)
    if experts:
        found["expert_count"] = u32(experts)
        found["expert_used_count"] = u32(_used({**defaults, **config}, family, experts))
        if family.arch == "qwen3moe":
            found["expert_feed_forward_length"] = u32(
                _integer(config, "moe_intermediate_size", 768)
            )
    found |= stated_keys({**defaults, **config}, family, sizes)
    return Parameters(
        _keyed(family, found),
        rope_tensors(rope),
        sizes,
        experts,
        interleaved=family.interleaved,
        plus_one=family.norm_plus_one,
        events=_left_out({**defaults, **config}, family, sizes, rope),
        plain_norms=family.plain_norms,
        decays=family.decays,
    )


def _stated(config: Mapping[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration with what the family computes with where a key is left out."""
    own = {key: defaults[key] for key in _COMPUTED if key in defaults}
    if config.get("rope_parameters") is None:  # null, too, asks for those of the family
        config = {key: value for key, value in config.items() if key != "rope_parameters"}
        if config.get("rope_scaling"):
            own.pop("rope_parameters", None)
    return {**own, **config}


def _keyed(family: Family, found: Mapping[str, Value]) -> dict[str, Value]:
    return {f"{family.arch}.{key}": value for key, value in found.items()}


def _defaults(config: Mapping[str, Any]) -> Mapping[str, object]:
    declared = architecture_of(config)
    return declared.defaults if declared else {}


def _of_family(
    config: Mapping[str, Any], family: Family, sizes: Dimensions, rope: Rope
) -> dict[str, Value]:
    if family.arch in {"llama", "smollm3"}:
        return {"vocab_size": u32(sizes.vocab)}
    if family.arch == "phi3":
        return {
            "rope.scaling.original_context_length": u32(rope.original or sizes.positions),
            "attention.sliding_window": u32(_integer(config, "sliding_window", 0)),
        }
    if family.arch == "gemma2":
        return {
            "attn_logit_softcapping": f32(_softcap(config, "attn_logit_softcapping", 50.0)),
            "final_logit_softcapping": f32(_softcap(config, "final_logit_softcapping", 30.0)),
            "attention.sliding_window": u32(_integer(config, "sliding_window", 4096)),
        }
    if family.windowed:
        return {"attention.sliding_window": u32(_integer(config, "sliding_window", 4096))}
    return {}


def _softcap(config: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = config.get(key, otherwise)
    if not isinstance(value, int | float) or value <= 0:
        raise refused(f"{key} = {value!r}", "a soft cap above 0")
    return float(value)


def _epsilon(config: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = config.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"config.json: {key} = {str(value)[:40]!r}", "a number from 0 to 1")
    return float(value)


def _integer(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key)
    if value is None:
        return otherwise
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise refused(f"{key} = {value!r}", "an integer")
    return value


def _experts(sizes: Dimensions) -> int:
    count = sizes.own.get("experts", 0)
    if not 1 < count <= 4096:
        raise refused(f"{count} experts", "2 to 4096")
    return count


def _used(config: Mapping[str, Any], family: Family, experts: int) -> int:
    count = _integer(config, family.used, 2)
    groups, used = config.get("n_group"), config.get("topk_group")
    most = experts
    if "expert_group_count" in family.numbers and groups and used:
        most = experts // groups * used
    if not 1 <= count <= most:
        raise refused(f"{family.used} = {count}", f"1 to {most}")
    return count


def _check(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> None:
    allowed = family.activations
    keys = ("hidden_activation", "hidden_act", "activation_function")
    for stated in (config[key] for key in keys if config.get(key)):
        if stated not in allowed:
            raise refused(f"activation {stated!r}", f"{family.arch} computes {allowed[0]}")
    if family.interleaved and sizes.head % 2:
        raise refused(f"head_dim = {sizes.head}", "an even number")
    if family.heads_fill and sizes.head * sizes.heads != sizes.hidden:
        raise refused(
            f"head_dim {sizes.head}", f"{sizes.heads} heads of {family.arch} fill {sizes.hidden}"
        )
    check_graph({**_defaults(config), **config}, family, sizes)
    if family.norm_plus_one and family.period:
        _check_gemma(config, family, sizes)
    if family.period:
        _check_windows(config, family, sizes)
    if family.no_rope_period:
        _check_no_rope(config, family.no_rope_period, sizes)
    if family.arch == "qwen3moe" and (
        config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    ):
        raise refused("dense layers among those with experts", "experts in every layer")
    if family.arch == "qwen3moe" and config.get("norm_topk_prob") is False:
        raise refused(
            "norm_topk_prob = false", "llama.cpp normalises the weights of qwen3moe's experts"
        )


def _check_part(
    rope: Rope, family: Family, sizes: Dimensions, defaults: Mapping[str, object]
) -> None:
    """Refuse heads of which a part rotates, in a family whose heads always do as a whole."""
    known = (
        "partial_rotary_factor" in defaults
        or "rope.dimension_count" in family.sizes
        or family.divided_head
    )
    if rope.width != sizes.head and not known:
        share = rope.width / sizes.head
        raise refused(f"partial_rotary_factor = {share:g}", f"{family.arch} rotates whole heads")


def _check_gemma(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> None:
    scale = config.get("query_pre_attn_scalar", 256)
    expected = (
        sizes.hidden / sizes.heads
        if sizes.layers == _GEMMA2_27B and family.arch == "gemma2"
        else sizes.head
    )
    if family.arch == "gemma3" and sizes.layers == 62:  # the 27B release
        expected = sizes.hidden / sizes.heads
    if scale != expected:
        raise refused(
            f"query_pre_attn_scalar = {scale}", f"llama.cpp divides by sqrt({expected:g})"
        )
    if family.arch == "gemma3" and (
        config.get("attn_logit_softcapping") or config.get("final_logit_softcapping")
    ):
        raise refused("soft-capping", f"{family.arch} has none")


def _check_windows(config: Mapping[str, Any], family: Family, sizes: Dimensions) -> None:
    """Raise `RefusedError` unless the last of every ``family.period`` layers alone has full attention."""
    period = family.period
    kinds = [
        "full_attention" if i % period == period - 1 else "sliding_attention"
        for i in range(sizes.layers)
    ]
    _check_list("layer_types", config.get("layer_types"), kinds)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if config.get(key, period) != period:
            raise refused(f"{key} = {config[key]}", f"{period}")


def _check_no_rope(config: Mapping[str, Any], period: int, sizes: Dimensions) -> None:
    """Raise `RefusedError` unless the last of every ``period`` layers alone has no rotary positions."""
    expected = [int((i + 1) % period != 0) for i in range(sizes.layers)]
    stated = config.get("no_rope_layers")
    if stated is None and config.get("no_rope_layer_interval", period) != period:
        raise refused(f"no_rope_layer_interval = {config['no_rope_layer_interval']}", f"{period}")
    _check_list("no_rope_layers", stated, expected)


def _check_list(key: str, stated: object, expected: Sequence[object]) -> None:
    if isinstance(stated, list) and stated[: len(expected)] != list(expected):
        raise refused(f"{key} = {stated[:8]}...", f"llama.cpp assumes {list(expected)[:8]}...")


def _left_out(
    config: Mapping[str, Any], family: Family, sizes: Dimensions, rope: Rope
) -> tuple[Event, ...]:
    """Return events for frequencies that llama.cpp rounds, and for a sliding window that it does not have.

    ``config`` is with the family's defaults.
    """
    said = rounding(rope)
    rounded = (Event("rope-rounded", "config.json", f"truncate = false: {said}"),) if said else ()
    window = config.get("sliding_window", family.window)
    if window is None or sizes.positions <= window or family.windowed:
        return rounded
    declared = architecture_of(config)
    rule = declared.windows if declared else None
    if rule is None or not any(rule.of_layers(config, sizes.layers)):
        return rounded
    text = f"llama.cpp's {family.arch} has no sliding window: equal up to {window} tokens"
    return (*rounded, Event("window-left-out", "config.json", text))
