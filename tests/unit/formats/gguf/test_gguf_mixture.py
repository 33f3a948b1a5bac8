"""Types of GGUF mixtures equal tables taken from llama.cpp's quantizer."""

from __future__ import annotations

import pytest

from quantforge.formats.gguf.mixture import (
    MIXTURES,
    ModelShape,
    always_float32,
    assign_types,
    file_order,
    fitting_type,
)

LAYERS = ("attn_k", "attn_output", "attn_q", "attn_v", "ffn_down", "ffn_gate", "ffn_up")


def tensors(
    layers: int, *, tied: bool = False, moe: bool = False, fused: bool = False
) -> list[tuple[str, int]]:
    names = ["token_embd.weight"] + ([] if tied else ["output.weight"])
    for block in range(layers):
        for layer in LAYERS:
            if fused and layer in {"attn_k", "attn_v"}:
                continue
            name = "attn_qkv" if fused and layer == "attn_q" else layer
            stacked = "_exps" if moe and layer.startswith("ffn") else ""
            names.append(f"blk.{block}.{name}{stacked}.weight")
    return [(name, 256) for name in names]


def type_digits(chosen: dict[str, str], layer: str) -> str:
    """Return the types of one layer in all blocks as digits: 4 for Q4_K, 0 for Q8_0."""
    types = {name: gguf_type for name, gguf_type in chosen.items() if f".{layer}." in name}
    return "".join(types[name].replace("Q8_0", "0")[1 if types[name] != "Q8_0" else 0]
                   for name in sorted(types, key=file_order))  # fmt: skip


DENSE = ModelShape(layers=16, heads=32, kv_heads=32)
GROUPED = ModelShape(layers=16, heads=32, kv_heads=8)
WITH_IMPORTANCE = ModelShape(layers=16, heads=32, kv_heads=32, importance=True)
# Mixture and shape: values, second MLP matrix, output of attention, over 16 blocks; output matrix.
TABLE = {
    ("Q2_K", DENSE): ("3" * 16, "3" * 16, "3" * 16, "Q6_K"),
    ("Q2_K", GROUPED): ("4" * 16, "3" * 16, "3" * 16, "Q6_K"),
    ("Q2_K_S", GROUPED): ("4" * 16, "44" + "2" * 14, "2" * 16, "Q6_K"),
    ("Q2_K_S", DENSE): ("2" * 16, "44" + "2" * 14, "2" * 16, "Q6_K"),
    ("Q3_K_S", GROUPED): ("3" * 16, "3" * 16, "3" * 16, "Q6_K"),
    ("Q3_K_M", GROUPED): ("55" + "4" * 14, "5" + "4" * 15, "4" * 16, "Q6_K"),
    ("Q3_K_L", GROUPED): ("5" * 16, "5" * 16, "5" * 16, "Q6_K"),
    ("Q4_K_S", GROUPED): ("5555" + "4" * 12, "55" + "4" * 14, "4" * 16, "Q6_K"),
    ("Q4_K_M", GROUPED): ("6644644644644666", "6644644644644666", "4" * 16, "Q6_K"),
    ("Q5_K_M", DENSE): ("6655655655655666", "6655655655655666", "5" * 16, "Q6_K"),
    ("Q5_K_S", DENSE): ("5" * 16, "5" * 16, "5" * 16, "Q6_K"),
    ("Q6_K", DENSE): ("6" * 16, "6" * 16, "6" * 16, "Q6_K"),
    ("Q8_0", DENSE): ("0" * 16, "0" * 16, "0" * 16, "Q8_0"),
}


@pytest.mark.parametrize(
    ("mixture", "shape"), TABLE, ids=lambda value: getattr(value, "kv_heads", value)
)
def test_k_quant_mixtures_assign_the_types_of_llama_cpp(mixture, shape):
    chosen = assign_types(mixture, tensors(16), shape)
    values, down, attention, output = TABLE[mixture, shape]
    base = MIXTURES[mixture][1]
    assert type_digits(chosen, "attn_v") == values
    assert type_digits(chosen, "ffn_down") == down
    assert type_digits(chosen, "attn_output") == attention
    assert chosen["output.weight"] == output
    for layer in ("attn_q", "attn_k", "ffn_gate", "ffn_up"):
        assert {gguf_type for name, gguf_type in chosen.items() if layer in name} == {base}
    assert chosen["token_embd.weight"] == base


