"""Shapes and kinds that the compiled loops and their callers agree on."""

LANES = 64  # rows of a panel
THRESHOLDS = 15  # between the values of a table
EXTREME, AFFINE, MAGNITUDE, POWER = range(4)  # kinds of `cover`, and `cover_mxfp4`
