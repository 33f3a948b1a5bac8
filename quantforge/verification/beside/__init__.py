"""What lies beside the weights, against the source and against itself.

`trees` finds where two JSON documents differ, `reasons` is the one table of what may differ and why, `facts` holds what
was read; `configuration`, `generation`, `tokenizer`, `templates`, `foreign` and `gguf_keys` each look at one concept.
"""
