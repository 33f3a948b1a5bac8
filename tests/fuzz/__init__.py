"""Fuzzing: `targets` names every parser, `mutate` damages its corpus, `scripts/fuzz.py` does it for long."""
