"""Bit packing equals its definition for every width and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.grids import words_per_row
from quantforge.packers import bits as module
from quantforge.packers.bits import pack_rows, to_signed_codes, to_unsigned_codes, unpack_rows

WIDTHS = range(2, 9)


def slow_words(row, bits):
    """Place each code at bit ``i * bits`` of one long integer, then cut it into words."""
    stream = sum(code << (index * bits) for index, code in enumerate(row))
    return [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))]


def as_unsigned(words):
    return (words.to(torch.int64) & 0xFFFFFFFF).tolist()


def random_codes(rows, columns, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)


@settings(max_examples=120, deadline=None)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 100), st.integers(0, 2**32))
def test_packed_words_match_the_definition_and_unpack_to_the_codes(bits, rows, columns, seed):
    codes = random_codes(rows, columns, bits, seed)
    words = pack_rows(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, words_per_row(columns, bits))
    assert as_unsigned(words) == [slow_words(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack_rows(words, bits, columns), codes)


def test_packing_in_chunks_gives_the_same_words(monkeypatch):
    codes = {bits: random_codes(23, 70, bits, bits) for bits in WIDTHS}
    whole = {bits: pack_rows(each, bits) for bits, each in codes.items()}
    monkeypatch.setattr(module, "_CHUNK_CODES", 150)  # two rows at a time
    for bits, each in codes.items():
        assert torch.equal(pack_rows(each, bits), whole[bits]), bits
        assert torch.equal(unpack_rows(whole[bits], bits, 70), each), bits


def test_transposed_views_pack_like_copies():
    for bits in WIDTHS:
        codes = random_codes(64, 24, bits, 0)  # 64: nothing is padded, and so copied, on the way
        assert torch.equal(pack_rows(codes.T, bits), pack_rows(codes.T.contiguous(), bits)), bits


def test_views_of_words_unpack_like_copies():
    codes = random_codes(40, 24, 3, 0)
    words = pack_rows(codes, 3).T.contiguous().T
    assert torch.equal(unpack_rows(words, 3, 24), codes)


def test_packing_and_unpacking_leave_inputs_unchanged():
    codes = random_codes(4, 64, 4, 0)
    before = codes.clone()
    words = pack_rows(codes, 4)
    kept = words.clone()
    unpack_rows(words, 4, 64)
    assert torch.equal(codes, before)
    assert torch.equal(words, kept)


def test_code_too_large_for_its_bits_is_refused():
    for bits in WIDTHS[:-1]:
        codes = torch.zeros(2, 9, dtype=torch.uint8)
        codes[1, 4] = (1 << bits) - 1
        pack_rows(codes, bits)
        codes[1, 4] += 1
        with pytest.raises(ValueError, match=f"does not fit in {bits} bits"):
            pack_rows(codes, bits)


@pytest.mark.parametrize("columns", [56, 65])
def test_a_wrong_word_count_is_refused(columns):
    words = pack_rows(random_codes(2, 64, 4, 0), 4)
    with pytest.raises(ValueError, match="not 8"):
        unpack_rows(words, 4, columns)


def test_signed_codes_convert_to_unsigned_and_back():
    for bits in WIDTHS:
        half = 1 << (bits - 1)
        codes = torch.arange(-half, half).to(torch.int8).view(2, -1)
        assert to_unsigned_codes(codes, bits).flatten().tolist() == list(range(2 * half))
        assert torch.equal(to_signed_codes(to_unsigned_codes(codes, bits), bits), codes)
