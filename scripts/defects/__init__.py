"""Planted defects: healthy artifacts, a generator that damages copies of them, and a judge of what the damage does.

`artifacts` makes and gathers what is healthy, `files` opens copies down to single fields, `numbers` damages tensors,
`beside` what lies beside them, `headers` what describes them; `judge` decides whether a defect counts without asking
`verify`; `session` runs and tabulates. The command is `scripts/verify_defects.py`.
"""
