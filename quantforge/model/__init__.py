"""The source model, one block at a time: what transformers computes, observed and rewritten.

In this folder:

    accumulator           Statistics of an activation
    block                 One decoder block with weights, and the calibration rows that pass it: observed, captured
    decoder_calls         Arguments of a text tower for rows with images: the whole model makes them
    derive                Derive the declarations of a model whose family has no file here
    derive_kind           Derive the declaration of one kind of layer from one block: tensors, shared inputs
    expert_calls          How a block calls its experts: with the routing of its tokens
    expert_statistics     Statistics of what single experts read: of their own tokens
    experts               The experts of one block: their weights come and go one expert at a time
    fold                  Fold a factor for each channel out of the linears that read an activation into what produces i
    hidden_states         What lies between two blocks for all calibration rows: hidden states
    loading               Weights that come and go: modules of a skeleton filled from a checkpoint, in float32
    model_class           Class of transformers that a configuration names: a decoder of text
    model_parts           Find the parts of a model of transformers: what makes final hidden states, the output layer
    passage               Passage of rows into a block: what reaches it
    running_form          A checkpoint in the form in which transformers runs it
    skeleton              A model without weights: stock transformers modules whose parameters take no memory
    statistics            Statistics of what shared inputs read: which a method may ask for, and what was observed
    stream                The model, one block at a time: stock transformers code around weights that come and go
    transformers_loading  Whether transformers finds every parameter of a model in its files: its own loader
    trial_block           Run a block of a skeleton with random weights
    weight_mapping        Map the tensors of a checkpoint to the parameters of the running model
"""
