"""Guidance: the gradient of the loss at the output of every linear, and what it makes of calibration tokens.

In this folder:

    backward       A backward pass, one block at a time: the gradient of the loss at the output of every linear
    gradients      Gradients at the output of linears, and of the experts of a block, one expert at a time
    token_weights  Weights of calibration tokens: how much the loss minds an error at the output of a linear
"""
