"""Fuzzing: `targets` lists every parser, `mutate` damages its corpus, `scripts/fuzz.py` runs for hours."""
