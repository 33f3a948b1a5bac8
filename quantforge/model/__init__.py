"""The source model, one block at a time: what transformers computes, observed and rewritten.

In this folder:

    accumulator           Statistics of an activation
    block                 One decoder block with weights, and the calibration rows that pass it: observed, captured
    block_inputs          Passage of rows into a block: what reaches it
    decoder_calls         Arguments of a text tower for rows with images: the whole model makes them
    expert_calls          How a block calls its experts: with the routing of its tokens
    expert_statistics     Statistics of what single experts read: of their own tokens
    experts               The experts of one block: their weights come and go one expert at a time
    hidden_states         What lies between two blocks for all calibration rows: hidden states
    model_class           Class of transformers that a configuration names: a decoder of text
    model_parts           Find the parts of a model of transformers: what makes final hidden states, the output layer
    scale_folding         Fold a factor for each channel out of the linears that read an activation into what produces i
    skeleton              A model without weights: stock transformers modules whose parameters take no memory
    statistics            Statistics of what shared inputs read: which a method may ask for, and what was observed
    stream                The model, one block at a time: stock transformers code around weights that come and go
    transformers_layout   A checkpoint in the form in which transformers runs it
    transformers_loading  Whether transformers finds every parameter of a model in its files: its own loader
    weight_loading        Weights that come and go: modules of a skeleton filled from a checkpoint, in float32
    weight_mapping        Map the tensors of a checkpoint to the parameters of the running model
    derive/               Derived declarations: declare a family that has no file here by running its blocks
"""
