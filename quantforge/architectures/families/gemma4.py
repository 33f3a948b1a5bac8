"""Gemma 4: heads of full layers are wider, the last layers read keys and values of earlier ones.

Norms multiply by w, and values are normalised too, without a weight, so that nothing absorbs a scale of what the output
projection reads. In the full layers of some models keys are the values as well (``attention_k_eq_v``). A small vector
of each token for every layer, by which the layer's own gate is multiplied, makes a third half of a block; it comes from
an embedding and from the first states. The mixture of the models that have one stands beside the MLP, and its router
reads what neither of their norms has touched.

Files of transformers state what full layers have of their own by number of layer (``per_layer_config``), published ones
by keys of their own. In front of the declarations: parts, kinds and sizes of layers, what llama.cpp's graph takes for
granted, the configuration that a GGUF file describes, and the tower that reads pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from quantforge.architectures import (
    Architecture,
    FoldKind,
    Parameter,
    ScaleFold,
    SharedInput,
    text_config,
)
from quantforge.architectures.declare import (
    ALONE,
    WITHIN_TOWERS,
    Mixer,
    gated_mlp,
    layer,
    linear,
    norms,
    only,
)
from quantforge.architectures.dimensions import layer_types
from quantforge.architectures.layer_kind import keys_and_values
from quantforge.architectures.layer_windows import WindowRule
from quantforge.architectures.llama_cpp import GgufFamily, Keys
from quantforge.architectures.mixtures import experts_in_one
from quantforge.architectures.projector import (
    Projector,
    TowerConfig,
    TowerSizes,
    TowerTensor,
    stack,
    weight,
)
from quantforge.errors import InputError

SHARING = "num_kv_shared_layers"
OVERRIDES = "per_layer_config"
SLIDING, FULL, SHARED = "sliding_attention", "full_attention", "shared"
PERIOD = 6  # of layers, whose last sees everything, where they are not listed
TURNS: Mapping[str, Mapping[str, Any]] = {  # rotary positions, where none are stated
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
MIXTURE, K_EQ_V = "enable_moe_block", "attention_k_eq_v"
INPUT_WIDTH = "hidden_size_per_layer_input"  # 0 where there are none
_GATE, _OUT = "per_layer_input_gate", "per_layer_projection"
LAYER_INPUT = Mixer(
    (
        *linear(_GATE, "each_layer", "hidden"),
        *linear(_OUT, "hidden", "each_layer"),
        *norms("post_per_layer_input_norm"),
    ),
    (SharedInput((_GATE,), _GATE), SharedInput((_OUT,), _OUT)),
)
INPUT_OUTER = (
    Parameter("model.embed_tokens_per_layer.weight", ("each_vocab", "layers*each_layer")),
    *linear("model.per_layer_model_projection", "layers*each_layer", "hidden"),
    *norms("model.per_layer_projection_norm", dimension="each_layer"),
)
NORMS = (
    Parameter("layer_scalar", ("1",)),
    *norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
ROUTER = (
    Parameter("router.scale", ("hidden",)),
    Parameter("router.per_expert_scale", ("experts",)),
    Parameter("router.proj.weight", ("experts", "hidden")),
    *norms(
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
        "pre_feedforward_layernorm_2",
    ),
)


def attention(head: str, kv_heads: str, values_when: str = "", *, shared: bool = False) -> Mixer:
    """Declare attention with heads of its own size; ``shared``: it makes no keys and no values.

    Args:
        head: the dimension of a head.
        kv_heads: that counts heads of keys.
        values_when: the key that says whether there is a projection to values.
        shared: whether it reads those of an earlier layer.
    """
    q, k, v, out = (f"self_attn.{name}_proj" for name in ("q", "k", "v", "o"))
    bias, rows = "attention_bias", f"{kv_heads}*{head}"
    own = (
        *linear(k, rows, "hidden", bias),
        *only(values_when, linear(v, rows, "hidden", bias)),
        *norms("self_attn.k_norm", dimension=head),
    )
    return Mixer(
        (
            *linear(q, f"heads*{head}", "hidden", bias),
            *norms("self_attn.q_norm", dimension=head),
            *(() if shared else own),
            *linear(out, "hidden", f"heads*{head}", bias),
        ),
        (
            SharedInput(
                (q,) if shared else (q, k, v),
                "self_attn",
                ScaleFold(FoldKind.NORM, "input_layernorm"),
            ),
            SharedInput((out,), out),
        ),
        states=() if shared else keys_and_values(kv_heads, head),
    )


BEFORE_MLP = ScaleFold(FoldKind.NORM, "pre_feedforward_layernorm")
REST = (
    only(MIXTURE, ROUTER),
    only(MIXTURE, experts_in_one("inner", module="experts")),
    only(INPUT_WIDTH, LAYER_INPUT),
)
TOKENS = {SLIDING: ("head", "kv_heads"), FULL: ("full_head", "full_kv_heads", f"!{K_EQ_V}")}


def kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer.

    Raises:
        InputError: layers share keys where tokens have no vector for every layer, which transformers does not run; or
            as `first_shared` and `turns`.
    """
    words = words_of(config)
    first = first_shared(config, words)
    turns(config)
    if first < len(words) and not config.get(INPUT_WIDTH):
        raise InputError(
            f"config.json: {SHARING} = {config[SHARING]} with {INPUT_WIDTH} = {config.get(INPUT_WIDTH)}",
            f"a positive {INPUT_WIDTH}, or {SHARING} = 0; transformers does not run such a model",
        )
    return [f"{word}/{SHARED}" if index >= first else word for index, word in enumerate(words)]


