"""Run the source model one block at a time: record activation statistics, apply transforms, advance the rows.

In this folder:

    accumulator           Accumulate statistics of one activation over micro-batches
    block                 One decoder block with its weights, and the calibration rows that pass through it
    block_calls           Calls of decoder blocks: their arguments and outputs
    block_inputs          Compute the arguments of each decoder block, given the hidden states after the previous block
    decoder_calls         Capture the arguments of the text decoder for calibration rows with images
    expert_calls          Interpret the two ways in which a block calls its module of experts
    expert_statistics     Compute activation statistics for each expert, mixed with a prior from all tokens of the layer
    experts               The experts of one block: load them one at a time
    hidden_states         Store hidden states between two blocks, and other block outputs, for all calibration rows
    model_class           Choose the transformers class for a configuration: the text decoder
    model_parts           Find the parts of a transformers model: the base model, the output layer
    scale_folding         Fold per-channel scales of an activation into the linears that read it and into its producer
    skeleton              Build a transformers model without weights: parameters on the meta device, buffers real
    statistics            Statistics of activations that a quantization method can request, and their observed values
    stream                Run a model one decoder block at a time with calibration rows
    transformers_layout   Present a checkpoint in the tensor layout in which transformers runs it
    transformers_loading  Check whether transformers finds every parameter of a model in its files
    weight_loading        Load the weights of skeleton modules from a checkpoint in float32, and free them again
    weight_mapping        Map the tensors of a checkpoint to the parameters of the running model
    derive/               Derived declarations: declare a family that has no file here by running its blocks
"""