# Mixture and shape: values and second MLP matrix of blocks 1, 5 and 15, output of attention, keys and queries, first
# MLP matrices of the three blocks, output matrix, embedding. Written down from the rules of llama-quant.cpp.
LATTICES = {
    ("IQ1_S", DENSE): (
        "Q2_K Q2_K Q2_K",
        "Q2_K IQ1_S IQ1_S",
        "IQ2_XXS",
        "IQ1_S",
        "IQ1_S IQ1_S IQ1_S",
        "Q5_K",
        "Q2_K",
    ),
    ("IQ1_M", GROUPED): (
        "Q4_K Q4_K Q4_K",
        "Q2_K IQ1_M IQ1_M",
        "IQ2_XXS",
        "IQ1_M",
        "IQ1_M IQ1_M IQ1_M",
        "Q5_K",
        "Q2_K",
    ),
    ("IQ2_XXS", DENSE): (
        "Q2_K Q2_K Q2_K",
        "Q2_K IQ2_XXS IQ2_XXS",
        "IQ2_XXS",
        "IQ2_XXS",
        "IQ2_XXS IQ2_XXS IQ2_XXS",
        "Q5_K",
        "Q2_K",
    ),
    ("IQ2_XS", GROUPED): (
        "Q4_K Q4_K Q4_K",
        "Q2_K IQ2_XS IQ2_XS",
        "IQ2_XS",
        "IQ2_XS",
        "IQ2_XS IQ2_XS IQ2_XS",
        "Q5_K",
        "Q2_K",
    ),
    ("IQ2_S", DENSE): (
        "IQ3_S IQ3_S IQ3_S",
        "IQ3_S IQ2_XS IQ2_XS",
        "IQ3_S",
        "IQ2_XS",
        "IQ2_XS IQ2_XS IQ2_XS",
        "Q5_K",
        "IQ3_S",
    ),
    ("IQ2_M", DENSE): (
        "IQ3_S IQ3_S IQ3_S",
        "IQ3_S IQ2_S IQ2_S",
        "IQ3_S",
        "IQ2_S",
        "IQ2_S IQ2_S IQ2_S",
        "Q5_K",
        "IQ3_S",
    ),
    ("IQ3_XXS", WITH_IMPORTANCE): (
        "IQ3_XXS IQ3_XXS IQ3_XXS",
        "IQ3_XXS IQ3_XXS IQ3_XXS",
        "IQ3_S",
        "IQ2_S",
        "IQ3_XXS IQ3_XXS IQ3_XXS",
        "Q5_K",
        "IQ3_S",
    ),
    ("IQ3_XXS", DENSE): (
        "IQ3_S IQ3_S IQ3_S",
        "Q4_K Q3_K Q3_K",
        "IQ3_S",
        "IQ2_S",
        "IQ3_XXS IQ3_XXS IQ3_XXS",
        "Q5_K",
        "IQ3_S",
    ),
    ("IQ3_XS", WITH_IMPORTANCE): (
        "IQ3_S IQ3_S IQ3_S",
        "IQ3_S IQ3_S IQ3_S",
        "IQ3_S",
        "IQ3_XXS",
        "IQ3_S IQ3_XXS IQ3_S",
        "Q6_K",
        "IQ3_S",
    ),
    ("IQ3_S", GROUPED): (
        "Q4_K Q4_K Q4_K",
        "IQ3_S IQ3_S IQ3_S",
        "IQ3_S",
        "IQ3_S",
        "IQ3_S IQ3_S IQ3_S",
        "Q6_K",
        "IQ3_S",
    ),
    ("IQ3_M", DENSE): (
        "Q4_K Q4_K Q4_K",
        "Q4_K IQ3_S IQ3_S",
        "Q4_K",
        "IQ3_S",
        "IQ3_S IQ3_S IQ3_S",
        "Q6_K",
        "IQ3_S",
    ),
}


@pytest.mark.parametrize(("mixture", "shape"), LATTICES)
def test_iq_mixtures_assign_the_types_of_llama_cpp(mixture, shape):
    chosen = assign_types(mixture, tensors(16), shape)

    def types_of_layer(layer: str) -> str:
        return " ".join(chosen[f"blk.{block}.{layer}.weight"] for block in (1, 5, 15))

    values, down, attention, question, inner, output, embedding = LATTICES[mixture, shape]
    assert (
        types_of_layer("attn_v"),
        types_of_layer("ffn_down"),
        types_of_layer("ffn_gate"),
        types_of_layer("ffn_up"),
    ) == (
        values,
        down,
        inner,
        inner,
    )
    assert types_of_layer("attn_output") == " ".join([attention] * 3)
    assert types_of_layer("attn_q") == types_of_layer("attn_k") == " ".join([question] * 3)
    assert (chosen["output.weight"], chosen["token_embd.weight"]) == (output, embedding)


def test_experts_change_iq_mixtures():
    eight, four = ModelShape(16, 32, 32, experts=8), ModelShape(16, 32, 32, experts=4)
    low = assign_types("IQ2_XXS", tensors(16, moe=True), eight)
    assert (low["blk.3.attn_v.weight"], low["blk.3.attn_k.weight"]) == ("Q4_K", "Q4_K")
    assert low["blk.3.attn_output.weight"] == "Q5_K"
    assert assign_types("IQ2_XXS", tensors(16, moe=True), four)["blk.3.attn_v.weight"] == "Q4_K"
    high = assign_types("IQ3_M", tensors(16, moe=True), eight)
    assert (high["blk.3.attn_v.weight"], high["blk.3.attn_output.weight"]) == ("Q8_0", "Q5_K")
    assert [high[f"blk.{block}.ffn_down_exps.weight"] for block in (4, 5, 15)] == [
        "Q4_K",
        "IQ3_S",
        "Q4_K",
    ]


