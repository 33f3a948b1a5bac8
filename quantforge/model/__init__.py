"""The source model, one block at a time: what transformers computes, observed and rewritten.

In this folder:

    absorbers             Find which tensor can absorb a per-channel scale of an activation, and prove it by trial
    around_blocks         A model with weights around stand-ins for its blocks: it embeds rows, hands them to blocks
    block                 One decoder block with weights and the activations that reach it: observed, captured, advanced
    block_rows            One decoder block that rows pass: as a micro-batch is run, row by row
    block_weights         The weights of one decoder block: its matrices by name, in one orientation
    conversion            Conversion of stored tensors into parameters
    converted_tensors     Declare tensors as files hold them
    declared_names        Names of a declared family: its declarations are the bridge
    decoder_calls         Arguments of a text tower for rows with images: the whole model makes them
    derive                Derive the declarations of a family that has no file here
    derive_checkpoint     Derive the declarations of one checkpoint: from its configuration
    derive_experts        Derive which parameters stack the matrices of experts, and in which orientation and order
    derive_kind           Derive the declaration of one kind of layer from one block: tensors, shared inputs
    embedding_rows        Embeddings of which only the rows of tokens that occur are held
    expert_calls          How a block calls its experts: with the routing of its tokens
    expert_routing        The experts of one block stood in for while rows pass: what reaches them is kept
    expert_statistics     Statistics of what single experts read: of their own tokens
    expert_weights        The weights of the experts of one block, read from the checkpoint one expert at a time
    experts               The experts of one block: their weights come and go one expert at a time
    fold                  Fold a factor for each channel out of the linears that read an activation into what produces i
    hidden_states         Store for the hidden states of all calibration rows between two blocks: in memory
    inner                 The part of a model that makes final hidden states: all of it but the output layer
    kept_leaves           Tensors that single rows keep between blocks: in memory
    loading               Weights that come and go: modules of a skeleton filled from a checkpoint, in float32
    model_class           Class of transformers that a configuration names: a decoder of text
    names                 Names of tensors in files, and in the running model: one bridge, by transformers' own rules
    observe               Statistics of an activation
    outside               A model of transformers around its blocks: which modules these are
    passage               Passage of rows into a block: what reaches it
    routed_tokens         Input of the experts of one block, kept once for all calibration rows: hidden states
    running_form          A checkpoint in the form in which transformers runs it
    running_names         Names of a result's modules in the running model
    seen_inputs           Inputs of linears, seen while a block runs on several threads at once
    skeleton              A model without weights: stock transformers modules whose parameters take no memory
    stack_inputs          Inputs of the matrices of one expert, seen in the products themselves
    standins              Stand-ins for the blocks of a model: they note what each block gets
    state_layout          Layout of hidden states: which of their axes count rows and tokens
    statistics            Statistics of what shared inputs read: which a method may ask for, and what was observed
    stream                The model, one block at a time: stock transformers code around weights that come and go
    transformers_loading  Whether transformers finds every parameter of a model in its files: its own loader
    trial_block           Run a block of a skeleton with random weights in float64, observe its linears
    whole_checkpoint      Check that a checkpoint of a family without declarations is whole
"""
