"""Evaluation: perplexity, divergence from a reference, speed and memory, and their reports."""
