"""Packed words equal those of other programs and decode with slow independent readers."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from quantforge.formats import awq, compressed_tensors, gptq, gptq_v2
from quantforge.packers.bits import pack_rows, to_unsigned_codes
from quantforge.packers.tensor import QuantizedTensor
from tests.quantized import dequantize_reference, random_tensor
from tests.thorough import parametrize_each_value


def hexadecimal(words):
    return [f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist()]


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        (4, range(-8, 8), ["76543210", "fedcba98"]),
        (8, (-128, -1, 0, 127), ["ff807f00"]),
        (3, [*range(-4, 4)] * 4, ["88fac688", "c688fac6", "fac688fa"]),
    ],
)
def test_compressed_tensors_words(bits, codes, words):
    row = torch.tensor([list(codes)], dtype=torch.int8)
    assert hexadecimal(pack_rows(to_unsigned_codes(row, bits), bits)) == words


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_equals_the_library_of_compressed_tensors(bits):
    for shape in ((5, 96), (3, 33)):
        tensor = random_tensor(f"int{bits}:row:sym", shape)
        packed = compressed_tensors.pack("m", tensor)
        assert torch.equal(packed["m.weight_packed"], pack_to_int32(tensor.codes, bits))


@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_points_equal_the_library_of_compressed_tensors(bits):
    tensor = random_tensor(f"int{bits}:g32:asym", (40, 96))
    packed = compressed_tensors.pack("m", tensor)
    half = 1 << (bits - 1)
    zeros = (tensor.parameters["zeros"].short() - half).to(torch.int8)
    assert torch.equal(packed["m.weight_zero_point"], pack_to_int32(zeros, bits, packed_dim=0))
    codes = unpack_from_int32(packed["m.weight_packed"], bits, torch.Size((40, 96)))
    assert torch.equal(codes.short() + half, tensor.codes.short())


def symmetric_of(codes, bits, groups=1):
    scales = torch.full((codes.shape[0], groups), 0.5, dtype=torch.float16)
    scheme = random_tensor(f"int{bits}:row:sym", (1, 32)).scheme
    return QuantizedTensor(codes, {"scales": scales}, scheme)


def test_gptq_word_runs_down_the_inputs():
    codes = torch.zeros(32, 32, dtype=torch.int8)
    codes[1, :8] = torch.arange(8, dtype=torch.int8) - 8  # unsigned 0..7 in output 1
    packed = gptq.pack("m", symmetric_of(codes, 4))
    assert packed["m.qweight"].shape == (4, 32)
    assert hexadecimal(packed["m.qweight"][0, :2]) == ["88888888", "76543210"]


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (2, ["55555555"] * 2),
        (3, ["db6db6db", "b6db6db6", "6db6db6d"]),
        (4, ["77777777"] * 4),
        (8, ["7f7f7f7f"] * 8),
    ],
)
def test_gptq_zero_words_of_a_symmetric_grid(bits, words):
    packed = gptq.pack("m", symmetric_of(torch.zeros(32, 32, dtype=torch.int8), bits))
    assert hexadecimal(packed["m.qzeros"]) == words
    shifted = gptq_v2.pack("m", symmetric_of(torch.zeros(32, 32, dtype=torch.int8), bits))
    assert not torch.equal(shifted["m.qzeros"], packed["m.qzeros"])


def test_awq_word_holds_the_outputs_in_its_order():
    scales = torch.ones(8, 1, dtype=torch.float16)
    zeros = torch.arange(8, dtype=torch.uint8).view(8, 1)
    scheme = random_tensor("int4:g32:asym", (8, 32)).scheme
    codes = torch.arange(8, dtype=torch.uint8).view(8, 1).repeat(1, 32)
    packed = awq.pack("m", QuantizedTensor(codes, {"scales": scales, "zeros": zeros}, scheme))
    assert set(hexadecimal(packed["m.qweight"])) == {"75316420"}
    assert hexadecimal(packed["m.qzeros"]) == ["75316420"]


def field(words, index, bits):
    """Read field ``index`` of a dense stream of unsigned 32-bit words, one bit at a time."""
    value = 0
    for bit in range(bits):
        position = index * bits + bit
        value |= (words[position // 32] >> (position % 32) & 1) << bit
    return value


def lists(tensor):
    return (tensor.to(torch.int64) & 0xFFFFFFFF).tolist()


def slow_gptq(packed, bits, shape, offset):
    rows, columns = shape
    by_output = lists(packed["m.qweight"].T)
    zeros, scales = lists(packed["m.qzeros"]), packed["m.scales"].double().tolist()
    group = packed["m.g_idx"].tolist()
    return [
        [
            scales[group[k]][n]
            * (field(by_output[n], k, bits) - field(zeros[group[k]], n, bits) - offset)
            for k in range(columns)
        ]
        for n in range(rows)
    ]


@parametrize_each_value(
    ("layout", [gptq, gptq_v2]),
    ("bits", [2, 3, 4, 8]),
    ("kind", ["g32:sym", "g32:asym", "row:sym"]),
)
def test_slow_gptq_reader_decodes_the_same_weight(layout, bits, kind):
    tensor = random_tensor(f"int{bits}:{kind}", (32, 64), least_zero=layout.MIN_ZERO_POINT)
    packed = layout.pack("m", tensor)
    read = slow_gptq(packed, bits, (32, 64), offset=1 if layout is gptq else 0)
    assert torch.equal(
        torch.tensor(read, dtype=torch.float64).float(), dequantize_reference(tensor)
    )


def slow_awq(packed, shape):
    rows, columns = shape
    shift_of = {output: nibble for nibble, output in enumerate([0, 2, 4, 6, 1, 3, 5, 7])}
    weights, zeros = lists(packed["m.qweight"]), lists(packed["m.qzeros"])
    scales = packed["m.scales"].double().tolist()
    size = columns // len(scales)

    def nibble(words, n):
        return words[n // 8] >> (4 * shift_of[n % 8]) & 15

    return [
        [
            scales[k // size][n] * (nibble(weights[k], n) - nibble(zeros[k // size], n))
            for k in range(columns)
        ]
        for n in range(rows)
    ]


@pytest.mark.parametrize(
    "scheme", ["int4:g32:asym", "int4:g64:asym", "int4:g32:sym", "int4:row:sym"]
)
def test_slow_awq_reader_decodes_the_same_weight(scheme):
    tensor = random_tensor(scheme, (24, 64))
    read = slow_awq(awq.pack("m", tensor), (24, 64))
    assert torch.equal(
        torch.tensor(read, dtype=torch.float64).float(), dequantize_reference(tensor)
    )
