"""Every pair of formats: an exact conversion decodes to the same values, anything else is refused or says so."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantforge.cli.formats import list_conversions
from quantforge.errors import RefusedError
from quantforge.formats import FORMATS, ModuleLayout, Verdict, load_format
from quantforge.formats.convert import compare_values, convert, layer_scheme_in_format
from quantforge.notation import parse_layer
from quantforge.packers import get_packer
from quantforge.packers.tensor import QuantizedTensor
from quantforge.scheme import LayerScheme

SHAPE = (256, 256)
MODULES = [key for key in FORMATS if key not in {"plain", "gguf"}]  # that store module by module
SPECIMENS = {key: load_format(key).INFO.example_schemes for key in FORMATS}


def made(source: str, text: str) -> QuantizedTensor:
    """A rounded random matrix as the files of a format hold it, with scales that are powers of two every other row."""
    form, layer = load_format(source), parse_layer(text)
    scheme = form.stored_scheme(layer.weight.with_scale(form.default_scale_type("BF16")), SHAPE)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * 0.03
    parameters = get_packer(scheme).fit(weight, scheme)
    codes = get_packer(scheme).encode(weight, parameters, scheme)
    return QuantizedTensor(codes, parameters, scheme, layer.input)


def through(tensor: QuantizedTensor, target: str) -> QuantizedTensor:
    """Write a tensor as a module of a format, and read it back."""
    form = load_format(target)
    layer = LayerScheme(tensor.scheme, tensor.input)
    packed = form.pack("model.layers.0.m", tensor)
    assert packed.keys() == {
        item.name for item in form.packed_tensors("model.layers.0.m", layer, SHAPE)
    }
    return form.unpack(ModuleLayout("model.layers.0.m", layer, SHAPE, tuple(packed)), packed)


@pytest.mark.parametrize("source", MODULES)
def test_what_a_format_holds_is_exact_in_others_or_they_say_why_not(source):
    for text in SPECIMENS[source]:
        tensor = made(source, text)
        for target in MODULES:
            exact_or_refused(tensor, target)


def exact_or_refused(tensor: QuantizedTensor, target: str) -> None:
    form = load_format(target)
    fit, wanted = layer_scheme_in_format(
        LayerScheme(tensor.scheme, tensor.input), SHAPE, form, "BF16"
    )
    if fit.verdict is Verdict.IMPOSSIBLE:
        assert fit.reason
        with pytest.raises(RefusedError):
            form.pack("model.layers.0.m", tensor)
        return
    bare = tensor if wanted.input == tensor.input else replace(tensor, input=wanted.input)
    found = compare_values(bare, wanted.weight, form.MIN_ZERO_POINT)
    if found.verdict is Verdict.EXACT:
        same = convert(bare, wanted.weight, form.MIN_ZERO_POINT)
        assert torch.equal(through(same, target).decode(), tensor.decode())
        assert (fit.verdict is Verdict.INEXACT) is (
            wanted.input != tensor.input
        ) or fit.verdict is Verdict.DEPENDS_ON_VALUES
        return
    assert fit.verdict is Verdict.DEPENDS_ON_VALUES
    with pytest.raises(RefusedError):
        convert(bare, wanted.weight, form.MIN_ZERO_POINT)
    if found.verdict is Verdict.INEXACT:
        near = convert(bare, wanted.weight, form.MIN_ZERO_POINT, allow_inexact=True)
        error = (through(near, target).decode() - tensor.decode()).abs().max()
        assert 0 < error < 0.01 * tensor.decode().abs().max()


def test_the_matrix_has_every_pair_with_a_reason():
    found = {(cell.source, str(cell.scheme), cell.target): cell for cell in list_conversions()}
    assert {source for source, _, _ in found} == set(FORMATS) - {"plain"}
    assert len(found) == sum(map(len, SPECIMENS.values())) * len(FORMATS)
    for cell in found.values():
        assert cell.word in {"exact", "inexact", "no", "values", "="}
        assert cell.fit.reason or cell.fit.verdict is Verdict.EXACT
        if cell.source == cell.target:
            assert cell.fit.verdict is not Verdict.IMPOSSIBLE


def test_the_documented_matrix_is_the_computed_one():
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    rows = {}
    for (source, scheme), line in itertools.groupby(
        list_conversions(), lambda cell: (cell.source, str(cell.scheme))
    ):
        rows[source, scheme] = [cell.word for cell in line]
    for (source, scheme), words in rows.items():
        assert f"| {source} | `{scheme}` | {' | '.join(words)} |" in text
