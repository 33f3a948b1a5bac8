"""Release files: accepted content, and errors found from the file alone."""

from __future__ import annotations

import pytest

from quantforge.errors import InputError, QuantForgeError, UsageError
from quantforge.planning.release_spec import parse_release, set_names, variants_of

HEAD = 'model = "m"\n'
EVALUATION = '[evaluation]\ntext = "builtin"\n'
VARIANT = '[[variant]]\nname = "a"\nmethod = "gptq"\nbits = 4\n'


def test_release_options_override_variant_recipes():
    spec = parse_release(
        HEAD + "[calibration]\nsamples = 7\n[gates]\nmax_bytes = 9\n" + EVALUATION
        + '[[variant]]\nname = "a"\nrecipe = "balanced-4bit"\nmethod = "gptq"\ngates = {max_kl = 0.1}\n'
        + '[[variant]]\nname = "b"\nrecipe = {bits = 3, rule = [{match = "x", scheme = "keep"}]}\n',
        "f",
    )  # fmt: skip
    first, second = spec.variants
    assert (first.recipe.method, first.recipe.scheme) == ("gptq", "int4:g128:sym")
    assert (first.recipe.calibration.samples, first.recipe.calibration.length) == (7, 512)
    assert (first.gates.max_bytes, first.gates.max_kl) == (9, 0.1)
    assert (second.gates.max_bytes, second.gates.max_kl) == (9, None)
    assert second.recipe.rules[0].scheme == "keep"
    assert [item.name for item in spec.only(["b"]).variants] == ["b"]
    with pytest.raises(UsageError, match="--only c"):
        spec.only(["c"])


@pytest.mark.thorough
def test_release_sets_contain_recipes_or_types():
    assert {"gguf-ladder", "vllm", "mlx", "everything"} <= {*set_names()}
    for name in set_names():
        spec = parse_release(f'{HEAD}sets = ["{name}"]', "f")
        assert [variant.name for variant in spec.variants] == [
            f"m-{variant}" for variant in variants_of(name)
        ]
    alike = {
        variant.recipe.to_toml().replace(str(variant.recipe.engine), "")
        for variant in spec.variants
    }
    assert len(alike) == len(spec.variants)
    assert {"vllm-4bit", "mlx-4bit", "Q4_K_M", "autoawq-4bit"} <= {*variants_of("everything")}
    assert "sglang-4bit" not in variants_of("everything")  # vLLM's


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (HEAD + 'varient = 1\n', "unknown key 'varient'", "variant"),
        (HEAD + VARIANT + "bitz = 4\n", "unknown key 'bitz'", "bits"),
        (HEAD + VARIANT + "[gates]\nmax_kll = 1\n", "unknown key 'max_kll'", "max_kl"),
        (HEAD + VARIANT + "recipe = {methd = 'rtn'}\n", "unknown key 'methd'", "method"),
        (HEAD + VARIANT + "[calibration]\nsample = 1\n", "unknown key 'sample'", "samples"),
        (VARIANT, "'model' is missing", "model ="),
        (HEAD, "no variants", "gguf-ladder"),
        (HEAD + 'sets = ["mxl"]\n', "no set 'mxl'", "mlx"),
        (HEAD + "sets = [[1]]\n", "str is expected", "e.g."),
        (HEAD + "variant = 3\n", "tables are expected", "variant"),
        (HEAD + VARIANT + VARIANT, "several variants are called a", "own name"),
        (HEAD + VARIANT + VARIANT.replace('"a"', '"A"'), "several variants are called a", "own name"),
        (HEAD + VARIANT.replace('name = "a"', ""), "a variant without a name", "demo-Q4_K_M"),
        (HEAD + VARIANT.replace('"a"', '"../a"'), "no name of a file", "letters"),
        (HEAD + VARIANT.replace('"a"', '"a.gguf"'), "no name of a file", "no .gguf"),
        (HEAD + VARIANT + "[gates]\nmax_kl = 1\n", "max_kl: no text is scored", "builtin"),
        (HEAD + VARIANT + "gates = {max_ppl_increase = 0.1}\n", "no text is scored", "builtin"),
        (HEAD + VARIANT + "[gates]\nmax_kl = -1\n" + EVALUATION, "no limit", "from 0"),
        (HEAD + VARIANT + "[gates]\nmax_ppl_increase = 2\n" + EVALUATION, "2% or 200%?", "0.02 is 2%"),
        (HEAD + VARIANT + "gates = {max_ppl_increase = 1}\n" + EVALUATION, "1% or 100%?", "0.01 is 1%"),
        (HEAD + VARIANT + "[gates]\nmax_kl = nan\n" + EVALUATION, "no limit", "from 0"),
        (HEAD + VARIANT + EVALUATION + 'reports = ["htm"]\n', "unknown kind 'htm'", "html"),
        (HEAD + VARIANT + "recipe = 3\n", "a name, a file or a table", ""),
        (HEAD + VARIANT + "gates = 3\n", "a table is expected", "gates"),
        (HEAD + VARIANT.replace('"a"', '"a.gguf.b"'), "no name of a file", "no .gguf"),
        (HEAD + VARIANT + "target = '4bpw'\n", "unknown key 'target'", "allocate MODEL --target"),
        (HEAD + VARIANT + "recipe = {like = 'x.gguf'}\n", "unknown key 'like'", "allocate MODEL --like"),
        (HEAD + VARIANT + "tune = 1\n", "unknown key 'tune'", "recipe = {tune = ...}"),
        (HEAD + VARIANT + "recipe = {tune = -1}\n", "f: variant a: recipe: tune = -1", "from 0"),
        (HEAD + VARIANT + '[card]\nrepository = "--help"\n', "no name of the hub", "ORG/NAME"),
        (HEAD + VARIANT + '[card]\nrepository = "a\\nb/c"\n', "no name of the hub", "ORG/NAME"),
        (HEAD + VARIANT + '[card]\nbase_model = "plain"\n', "no name of the hub", "ORG/NAME"),
    ],
)  # fmt: skip
def test_invalid_release_files_are_refused_with_a_hint(text, message, hint):
    with pytest.raises(InputError) as refused:
        parse_release(text, "f")
    assert message in refused.value.message
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    "choice",
    [
        'effort = "hihg"',
        'scales = "foo"',
        'engine = "x"',
        "bits = 99",
        "recipe = {gptq = {damping = 2.0}}",
    ],
)
def test_bad_variant_options_name_file_and_variant(choice):
    with pytest.raises(QuantForgeError, match=r"^f: variant a: ") as refused:
        parse_release(f'{HEAD}[[variant]]\nname = "a"\n{choice}\n', "f")
    assert refused.value.message.count("recipe: ") <= 1