def words_of(config: Mapping[str, Any]) -> list[str]:
    """Return whether each layer slides or is full; transformers makes the last one full whatever is listed."""
    words = layer_types(config)
    if words is None:
        layers = range(_size(config, "num_hidden_layers", 0))
        words = [SLIDING if (index + 1) % PERIOD else FULL for index in layers]
    return [*words[:-1], FULL]


def turns(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the rotary positions of every type of layers that there is.

    Raises:
        InputError: they are not stated for each, or without a base, which transformers has no default for then.
    """
    stated = config.get("rope_parameters")
    stated = TURNS if stated is None else stated
    found = {
        word: stated.get(word) if isinstance(stated, Mapping) else None for word in words_of(config)
    }
    for word, own in found.items():
        if not isinstance(own, Mapping) or own.get("rope_theta") is None:
            raise InputError(
                f"config.json: rope_parameters of {word} = {str(own)[:60]}",
                "rope_parameters = null, or a rope_theta for each type of layers",
            )
    return {word: own for word, own in found.items() if own is not None}


def uncovered(config: Mapping[str, Any]) -> str:
    """Return what a configuration asks for beyond these declarations; "" where they cover it."""
    attends = config.get("use_bidirectional_attention")
    if attends not in (None, False, "vision"):  # the last is of pictures
        return f"use_bidirectional_attention = {str(attends)[:40]!r}"
    own = own_values(config, _full(config))
    if own is None or own.keys() - {"head_dim", "num_key_value_heads"}:
        return (
            f"{OVERRIDES} = {str(config[OVERRIDES])[:60]}, which is not heads of full layers alone"
        )
    return ""


def full_head(config: Mapping[str, Any]) -> int:
    """Return the width of a head of full layers; as `own_values`."""
    if OVERRIDES in config:
        return _size(own_values(config, _full(config)) or {}, "head_dim", config["head_dim"])
    return _size(config, "global_head_dim", 512)


def full_kv_heads(config: Mapping[str, Any]) -> int:
    """Return how many heads of keys full layers have; as `own_values`."""
    name, usual = "num_key_value_heads", config["num_key_value_heads"]
    if OVERRIDES in config:
        found = _size(own_values(config, _full(config)) or {}, name, usual)
    else:
        stated = config.get("num_global_key_value_heads") if config.get(K_EQ_V) else None
        found = usual if stated is None else _size({name: stated}, name, usual)
    heads = _size(config, "num_attention_heads", 0)
    if heads % found:
        raise InputError(
            f"config.json: {heads} attention heads are not a multiple of"
            f" {found} key/value heads of full layers",
            "compare them with the model's publication",
        )
    return found


def shared_width(config: Mapping[str, Any]) -> int:
    """Return the width of the MLP of layers without keys and values of their own."""
    width = _size(config, "intermediate_size", 0)
    return 2 * width if config.get("use_double_wide_mlp") else width


def each_layer(config: Mapping[str, Any]) -> int:
    """Return the width of the vector that a token has for every layer; 1 where it has none."""
    return _size(config, INPUT_WIDTH, 0) if config.get(INPUT_WIDTH) else 1


def experts(config: Mapping[str, Any]) -> int:
    """Return the number of experts, 1 without a mixture."""
    if not config.get(MIXTURE):
        return 1
    count = _size(config, "num_experts", 0)
    if _size(config, "top_k_experts", 0) > count:
        raise InputError(
            f"config.json: top_k_experts = {config['top_k_experts']} of {count} experts",
            "compare it with the model's publication",
        )
    return count


def inner_width(config: Mapping[str, Any]) -> int:
    """Return the width of an expert, 1 without a mixture."""
    return _size(config, "moe_intermediate_size", 0) if config.get(MIXTURE) else 1


def _full(config: Mapping[str, Any]) -> list[int]:
    return [index for index, word in enumerate(words_of(config)) if word == FULL]


def _size(config: Mapping[str, Any], key: str, otherwise: int) -> int:
    value = config.get(key, otherwise)
    if type(value) is not int or not 0 < value <= 1 << 22:
        raise InputError(f"config.json: {key} = {str(value)[:40]!r}", "a positive integer")
    return value


def first_shared(config: Mapping[str, Any], words: Sequence[str]) -> int:
    """Return the number of the first layer that makes no keys of its own; one past the last where all do.

    Args:
        config: of the text model.
        words: the type of every layer.

    Raises:
        InputError: ``num_kv_shared_layers`` is no number of layers, or one of these has no earlier one of its type.
    """
    count = config.get(SHARING) or 0
    if type(count) is not int or not 0 <= count < max(len(words), 1):
        raise InputError(f"config.json: {SHARING} = {str(count)[:40]!r}", "a number of layers")
    first = len(words) - count
    if {*words[first:]} - {*words[:first]}:
        raise InputError(
            f"config.json: {SHARING} = {count}: no earlier layer makes keys for all of these",
            "compare it with the model's publication",
        )
    return first


def own_values(config: Mapping[str, Any], layers: Iterable[int]) -> Mapping[str, Any] | None:
    """Return what some layers, and no others, have in the place of the configuration's values.

    Args:
        config: of the text model, with the family's defaults.
        layers: that may have values of their own, the same in all of them.

    Returns:
        None: where layers that are not among them have any, or they differ from one another.

    Raises:
        InputError: the configuration states no mapping of layers to values.
    """
    found = {index: dict(values) for index, values in _overrides(config).items()}
    for values in found.values():
        for name in [name for name, value in values.items() if config.get(name) == value]:
            del values[name]
    first, *rest = ([found.pop(index, {}) for index in layers]) or [{}]
    alone = not any(found.values()) and all(values == first for values in rest)
    return first if alone else None


def _overrides(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    stated = config.get(OVERRIDES) or {}
    known = isinstance(stated, Mapping) and all(
        isinstance(values, Mapping) and str(index).isdecimal() for index, values in stated.items()
    )
    if not known:
        raise InputError(
            f"config.json: {OVERRIDES} = {str(stated)[:60]}", "values by number of layer"
        )
    return {int(index): values for index, values in stated.items()}


CAP = 30.0  # of logits, in a file that has no key
_ROPE_TYPES = {SLIDING: ("default",), FULL: ("default", "proportional")}


def kv_heads(config: Mapping[str, Any]) -> list[int]:
    """Return how many heads of keys every layer has."""
    own, full = config["num_key_value_heads"], full_kv_heads(config)
    return [full if word == FULL else own for word in words_of(config)]


def slides(config: Mapping[str, Any]) -> list[bool]:
    """Return whether every layer has a window."""
    return [word == SLIDING for word in words_of(config)]


def widths(config: Mapping[str, Any]) -> list[int]:
    """Return the width of the MLP of every layer."""
    wide, words = shared_width(config), words_of(config)
    first = first_shared(config, words)
    own = config["intermediate_size"]
    return [wide if index >= first else own for index in range(len(words))]


def softcap(config: Mapping[str, Any]) -> Any:
    """Return the cap of logits, 0 for none; llama.cpp caps by `CAP` where a file does not say."""
    return config.get("final_logit_softcapping") or 0.0


def unsupported_by_llama_cpp(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a setting that llama.cpp does not support and what it supports, or None."""
    words = words_of(config)
    if beyond := uncovered(config):
        return beyond, "attention to earlier tokens, heads of full layers that are alike"
    if SLIDING not in words:
        return "layers that are all full", "some with a window"
    first = first_shared(config, words)
    sources = {FULL: first - 1, SLIDING: first - 2}  # of keys, in llama.cpp
    for word in {*words[first:]}:
        last = max(index for index in range(first) if words[index] == word)
        if last != sources[word]:
            return f"{word} that reads keys of layer {last}", f"those of layer {sources[word]}"
    if config.get(INPUT_WIDTH) and config["vocab_size_per_layer_input"] != config["vocab_size"]:
        return (
            f"vocab_size_per_layer_input = {config['vocab_size_per_layer_input']}",
            f"vocab_size, {config['vocab_size']}",
        )
    for word, stated in turns(config).items():
        kind = stated.get("rope_type", "default")
        if kind not in _ROPE_TYPES[word]:
            return f"rope_type = {str(kind)[:40]!r} of {word}", " or ".join(_ROPE_TYPES[word])
    return None


_NEVER = 1e30  # divides a frequency to nothing


def read_config(keys: Keys) -> dict[str, Any]:
    """Return the ``config.json`` that the keys of a GGUF file describe; refuse what no configuration describes."""
    sizes = keys.sizes()
    slides = [bool(item) for item in keys.of_layers("attention.sliding_window_pattern", bool)]
    if not slides or slides[-1] or not any(slides):
        raise keys.not_read(
            "attention.sliding_window_pattern", "a full layer at the end, windows before"
        )
    first = len(slides) - keys.integer("attention.shared_kv_layers", 0)
    if first <= 0:
        raise keys.not_read("attention.shared_kv_layers", "fewer than there are layers")
    softcap = keys.real("final_logit_softcapping", CAP)
    return {
        **sizes,
        "layer_types": [SLIDING if one else FULL for one in slides],
        "sliding_window": keys.integer("attention.sliding_window"),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": softcap or None,
        SHARING: len(slides) - first,
        INPUT_WIDTH: keys.integer("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _rows(keys),
        **_heads(keys, slides, first),
        **_widths(keys, first),
        **_mixture(keys),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 1e4)},
            FULL: _full_rope(keys),
        },
    }


