"""Verdict: Pareto front, winners and sentences follow from the rows and respect the measurement errors."""

import pytest

from quantforge.artifacts.number_text import significant, size, value_and_error
from quantforge.evaluation.text_tables import speed_columns
from quantforge.evaluation.verdict import format_speed, judge, pareto_front


def row(name, nbytes=4_000_000, kl=None, pace=None, **changes):
    return {
        "path": f"somewhere/{name}", "format": "plain" if kl is None else "gguf", "weight_bytes": nbytes, "kl_mean": kl,
        "kl_se": None if kl is None else kl / 20, "decode_tokens_per_second": pace, **changes,
    }  # fmt: skip


REFERENCE = row("wren", 8_000_000, pace=1000.0)


def test_the_pareto_front_holds_undominated_models():
    rows = [
        REFERENCE,
        row("large", 6_000_000, 0.001),
        row("wasteful", 6_500_000, 0.002),  # larger than one that is closer
        row("small", 3_000_000, 0.1),
        row("rtn", 4_000_000, 0.0183),
        row("gptq", 4_010_000, 0.0063),  # the same bytes but for a header
        row("twin", 4_010_000, 0.0063),
    ]
    assert [rows[index]["path"][10:] for index in pareto_front(rows)] == [
        "small", "gptq", "twin", "large",
    ]  # fmt: skip


def test_a_verdict_names_the_rival_of_equal_size():
    sentences = judge([REFERENCE, row("rtn", kl=0.0183), row("gptq", kl=0.0063)]).sentences
    assert sentences[0] == "gptq: KL 0.00630, 2.90 times less than rtn in the same bytes"


def test_a_verdict_states_fewer_bytes_and_skips_larger_rivals():
    rows = [REFERENCE, row("gptq", 4_000_000, 0.0063), row("rtn", 4_400_000, 0.0183)]
    assert judge(rows).sentences[0].endswith("2.90 times less than rtn in 9% fewer bytes")
    rows[2] = row("rtn", 5_500_000, 0.0183)
    assert not any("times less" in text for text in judge(rows).sentences)


def test_a_lossless_model_is_credited_with_its_saved_bytes():
    rows = [REFERENCE, row("exact", 4_000_000, 0.0), row("rtn", 4_400_000, 0.0183)]
    sentence = "exact: KL 0 in 9% fewer bytes than rtn, which has KL 0.0183"
    assert judge(rows).sentences[0] == sentence
    rows[2] = row("rtn", 4_000_000, 0.0183)
    assert judge(rows).sentences[0] == "exact: KL 0 in the same bytes as rtn, which has KL 0.0183"


def test_differences_within_the_error_are_not_claimed():
    rows = [REFERENCE, row("rtn", kl=0.0064, kl_se=0.001), row("gptq", kl=0.0063, kl_se=0.001)]
    assert (
        judge(rows).sentences[0]
        == "gptq: KL 0.00630, not told apart from rtn (0.00640) in the same bytes"
    )


def test_winners_by_size_quality_and_speed():
    rows = [REFERENCE, row("q8", 6_000_000, 0.0001, 700.0), row("q4", 2_000_000, 0.0063, 3000.0)]
    assert [(item.aspect, item.row, item.model, item.figure) for item in judge(rows).winners] == [
        ("size", 2, "q4", "weights 2.00 MB, 4.00 times smaller than wren"),
        ("quality", 1, "q8", "KL 0.000100, weights 6.00 MB"),
        ("speed", 2, "q4", "3000 tokens/s, 3.00 times faster than wren"),
    ]
    slower = judge([REFERENCE, row("q8", 6_000_000, 0.0001, 500.0)]).winners[-1]
    assert slower.figure == "500 tokens/s, 2.00 times slower than wren"


@pytest.mark.parametrize(
    "rows",
    [
        [REFERENCE],
        [row("wren")],
        [REFERENCE, row("itself", 8_000_000, 0.0, kl_se=None)],
        [REFERENCE, row("itself", 8_000_000, 0.0), row("rtn", 8_000_000, 0.01)],
        [row("empty", 0, pace=0.0), row("rtn", 0, 0.1, 0.0)],
    ],
)
def test_nothing_to_compare_is_no_error(rows):
    verdict = judge(rows)
    assert len(verdict.winners) == (2 if len(rows) > 1 else 0)
    assert not any("nan" in text or "inf" in text for text in verdict.sentences)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (1, "1.00"), (9.999, "10.0"), (0.00547021, "0.00547"), (1894.1, "1890"), (999.6, "1000"),
        (1.0164e-6, "1.02e-06"), (-0.2190, "-0.219"), (1e6, "1000000"),
    ],
)  # fmt: skip
def test_figures_have_three_significant_digits(value, text):
    assert significant(value) == text