def test_mixtures_follow_the_number_of_blocks():
    chosen = assign_types("Q4_K_M", tensors(4), ModelShape(4, 4, 2))
    assert type_digits(chosen, "attn_v") == type_digits(chosen, "ffn_down") == "4466"
    chosen = assign_types("Q4_K_M", tensors(32), ModelShape(32, 32, 8))
    assert type_digits(chosen, "ffn_down") == "6666" + "446" * 8 + "6666"


def test_a_tied_embedding_gets_the_type_of_the_output_matrix():
    assert assign_types("Q4_K_M", tensors(2, tied=True), GROUPED)["token_embd.weight"] == "Q6_K"
    assert assign_types("Q8_0", tensors(2, tied=True), GROUPED)["token_embd.weight"] == "Q8_0"
    assert assign_types("F16", tensors(2, tied=True), GROUPED)["token_embd.weight"] == "F16"


def test_a_fused_qkv_projection_gets_the_type_of_values():
    chosen = assign_types("Q4_K_M", tensors(8, fused=True), ModelShape(8, 32, 32))
    assert type_digits(chosen, "attn_qkv") == type_digits(chosen, "ffn_down") == "64464466"


def test_eight_experts_raise_attention_types():
    shape = ModelShape(layers=16, heads=32, kv_heads=8, experts=8)
    chosen = assign_types("Q4_K_M", tensors(16, moe=True), shape)
    assert type_digits(chosen, "attn_v") == type_digits(chosen, "attn_k") == "0" * 16
    assert type_digits(chosen, "attn_output") == "5" * 16
    assert type_digits(chosen, "ffn_down_exps") == "6644644644644666"
    four = assign_types("Q4_K_M", tensors(16, moe=True), ModelShape(16, 32, 8, experts=4))
    assert type_digits(four, "attn_output") == "4" * 16


def test_70b_models_raise_the_type_of_values():
    chosen = assign_types("Q4_K_M", tensors(80), ModelShape(80, 64, 8))
    assert set(type_digits(chosen, "attn_v")) == {"5", "6"}
    assert set(
        type_digits(assign_types("Q3_K_S", tensors(80), ModelShape(80, 64, 8)), "attn_v")
    ) == {"5"}
    assert set(
        type_digits(assign_types("Q3_K_S", tensors(80), ModelShape(80, 64, 64)), "attn_v")
    ) == {"3"}


def test_importance_changes_which_layers_are_raised():
    def down(mixture: str, importance: bool) -> list[str]:
        chosen = assign_types(mixture, tensors(16), ModelShape(16, 32, 32, importance=importance))
        return [chosen[f"blk.{block}.ffn_down.weight"] for block in range(16)]

    assert down("IQ4_XS", False) == ["Q5_K"] * 2 + ["IQ4_XS"] * 14
    assert down("IQ4_XS", True) == ["IQ4_XS"] * 16
    assert down("Q4_0", True) == ["Q4_1"] * 2 + ["Q4_0"] * 14
    assert down("Q5_0", True) == ["Q5_1"] * 2 + ["Q5_0"] * 14
    assert down("Q4_0", False) == ["Q4_0"] * 16


def test_misfit_columns_fall_back_like_llama_cpp():
    pairs = {
        "Q2_K": "Q4_0",
        "Q3_K": "Q4_0",
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
        "IQ4_XS": "IQ4_NL",
        "IQ2_XXS": "IQ4_NL",
    }
    for gguf_type, other in pairs.items():
        assert fitting_type(gguf_type, 512) == gguf_type
        assert fitting_type(gguf_type, 224) == other
        assert fitting_type(gguf_type, 33) == "F16"
    assert fitting_type("Q8_0", 33) == "F16"
    assert fitting_type("BF16", 33) == "BF16"
    assert assign_types("Q4_K_M", [("output.weight", 96)], GROUPED)["output.weight"] == "Q8_0"


def test_norms_biases_and_routers_are_always_float32():
    always = (
        "blk.0.attn_norm.weight",
        "blk.0.attn_q.bias",
        "blk.3.ffn_gate_inp.weight",
        "position_embd.weight",
    )
    assert all(always_float32(name, 2) for name in always)
    assert always_float32("rope_freqs.weight", 1)
    assert not always_float32("blk.0.attn_q.weight", 2)


def test_gguf_tensors_are_ordered_by_block_and_name():
    names = [
        "blk.10.a",
        "output.weight",
        "blk.2.b",
        "blk.2.a",
        "token_embd.weight",
        "output_norm.weight",
    ]
    assert sorted(names, key=file_order) == [
        "output.weight", "output_norm.weight", "token_embd.weight", "blk.2.a", "blk.2.b", "blk.10.a",
    ]  # fmt: skip
