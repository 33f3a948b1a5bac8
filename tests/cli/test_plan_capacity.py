"""What `plan` says of a result in use: quantities as people type them, the table at 80 columns, the document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from quantforge.errors import UsageError
from quantforge.planning import typed_quantities
from tests import headers
from tests.runs import quantize, recipe, run_command
from tests.unit.planning.test_capacity import LLAMA_3_8B


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return headers.llama(tmp_path_factory.mktemp("llama") / "m", **LLAMA_3_8B)


def lines(told: str) -> list[str]:
    """The lines about use, behind the table of engines."""
    return told[told.index("\nmemory") :].splitlines()


def test_quantities_are_what_people_expect():
    assert [typed_quantities.tokens(text, "") for text in ("8192", "32k", "1M", "1.5K")] == [
        8192,
        32768,
        1 << 20,
        1536,
    ]
    assert [typed_quantities.memory(text, "") for text in ("24GB", "24 GiB", "512MB")] == [
        24e9,
        24 * 2**30,
        512e6,
    ]
    assert typed_quantities.bandwidth("3.35TB/s", "") == 3.35e12
    assert typed_quantities.compute("989TFLOPS", "") == 989e12
    assert typed_quantities.price("2.5/h", "") == 2.5


NOT_UNDERSTOOD = [
    (typed_quantities.tokens, "32kB"), (typed_quantities.tokens, "-1"), (typed_quantities.tokens, "0"),
    (typed_quantities.tokens, "1.0001k"),
    (typed_quantities.tokens, "1e3"), (typed_quantities.memory, "24"),
    (typed_quantities.memory, "24gb"), (typed_quantities.memory, "24Gb"),
    (typed_quantities.memory, "0GB"), (typed_quantities.memory, "nanGB"), (typed_quantities.bandwidth, "3.35TB"),
    (typed_quantities.compute, "989"), (typed_quantities.price, "2.5"), (typed_quantities.price, "$2.5/h"),
    (typed_quantities.price, "2.5/month"), (typed_quantities.memory, "9" * 15 + "TB"),
]  # fmt: skip


def test_other_texts_are_refused_with_an_example():
    for parse, text in NOT_UNDERSTOOD:
        with pytest.raises(UsageError, match=f"--option {text.replace('$', '.')}") as refused:
            parse(text, "--option")
        assert any(character.isdigit() for character in refused.value.hint), text


def test_the_table_says_what_fits_where_within_80_columns(llama, capsys):
    told = run_command(
        capsys, "plan", llama, "--method", "rtn", "--bits", "4", "--context", "8k", "--batch", "16"
    )
    assert told.code == 0, told.err
    found = lines(told.out)
    assert max(map(len, found)) <= 80
    text = "\n".join(found)
    assert "memory, 16 sequences of 8,192 tokens, cache in 16bit" in text
    assert re.search(r"^  cache +17\.2 GB  131,072 bytes a token$", text, re.M)
    fits = dict(re.findall(r"^(\S+) +[\d.]+ GB +(yes|no) ", text, re.M))
    assert (fits["l4"], fits["rtx-5090"], fits["h200"]) == ("no", "yes", "yes")


def test_a_price_is_of_a_device(llama, capsys):
    plan = ("plan", llama, "--method", "rtn", "--bits", "4", "--price", "2/h")
    refused = run_command(capsys, *plan)
    assert refused.code == 2
    assert "of which device" in refused.err
    assert run_command(capsys, *plan, "--memory", "24GB").code == 2
    told = run_command(capsys, *plan, "--device-name", "h100-sxm", "--batch", "128")
    assert max(map(len, lines(told.out))) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "32q"), "--context 32q"), (("--device-name", "h1000"), "h100"),
        (("--cache", "fp16"), "--cache fp16"),
        (("--memory", "24"), "24GB"), (("--context", "9k"), "8192 positions"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_type(llama, capsys, options, message):
    refused = run_command(capsys, "plan", llama, "--format", "plain", *options)
    assert refused.code == 2
    assert message in refused.err


def test_the_document_has_the_figures_of_the_table(llama, capsys):
    asked = ("--format", "plain", "--context", "8k", "--batch", "4", "--cache", "int8")
    given = ("--memory", "24GiB", "--bandwidth", "1TB/s", "--price", "1/h")
    found = json.loads(run_command(capsys, "plan", llama, *asked, *given, "--json").out)["capacity"]
    assert found["cache_token_bytes"] == 2 * 32 * 8 * (128 + 4)
    assert (
        found["cache_bytes"]
        == 4 * found["cache_sequence_bytes"]
        == 4 * 8192 * found["cache_token_bytes"]
    )
    parts = found["weights_bytes"] + found["cache_bytes"] + found["activation_bytes"]
    assert abs(found["needed_bytes"] - parts) <= 2
    (card,) = found["cards"]
    assert (card["name"], card["memory_bytes"], card["compute"]) == ("given", 24 * 2**30, None)
    assert card["seconds_per_token"] == pytest.approx(found["step_bytes"] / 1e12)
    rate = card["tokens_per_second"]
    assert rate == pytest.approx(4 / card["seconds_per_token"])
    assert card["cost_per_million"] == pytest.approx(1e6 / 3600 / rate)
    assert "capacity" not in json.loads(
        run_command(capsys, "plan", llama, "--format", "plain", "--json").out
    )


def test_an_artifact_is_looked_at_as_it_is(tiny, tmp_path, capsys):
    out = quantize(tiny("llama-wide"), tmp_path / "a", recipe(bits=4)).out
    told = run_command(capsys, "plan", out, "--context", "64", "--json")
    assert told.code == 0, told.err
    document = json.loads(told.out)
    stored = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert document["method"] == "export from compressed-tensors"
    assert 0.8 < document["capacity"]["weights_bytes"] / stored <= 1
    refused = run_command(capsys, "plan", out)
    assert refused.code == 3
    assert "--context N looks at it as it is" in " ".join(refused.err.split())
    assert "already quantized" in refused.err
