"""Guidance: gradients of the loss at the outputs of linears, which weight calibration tokens.

In this folder:

    backward       A backward pass, one block at a time: gradients of the loss at the outputs of all linears
    gradients      Gradients at the outputs of linears, and of the experts of a block, one expert at a time
    token_weights  Weights of calibration tokens: how much an error at the output of a linear raises the loss
"""
