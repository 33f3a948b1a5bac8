"""Verification of a finished artifact, ours or anyone's, none of it trusted: files, structure, tensors, logits.

In this folder:

    consistency    What the files of one model say against each other and against its tensors; no source is needed
    difference     Differences between two models, whatever formats they are in: what was done, tensors, values, files
    files          Check files without looking inside: digests against the manifest, the signature
    findings       What a verification reports: findings, each with a check, a place and a severity
    folded_scales  Factors that were moved between tensors before rounding: ``W_q ~ diag(r) W diag(c)``
    forward        One forward pass over a few hundred tokens, in up to four models at once, block by block
    gguf_keys      The keys of a GGUF file against those that follow from the source, in both directions
    json_diff      Two JSON trees, compared place by place: what differs, and how it is shown to people
    opening        Open an artifact and the source it was made from, so that they can be compared tensor by tensor
    rounding       How far a quantized matrix is from the source's
    side_files     Files beside the weights: configuration, tokenizer
    structure      Check the headers of the tensors, the configuration and the tokenizer against each other
    tensors        Every tensor of an artifact: readable, finite, and with a source at hand the source's
    verify         Verify an artifact: files, structure, tensors, logits, in this order, as far as it can be read
"""
