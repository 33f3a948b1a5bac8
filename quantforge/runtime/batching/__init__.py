"""Continuous batching: many requests run on one model at a time, each with the same result as alone.

In this folder:

    engine               A continuous-batching engine: requests are submitted at any time
    generation_requests  Requests to a serving engine and the events it reports: new tokens, prompt log-probabilities
    scheduler            The scheduler of a serving engine: which tokens of which requests a step computes
"""
