"""Benchmarks: what they replace in the program by its name is there."""

from __future__ import annotations

from benchmarks import allocation, overhead


def test_what_is_timed_exists() -> None:
    with overhead.timed() as spent:
        assert not spent


def test_what_measures_errors_once_exists() -> None:
    assert callable(allocation.candidate_errors.candidate_errors)