def _rows(keys: Keys) -> int:
    """Return the size of the vocabulary whose tokens have a vector for every layer."""
    table = keys.shape("per_layer_token_embd.weight") or keys.shape("token_embd.weight")
    return next(iter(table), 0)


def _heads(keys: Keys, slides: Sequence[bool], first: int) -> dict[str, Any]:
    """Return heads of both types of layers; keys of full ones are values where these have no projection."""
    counts = keys.of_layers("attention.head_count_kv")
    own, full = (
        {count for count, one in zip(counts, slides, strict=True) if one is word}
        for word in (True, False)
    )
    if len(own) > 1 or len(full) > 1:
        raise keys.not_read(
            f"attention.head_count_kv = {str(counts)[:40]}", "one number for each type"
        )
    (own_count,), (full_count,) = own, full
    width, wide = keys.integer("attention.key_length_swa"), keys.integer("attention.key_length")
    layers = [index for index, one in enumerate(slides) if not one]
    equal = not any(keys.shape(f"blk.{index}.attn_v.weight") for index in layers if index < first)
    found = {"head_dim": width, "num_key_value_heads": own_count, K_EQ_V: equal}
    if equal or full_count == own_count:
        published = {"num_global_key_value_heads": full_count} if equal else {}
        return {**found, "global_head_dim": wide, **published}
    other = {"head_dim": wide, "num_key_value_heads": full_count}
    return {**found, OVERRIDES: {str(index): other for index in layers}}


