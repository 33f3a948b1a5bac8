"""Size budgets: the knapsack against exhaustive search, and patterns that match exactly their linears."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge.errors import RefusedError
from quantforge.planning.allocation import (
    Option,
    build_rule_patterns,
    make_mixture,
    pareto_mixtures,
    solve_knapsack,
)


def groups_of(sizes):
    return st.lists(
        st.lists(st.tuples(sizes, st.floats(0, 10)), min_size=1, max_size=4).map(
            lambda pairs: [Option(f"s{i}", size, nats) for i, (size, nats) in enumerate(pairs)]
        ),
        min_size=1,
        max_size=4,
    )


def mixture_bytes(point):
    return sum(option.nbytes for option in point.chosen)


@settings(max_examples=200, deadline=None)
@given(groups_of(st.integers(1, 60)), st.floats(0, 1))
def test_knapsack_is_optimal_among_hull_options(groups, share):
    least = sum(min(item.nbytes for item in options) for options in groups)
    most = sum(max(item.nbytes for item in options) for options in groups)
    room = least + int(share * (most - least))
    mixture = solve_knapsack(groups, room)
    assert mixture_bytes(mixture) <= room
    assert all(item in options for item, options in zip(mixture.chosen, groups, strict=True))
    choices = [make_mixture(chosen) for chosen in itertools.product(*groups)]
    # Options that a mixture of two others beats are no candidates: only within the hull is it the best.
    hull = [item for item in choices if _all_on_hulls(item, groups) and mixture_bytes(item) <= room]
    assert mixture.nats == pytest.approx(min(item.nats for item in hull))


def _all_on_hulls(point, groups):
    return all(
        _is_on_hull(option, options) for option, options in zip(point.chosen, groups, strict=True)
    )


def _is_on_hull(option, options):
    """Return whether some price per byte makes the option the best of its group."""
    others = [other for other in options if other is not option]
    prices = [0.0, 1e9] + [
        (option.nats - other.nats) / (other.nbytes - option.nbytes) * factor
        for other in others
        if other.nbytes != option.nbytes
        for factor in (1 - 1e-9, 1.0, 1 + 1e-9)
    ]
    return any(
        all(
            option.nats + price * option.nbytes <= other.nats + price * other.nbytes + 1e-9
            for other in others
        )
        for price in prices
        if price >= 0
    )


def test_knapsack_fills_the_budget_with_large_sizes():
    sizes = (250_000_003, 312_500_001, 437_500_009, 500_000_011)
    groups = [
        [Option(f"s{size}", size + group, 1e3 / size / (group + 1)) for size in sizes]
        for group in range(64)
    ]
    room = 64 * 400_000_000
    mixture = solve_knapsack(groups, room)
    assert 0.995 * room <= mixture_bytes(mixture) <= room


def test_equal_losses_prefer_fewer_bytes():
    groups = [[Option("a", 10, 1.0), Option("b", 20, 1.0)], [Option("c", 10, 0.5)]]
    assert mixture_bytes(solve_knapsack(groups, 100)) == 20


def test_a_budget_below_the_smallest_mixture_is_refused():
    with pytest.raises(RefusedError, match="smallest"):
        solve_knapsack([[Option("a", 10, 1.0)]], 9)


def test_the_pareto_curve_is_monotonic():
    groups = [
        [Option("a", 10, 9.0 / n), Option("b", 20, 3.0 / n), Option("c", 40, 1.0 / n)]
        for n in (1, 2, 3)
    ]
    points = pareto_mixtures(groups)
    assert mixture_bytes(points[0]) == 30
    assert mixture_bytes(points[-1]) == 120
    assert all(
        a.nats > b.nats and mixture_bytes(a) < mixture_bytes(b)
        for a, b in itertools.pairwise(points)
    )


def test_rule_patterns_match_exactly_their_linears():
    names = [f"model.layers.{n}.mlp.{leaf}_proj" for n in range(12) for leaf in ("up", "down")]
    schemes = {name: "q4_k" for name in names if name[13] in "13" and "up" in name}
    name_parts = {
        name: (r"model\.layers\.", name.split(".")[2], re.escape(name[name.index(".mlp") :]))
        for name in names
    }
    rules = build_rule_patterns(schemes, name_parts)
    assert len(rules) == 1
    pattern = rules[0][0].removeprefix("re:")
    assert {name for name in names if re.fullmatch(pattern, name)} == set(schemes)
