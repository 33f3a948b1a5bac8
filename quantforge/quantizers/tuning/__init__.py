"""Tuning: fine-tune scales, gains of norms and codes of a rounded model, to compute what its source computes.

The first epoch trains one block at a time, further epochs train the whole model.

In this folder:

    tuned_block    A block of a rounded model whose scales, gains of norms and maybe codes are learned
    tuned_experts  Experts of a block that is tuned: decoded when they are computed, and freed afterwards
    tuned_matrix   A linear whose scales are learned, each times a factor, and maybe its codes
    tuning_stream  Fine-tune a rounded model on calibration rows: one block at a time, then the whole model
"""

# Bounds, which plans, forecasts and `verify` use too.
ROWS = 4  # calibration rows of an optimizer step over the whole model
HELD = 8  # one row in so many is held out: it decides which epoch is kept
MOST = 0.5  # largest relative change of a scale or gain
MOST_STEPS = 1  # of its grid: largest change of a code, up or down
RATE = 0.035  # largest learning rate of the offsets of codes
REACH = 1.4  # steps of its grid that a code moves over all optimizer steps if all gradients agree


def whole_epochs(epochs: int) -> int:
    """Return how many of all epochs train the whole model; the first trains one block at a time."""
    return max(0, epochs - 1)


def rate_of(steps: int) -> float:
    """Return the initial learning rate of codes, which decays over ``steps`` optimizer steps."""
    return min(RATE, 2 * REACH / steps)
