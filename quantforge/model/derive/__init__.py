"""Derived declarations: declare a family that has no file here by running its blocks, as transformers builds them.

In this folder:

    derive       Derive the declarations of a model whose family has no file here, by running transformers' code for it
    layer_kinds  Derive the declaration of one kind of layer from one block: tensors, shared inputs
    trial_block  Run a block of a skeleton with random weights
"""
