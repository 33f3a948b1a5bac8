"""Tuning: fine-tune scales, norm gains and codes of a rounded model to match the outputs of its source.

The first epoch trains one block at a time, further epochs train the whole model.

In this folder:

    tuned_block    A rounded block whose scales, norm gains and optionally codes are tuned
    tuned_experts  Experts of a block during tuning: decoded when they run, and freed afterwards
    tuned_matrix   A linear during tuning: each of its scales has a learned factor
    tuning_stream  Tune a rounded model on calibration rows: first one block at a time, then the whole model
"""

# Constants also used by plans, forecasts and `verify`.
ROWS_PER_STEP = 4  # calibration rows of an optimizer step over the whole model
HOLDOUT_INTERVAL = 8  # one row in this many is held out to choose the best epoch
MAX_RELATIVE_CHANGE = 0.5  # largest relative change of a scale or gain
MAX_CODE_STEPS = 1  # largest change of a code, in grid steps
MAX_CODE_RATE = 0.035  # largest learning rate of the offsets of codes
CODE_REACH_STEPS = 1.4  # grid steps that a code moves in total if all gradients agree


def whole_model_epochs(epochs: int) -> int:
    """Return how many of the epochs train the whole model; the first one trains one block at a time."""
    return max(0, epochs - 1)


def code_learning_rate(steps: int) -> float:
    """Return the initial learning rate of codes, which decays over ``steps`` optimizer steps."""
    return min(MAX_CODE_RATE, 2 * CODE_REACH_STEPS / steps)
