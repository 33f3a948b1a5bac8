"""The HTTP interface of a served model: documents of OpenAI's API in and out, over the serving engine.

In this folder:
"""
