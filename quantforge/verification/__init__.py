"""Verification of a finished artifact, ours or anyone's, none of it trusted: files, structure, numbers, logits.

In this folder:

    alone          Checks of codes by themselves, without a source
    cache_scales   Check of the scales of an fp8 KV cache: positive numbers, and near the ranges that the source shows
    compare        Comparison of a decoded matrix ``Q`` with the matrix ``T`` that it stands for
    correctable    A quantized model beside its source, as far as an adapter of low rank can be made for it
    deviation      Distance of a decoded matrix ``Q`` from its target ``T``
    difference     Differences between two models, whatever formats they are in: what was done, tensors, values, files
    explain        Explanation of a matrix that is not what its name says: it is another one
    files          Check files without looking inside: digests against the manifest, the signature
    findings       What a verification reports: findings, each with a check, a place and a severity
    folded         Factors that were folded into a quantized weight
    forward        One forward pass of source and artifact: logits are finite, and near those of the source
    inputs         Inputs of the source's linears while it computes a text: a sample of them, and their range
    kept_tensors   Comparison of a tensor that is stored as it is with the source's: equal but for its type
    limits         Limits on what an artifact may lose, in units of plain rounding: one row for each width of codes
    numbers        Every tensor of an artifact: readable, finite
    opening        Open an artifact and the source it was made from, so that they can be compared tensor by tensor
    own_groups     Groups that a matrix was rounded in, where its format repeats their scales for shorter ones
    predicted      The source with noise: every quantized weight is off by as much as in the artifact
    ranges         Ranges that calibration measured: of static inputs, and of keys and values in the cache
    side_files     Files beside the weights, against the source: configuration, tokenizer, chat templates, generation
    stated_values  Comparison of a tensor that is stored as it is with what the manifest states of it: zeros, factors
    structure      Check the headers of the tensors, the configuration and the tokenizer against each other
    tuned_gains    Gains of norms that were tuned, against the source: each is the source's, within the bounds of tuning
    verify         Verify an artifact: files, structure, values, logits, in this order, as far as it can be read
    yardstick      Plain rounding as a yardstick: a matrix rounded to nearest on the grid of another
    zeros          Weights that a sparsifier has made zero, against the source: the pattern holds
    beside/        Files beside the weights, against the source and against each other
"""
