"""Files beside the weights, against the source and against each other.

`trees` finds where two JSON documents differ, `reasons` is the one table of what may differ and why, `facts` holds what
was read; `model_configuration`, `generation`, `tokenizer_tree`, `templates`, `foreign` and `gguf_keys` each
look at one concept.

In this folder:

    allowed               Values that a key of a configuration may have: the rules that tables of known keys are made of
    conditions            Conditions that a changed value has to meet, of use to every table of `reasons`
    conditions_model      Conditions on keys of ``config.json`` and ``generation_config.json``
    conditions_tokenizer  Conditions on keys of ``tokenizer.json`` and ``tokenizer_config.json``
    config_groups         The config groups of compressed-tensors: every key is known
    defaults              Default values that a family's configuration class in transformers fills into a configuration
    facts                 Contents of the files beside the weights of a model, and the pair of models that is compared
    file_type             ``general.file_type`` of a GGUF file against the types of its tensors
    foreign               Files beside a model that some loader reads, or reads first, and that the source does not have
    generation            ``generation_config.json`` against the source's
    gguf_defaults         Defaults of llama.cpp where a GGUF file does not state a key
    gguf_keys             The keys of a GGUF file against those that follow from the source: what llama.cpp reads
    model_configuration   ``config.json`` against the source's: every key, both ways, by meaning
    processors            Settings of processors of images and sounds against the source's
    quantization          ``quantization_config``: every key is known, says nothing that the stored tensors do not do
    reasons               The one table of what may differ from the source beside the weights, why
    templates             Chat templates: every place that a loader takes one from, against the source's
    tokenizer_tree        The tokenizer against the source's: ``tokenizer.json`` as a tree
    tower_file            The file of a vision tower beside a GGUF file, against the source: keys and tensors
    trees                 Differences of two JSON documents, leaf by leaf and both ways
    within                Contradictions between configuration, settings and tokenizer of one model
"""
