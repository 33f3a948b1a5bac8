"""Serving: many requests on one model at a time, each with the tokens that it would have alone.

In this folder:

    counters             Counts of an engine since it was made, and how it stands
    engine               An engine: requests are submitted at any time
    engine_options       Options of an engine: its room, and the tokens of a step
    generation_requests  Requests to an engine, and what it reports: new tokens, log-probabilities of prompts
    scheduler            The scheduler: which tokens of which requests a step computes, and in which pages
    step_drafts          Speculation of an engine: drafted tokens after those of a step that only decodes
"""
