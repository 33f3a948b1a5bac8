"""Size targets of an allocation, as users type them."""

from __future__ import annotations

import pytest

from quantforge.errors import UsageError
from quantforge.planning.capacity import Load
from quantforge.planning.size_target import parse_target


@pytest.mark.parametrize(
    ("text", "bits", "nbytes"),
    [("4.5bpw", 4.5, 0), ("18GB", None, 18 * 10**9), ("17GiB", None, 17 << 30), (".5 mb", None, 500_000),
     ("1000B", None, 1000)],
)  # fmt: skip
def test_size_targets_are_parsed(text, bits, nbytes):
    target = parse_target(text)
    assert (target.bits, target.nbytes) == (bits, nbytes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4.5",
        "3.5",
        "bpw",
        "-3GB",
        "0bpw",
        "4,5bpw",
        "18 apples",
        "1e3GB",
        "5IB",
        "0GB@32k",
        "9" * 400 + "GB",
        "99999999TB",
    ],
)
def test_invalid_size_targets_are_refused(text):
    with pytest.raises(UsageError, match="no size") as refused:
        parse_target(text)
    assert ("4.5bpw" if text != "3.5" else "3.5bpw") in refused.value.hint


@pytest.mark.parametrize(
    ("text", "nbytes", "load"),
    [("24GB@32k", 24e9, Load(32768)), ("24GiB@8192", 24 * 2**30, Load(8192)), ("80gb@8x1k", 80e9, Load(1024, 8)),
     ("24GB@1M", 24e9, Load(1 << 20))],
)  # fmt: skip
def test_device_memory_targets_with_a_load_are_parsed(text, nbytes, load):
    target = parse_target(text)
    assert (target.nbytes, target.load) == (nbytes, load)
    assert parse_target(text, "fp8", 2).load == Load(load.context, load.batch, "fp8", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [("24GB@", "context"), ("24GB@0", "out of range"), ("24GB@32kB", "not understood"), ("24GB@-1", "not understood"),
     ("24GB@0x32k", "context 0x32k"), ("24GB@4x", "context 4x"), ("24GB@1.5x32k", "not understood"),
     ("3bpw@32k", "no context"),
     ("24GB@9999999999", "out of range")],
)  # fmt: skip
def test_invalid_device_memory_targets_are_refused(text, message):
    with pytest.raises(UsageError, match=f"--target {text}.*{message}") as refused:
        parse_target(text)
    assert refused.value.hint


def test_a_cache_option_needs_a_device_memory_target():
    with pytest.raises(UsageError, match="--cache fp8"):
        parse_target("18GB", "fp8")