def test_errors_and_sizes_are_formatted():
    assert value_and_error(227.677, 30.08) == "228 ± 30"
    assert value_and_error(0.00547021, 0.000614) == "0.00547 ± 0.00061"
    assert value_and_error(1.5, None) == "1.50"
    assert value_and_error(0.00592, 3.2e-6) == "0.00592 ± 3e-06"
    assert value_and_error(0.00592, 4.4e-5) == "0.00592 ± 0.00004"
    assert value_and_error(227.677, 0.043) == "228 ± 0.04"
    assert value_and_error(2.5, 0.00096) == "2.50 ± 0.001"
    assert value_and_error(2.5, 0.0) == "2.50 ± 0.00"
    assert value_and_error(1.0164e-6, 3.2e-7) == "1.02e-06 ± 3e-07"
    assert [size(n) for n in (0, 999, 999_900, 3_724_224)] == ["0 B", "999 B", "1.00 MB", "3.72 MB"]


def test_speeds_within_the_spread_are_a_tie():
    rows = [
        row("wren", 8_000_000, pace=1000.0, tpot_spread=0.01),
        row("a", 4_000_000, 0.02, 3330.0, tpot_spread=0.01),
        row("b", 4_000_000, 0.01, 3280.0, tpot_spread=0.01),
        row("c", 4_000_000, 0.03, 2700.0, tpot_spread=0.01),
    ]
    sentence = judge(rows).sentences[-1]
    assert sentence == "fastest: a (3330 tokens/s, 3.33 times faster than wren; not told apart: b)"
    rows[3]["tpot_spread"] = 0.3
    assert judge(rows).sentences[-1].endswith("; not told apart: b, c)")
    rows[0]["decode_tokens_per_second"] = 3300.0
    sentence = judge(rows).sentences[-1]
    assert sentence == "fastest: a (3330 tokens/s; not told apart: wren, b, c)"


def test_disturbed_speed_measurements_are_not_compared(monkeypatch):
    monkeypatch.setattr("quantforge.evaluation.verdict.FULL_SHARE", 0.9)
    rows = [
        row("wren", 8_000_000, pace=1000.0, processor_share=0.98),
        row("a", 4_000_000, 0.02, 3330.0, processor_share=0.31),
        row("b", 4_000_000, 0.01, 2000.0, processor_share=0.97),
    ]
    reason = "other programs were running, and the threads got 31% of the processor time that they asked for"
    assert judge(rows).sentences[-2:] == (
        "fastest: b (2000 tokens/s, 2.00 times faster than wren)", f"speeds of a are not compared: {reason}",
    )  # fmt: skip
    rows[0]["processor_share"] = 0.5
    assert judge(rows).sentences[-2] == "fastest: b (2000 tokens/s)"
    rows[2]["processor_share"] = 0.6
    verdict = judge(rows)
    assert [entry.aspect for entry in verdict.winners] == ["size", "quality"]
    assert verdict.sentences[-1] == f"speeds are not compared: {reason}"
    assert [format_speed(entry) for entry in rows] == ["~1000", "~3330", "~2000"]
    (tokens,) = [
        entry
        for entry in speed_columns([TIMED | entry for entry in rows], verdict)
        if entry.header == "tokens/s"
    ]
    assert tokens.best == frozenset()
    assert tokens.cells == ("~1000", "~3330", "~2000")


TIMED = dict.fromkeys((
    "decode_by_batch", "prefill_tokens_per_second", "ttft_seconds", "ttft_by_prompt", "peak_bytes",
    "read_bytes_per_token", "kv_bytes_per_token", "bandwidth_utilization", "decoder",
)) | {"kernels": {}}  # fmt: skip


def test_ties_in_size_and_divergence_name_both_models():
    rows = [REFERENCE, row("a", kl=0.0063, kl_se=0.001), row("b", kl=0.0064, kl_se=0.001)]
    assert judge(rows).sentences[1:] == (
        "smallest: a (weights 4.00 MB, 2.00 times smaller than wren; as small: b)",
        "closest: a (KL 0.00630, weights 4.00 MB; not told apart: b)",
    )


def test_a_smaller_or_faster_reference_is_mentioned():
    rows = [row("q4", 3_000_000, pace=1000.0), row("wren", 8_000_000, 0.01, 500.0)]
    assert judge(rows).sentences == (
        "smallest after the reference: wren (weights 8.00 MB, 2.67 times larger than q4)",
        "closest: wren (KL 0.0100, weights 8.00 MB)",
        "fastest after the reference: wren (500 tokens/s, 2.00 times slower than q4)",
    )
    rows = [row("q4", 8_001_000, pace=510.0), row("wren", 8_000_000, 0.01, 500.0)]
    assert not any("after the reference" in text for text in judge(rows).sentences)
    rows[0] = row("q4", 3_000_000)  # whose speed was not measured
    assert judge(rows).sentences[-1] == "fastest: wren (500 tokens/s)"
