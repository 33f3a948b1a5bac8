"""Serving: many requests on one model at a time, each with the tokens that it would have alone.

In this folder:

    engine               An engine: requests are submitted at any time
    generation_requests  Requests to an engine, and what it reports: new tokens, log-probabilities of prompts
    scheduler            The scheduler: which tokens of which requests a step computes, and in which pages
"""
