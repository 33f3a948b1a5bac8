"""The source model, one block at a time: what transformers computes, observed and rewritten.

In this folder:

    backward          A backward pass, one block at a time: the gradient of the loss at the output of every linear
    block             One decoder block with weights and the activations that reach it: observed, captured, advanced
    block_samples     Samples of a block for methods that learn: what reaches it, what it is to return
    block_weights     The weights of one decoder block: its matrices by name, in one orientation
    drawn_labels      Labels that a model draws for itself: one for each position, from what it predicts there
    fold              Fold a factor for each channel out of the linears that read an activation into what produces it
    hidden_states     Store for the hidden states of all calibration rows between two blocks: in memory
    lean_imports      transformers' modelling code without what a command never runs: half of the imports
    loading           Weights that come and go: modules of a skeleton filled from a checkpoint, in float32
    observe           Statistics of an activation, summed over micro-batches of fixed size and divided once at the end
    output_gradients  Gradients at the output of linears, and their squares by token and strip of rows
    seen_inputs       Inputs of linears, seen while a block runs on several threads at once
    skeleton          A model without weights: stock transformers modules whose parameters take no memory
    statistics        Statistics of what shared inputs read: which a method may ask for, and what was observed
    stream            The model, one block at a time: stock transformers code around weights that come and go
"""
