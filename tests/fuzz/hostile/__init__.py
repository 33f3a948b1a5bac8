"""Whole commands on hostile input: a tree of files, some of them damaged, and a verb that reads it.

| file | what it does |
|---|---|
| `roles.py` | states which files somebody else may have made, and the commands that read each of them |
| `tree.py` | builds the sound files that every case begins with |
| `sources.py` | builds those of them that are models in low precision, with experts, undeclared; and an adapter |
| `damage.py` | damages a file by its role: bytes, documents, tables, and what stands at its place |
| `cases.py` | draws a case (damages and a command) from a seed and a number |
| `judge.py` | runs a case in a fork under limits and says what must not happen |
"""
