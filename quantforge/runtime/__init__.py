"""The runtime: models of any format that is read, which compute on packed weights, so that they can be measured.

In this folder:

    adapter_layers      Low-rank adapters (LoRA) on a model with packed weights, computed as in PEFT
    beam_search         Beam search: several continuations of one prompt are extended in parallel
    cache               The paged KV cache: fixed-size pages, a page table per sequence, a list of free pages
    cache_scales        Scales of fp8 KV caches: measured during calibration
    decoder             A decoder for many model families in one file, computing on packed weights and a paged KV cache
    decoding            Decoding: prefill of the prompt, then one token per sequence and step
    generated_text      Result types of text generation: texts, tokens, log-probabilities and timings
    generation_options  Options of text generation: sampling, beam search, length limits and stop strings
    kernel_weight       A quantized weight as the kernels take it: codes, parameters and a description of the product
    linear              Linear layers that keep quantized weights packed in memory and multiply with a matching kernel
    load                Load a model of any supported format for inference, keeping quantized weights packed
    memory              Device memory: checks that a model and its KV cache fit before loading
    model_sizes         Size statistics of a model for reports: bits per weight, bytes, schemes
    packed_experts      Mixture-of-experts layers with packed weights
    ragged_attention    Attention of several new tokens per sequence over the paged KV cache, and ragged batches
    rotary              Rotary position embeddings: cosines and sines for token positions
    sampling            Sampling of tokens from logits: one sampler per request, applied to all rows of a batch together
    split_model         Split a model for tensor parallelism: which rows or columns of each parameter a process holds
    tensor_parallel     Tensor parallelism: each of several processes holds a part of every matrix of a block
    text_model          Text generation with a loaded model: takes a prompt or a conversation
    text_processing     Tokenizer, chat template and end tokens of a model in any format
    text_stream         Incremental detokenization of one completion: whole characters only, cut at stop strings
    batching/           Continuous batching: many requests run on one model at a time
    speculation/        Speculative decoding: tokens are drafted cheaply, and the model verifies all of them in one pass
"""
