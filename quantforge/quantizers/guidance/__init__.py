"""Guidance: weight calibration tokens by the gradients of the loss at the outputs of linears.

In this folder:

    backward       Block-by-block backward pass: compute the gradients of the loss at the outputs of all linears
    gradients      Gradients at the outputs of linears, and of the experts of a block, one expert at a time
    token_weights  Token weights: how much an error at the output of a linear raises the loss
"""
