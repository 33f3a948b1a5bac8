"""Decisions, from headers alone: which layer gets what, by which rule, in which file. No torch."""
