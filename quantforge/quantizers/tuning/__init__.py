"""Tuning: scales, gains of norms and codes of a rounded model, learned on what its source computes.

The first epoch goes block after block, further ones over the whole model.

In this folder:

    block    A block whose linears are codes under scales that are learned
    bounds   Bounds of tuning, which plans, forecasts and `verify` go by
    learned  What is learned: scales and gains, each times a factor, and codes, each with an offset that is rounded
    matrix   A linear whose scales are learned, and maybe its codes
    stream   Tuning of a rounded model on calibration rows: block after block, then as a whole
"""