def _widths(keys: Keys, first: int) -> dict[str, Any]:
    """Return the width of the MLP, and whether that of the last layers is twice as wide."""
    widths = keys.of_layers("feed_forward_length")
    own, shared = {*widths[:first]}, {*widths[first:]}
    twice = shared == {2 * widths[0]}
    if len(own) > 1 or not (twice or shared <= own):
        raise keys.not_read(
            f"feed_forward_length = {str(widths)[:40]}", "one, or twice that where keys are shared"
        )
    return {"intermediate_size": widths[0], "use_double_wide_mlp": twice}


def _mixture(keys: Keys) -> dict[str, Any]:
    experts = keys.integer("expert_count", 0)
    if not experts:
        return {MIXTURE: False}
    return {
        MIXTURE: True,
        "num_experts": experts,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


def _full_rope(keys: Keys) -> dict[str, Any]:
    """Return the rotary positions of full layers: of a part of a head, where the others are divided to nothing."""
    plain = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base", 1e4)}
    divisors = keys.divisors()
    turning = [value for value in divisors if value < _NEVER]
    if not divisors or {*divisors} == {1.0}:
        return plain
    if {*divisors[: len(turning)]} != {*turning} or len({*turning}) != 1:
        raise keys.not_read(
            "rope_freqs.weight", "one divisor, then those that stop what does not turn"
        )
    width = 2 * len(divisors)
    share = 2 * len(turning) / width
    if int(share * width // 2) != len(turning):  # rounded downwards
        share = (2 * len(turning) + 1) / width
    factor = {} if turning[0] == 1 else {"factor": turning[0]}
    return {**plain, "rope_type": "proportional", "partial_rotary_factor": share, **factor}


_THETA = 100.0  # llama.cpp has it built in
_USUAL = 16  # pooled patches of a side of a picture: 256 tokens
_CAUSAL = (1536, 2560)  # widths of decoders whose picture tokens llama.cpp does not let look ahead
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_TOWER, _PATCHES = "vision_tower", "vision_tower.patch_embedder"


def projector(config: Mapping[str, Any]) -> Projector:
    """Return the tower of pictures with its projector, for a whole configuration; errors as `TowerConfig`."""
    vision = TowerConfig(config["vision_config"])
    vision.require("hidden_activation", "gelu_pytorch_tanh")
    vision.require_theta(_THETA)
    sizes = vision.sizes(TowerSizes(768, 3072, 16, 12, 16))
    width, _, _, heads, patch = sizes
    vision.require("head_dim", width // heads, otherwise=64)
    vision.require("num_key_value_heads", heads, otherwise=12)
    pooled = vision.size("pooling_kernel_size", 3)
    places = vision.size("position_embedding_size", 10240)
    clips = vision.values.get("use_clipped_linears", False) is True
    scaled = vision.values.get("standardize", False) is True  # of pooled patches
    out = _decoder_width(text_config(config))
    return Projector(
        "gemma4v",
        {
            "use_gelu": True,
            **sizes.keys(patch * pooled * _USUAL, vision.real("rms_norm_eps", 1e-6), out),
            "vision.projector.scale_factor": pooled,
        },
        (
            weight(
                f"{_PATCHES}.input_proj",
                "v.patch_embd",
                (width, 3 * patch**2),
                wide=True,
                pixels=patch,
            ),
            TowerTensor(
                f"{_PATCHES}.position_embedding_table",
                ("v.position_embd.weight",),
                (2, places, width),
                wide=True,
            ),
            *_blocks(sizes, clips=clips),
            *(
                TowerTensor(f"{_TOWER}.{name}", (f"v.{name}",), (width,))
                for name in ("std_bias", "std_scale")
                if scaled
            ),
            weight("embed_vision.embedding_projection", "mm.input_projection", (out, width)),
        ),
        mean=(0.0, 0.0, 0.0),
        deviation=(1.0, 1.0, 1.0),
        normalizes=False,
        left_out=(r"(audio_tower|embed_audio)\..*",),
    )


def _decoder_width(words: Mapping[str, Any]) -> int:
    """Return the width of the decoder, in which llama.cpp takes two things for granted."""
    text = TowerConfig(words, "text_config")
    width = text.size("hidden_size", 2304)
    text.require(
        "use_bidirectional_attention", None if width in _CAUSAL else "vision", otherwise=None
    )
    if words.get(INPUT_WIDTH, 256):  # the vector of this token stands for those of a picture
        text.require("pad_token_id", 0)
    return width


def _blocks(sizes: TowerSizes, *, clips: bool) -> Iterator[TowerTensor]:
    """Yield the tensors of all blocks; where linears clip, their four bounds after each weight."""
    block = {
        "input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj.linear": "attn_q", "self_attn.k_proj.linear": "attn_k",
        "self_attn.v_proj.linear": "attn_v", "self_attn.o_proj.linear": "attn_out", "mlp.gate_proj.linear": "ffn_gate",
        "mlp.up_proj.linear": "ffn_up", "mlp.down_proj.linear": "ffn_down",
    }  # fmt: skip
    layers = f"{_TOWER}.encoder.layers"
    for tensor in stack(layers, sizes, block, norm_bias=False, bias=False):
        yield tensor
        name, linear, _ = tensor.name.partition(".linear.")
        for bound in _BOUNDS if clips and linear else ():
            held = tensor.held[0].removesuffix("weight") + bound
            yield TowerTensor(f"{name}.{bound}", (held,), ())


ARCHITECTURE = Architecture(
    model_type="gemma4_text",
    blocks="model.layers",
    outer=(
        Parameter("model.embed_tokens.weight", ("vocab", "hidden")),
        *only(INPUT_WIDTH, INPUT_OUTER),
        *norms("model.norm"),
        Parameter("lm_head.weight", ("vocab", "hidden")),
    ),
    kinds=tuple(
        layer(
            NORMS,
            attention(*place, shared=bool(word)),
            gated_mlp(norm=BEFORE_MLP, width="shared_ffn" if word else "ffn"),
            *REST,
            name=f"{name}/{word}" if word else name,
        )
        for name, place in TOKENS.items()
        for word in ("", SHARED)
    ),
    kind_of=kinds,
    sizes={
        "full_head": full_head,
        "full_kv_heads": full_kv_heads,
        "shared_ffn": shared_width,
        "each_layer": each_layer,
        "each_vocab": ("vocab_size_per_layer_input",),
        "experts": experts,
        "inner": inner_width,
    },
    embedding="model.embed_tokens",
    head="lm_head",
    final_norm="model.norm",
    prefixes=(("", ""), ("language_model.", ""), ("model.language_model.", "model.")),
    unmapped={"gemma4": rf"{ALONE}|language_model\.", "gemma4_text": WITHIN_TOWERS},
    # Published files hold what layers without keys and values of their own do not read.
    droppable=(
        r".*rotary_emb\.inv_freq",
        r".*\.self_attn\.[kv]_scale",
        r"(model\.|language_model\.)*layers\.\d+\.self_attn\.([kv]_proj|[kv]_norm)\.(weight|bias)",
    ),
    foreign=(r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    uncovered=uncovered,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": 262144,
        INPUT_WIDTH: 256,
        SHARING: 0,
        "sliding_window": 512,
        "rope_parameters": TURNS,
    },
    float16=False,
    gguf=GgufFamily(
        "gemma4",
        class_name="Gemma4ForCausalLM",
        activations=("gelu_pytorch_tanh",),
        windowed=True,
        divided_head="full_head",
        sliding_base=True,
        scalings=("proportional",),
        experts=MIXTURE,
        used="top_k_experts",
        sizes={
            "attention.key_length": "full_head",
            "attention.value_length": "full_head",
            "attention.key_length_swa": "head",
            "attention.value_length_swa": "head",
            "rope.dimension_count_swa": "head",
        },
        numbers={
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": SHARING,
            "embedding_length_per_layer_input": INPUT_WIDTH,
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        reals={"final_logit_softcapping": softcap},
        lists={
            "attention.head_count_kv": kv_heads,
            "attention.sliding_window_pattern": slides,
            "feed_forward_length": widths,
        },
        names={
            "layer_scalar": "layer_output_scale.weight",
            "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale",
            **{
                f"experts.{name}_proj.weight": f"ffn_{name}_exps.weight"
                for name in ("gate", "up", "down")
            },
        },
        unsupported=unsupported_by_llama_cpp,
        read_config=read_config,
    ),
    text_config="text_config",
    projector={"gemma4": projector},
    replayed=(INPUT_WIDTH, SHARING),
    windows=WindowRule(width=512, period=PERIOD, full_last=True),
)
FAMILIES = {"gemma4": ARCHITECTURE, "gemma4_text": ARCHITECTURE}
