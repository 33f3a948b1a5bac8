"""Derived declarations: declare a family that has no file here by running its blocks, as transformers builds them.

In this folder:

    derive       Derive the declarations of a model whose family is not declared, by running transformers' code for it
    layer_kinds  Derive the declaration of one kind of layer from one block: tensors, shared inputs, scale folds
    trial_block  Run a block with random weights, and prove by trial which tensor can take a scale of an activation
"""
