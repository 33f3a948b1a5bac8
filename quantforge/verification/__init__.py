"""Verify finished artifacts of any origin without trusting them: files, structure, tensors, logits.

In this folder:

    consistency    Check the files of one model against each other and against its tensors, without a source
    difference     Compare two models of any formats: how they were made, their tensors, values and side files
    files          Check files as a whole: digests against the manifest, the signature, and the recorded source
    findings       Results of a verification: findings (check, place, severity), and which checks were skipped
    folded_scales  Find per-channel scales that were moved between tensors before rounding: ``W_q ~ diag(r) W diag(c)``
    forward        Run a forward pass over a few hundred tokens in up to four models at once, block by block
    gguf_keys      Compare the metadata keys of a GGUF file with those derived from the source, in both directions
    json_diff      Compare two JSON trees value by value, and format the differences for people
    opening        Open an artifact and the source it was made from, so that they can be compared tensor by tensor
    rounding       Measure the error of a quantized matrix, relative to the error of rounding the same matrix to nearest
    side_files     Compare configuration, tokenizer, chat templates and generation settings with the source's
    structure      Check tensor headers, configuration and tokenizer against each other; of values
    tensors        Check every tensor of an artifact: readable, finite, and equal to the source's up to rounding
    verify         Verify an artifact: files, structure, tensors and logits, in this order, as far as it can be read
"""
