"""Planted defects: healthy artifacts, generators that damage copies of them, and a judge of what the damage does.

`artifacts` makes what is healthy, `others` what other tools write. `files` and `gguf_files` open copies down to single
fields; `numbers` damages tensors at random, `mistakes` as converters and people do, `beside` and `tokens` what lies
beside them, `headers` what describes them. `damage` says what differs from the original, and whether a finding names
it; `judge` decides whether a defect counts, without asking `verify`. `session` runs, `results` counts, `cost` measures
time and memory. The command is `scripts/verify_defects.py`.
"""
