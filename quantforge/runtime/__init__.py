"""The runtime: models of any format that is read, which compute on packed weights, so that they can be measured.

In this folder:

    adapter_layers      A model with an adapter of low rank on its linears, whose weights stay packed
    beam_search         Beam search: several continuations of one prompt side by side
    cache               The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages
    cache_scales        Scales of an fp8 cache: measured while calibration runs
    decoder             One readable decoder for the families that have a record of their blocks
    decoding            Decoding: prefill, then one token per sequence and step
    generated_text      Generated texts: what `generate` returns, without torch
    generation_options  How text is generated: the rules by which tokens are chosen, how long a completion is
    linear              A linear layer whose weight stays packed in memory
    load                One loader for every format: a model that computes, with its quantized weights still packed
    memory              Memory of a device: room that is checked before anything is loaded
    model_sizes         Figures of a model for reports: bits per weight, bytes, schemes
    packed_experts      Experts of a mixture whose weights stay packed
    ragged_attention    Attention of several new tokens per sequence over the paged cache, and ragged batches of them
    rotary              Angles of rotary positions: frequencies as transformers derives them, times positions
    sampling            Choosing tokens from logits: every request has a sampler of its own
    tensor_parallel     Shares of a model: each of several processes holds a part of every matrix of a block
    text_model          A model that answers in text: a prompt or a conversation in, pieces of text out as they come
    text_processing     The text side of a model of any format: its tokenizer, its chat template
    text_stream         Text of one completion while its tokens come: whole characters, up to a stop string
    batching/           Serving: many requests on one model at a time, each with the tokens that it would have alone
    speculation/        Speculative decoding: tokens are drafted cheaply, and the model checks all of them in one pass
"""
