"""Serve a model through OpenAI's API over HTTP.

A request passes through `routes`: `request_bodies` validates it, `completions` converts it to engine requests,
`engine_thread` computes them together with those of other clients, and `completions` converts the tokens to text and
response documents.

In this folder:

    api_error       Errors of requests, as the error documents of OpenAI's API that its clients understand
    completions     Completions in progress: convert prompts to engine requests, generated tokens to text
    engine_thread   Run the serving engine on a thread of its own: commands arrive through a queue
    metrics         Metrics of the server in the text format of Prometheus (version 0.0.4)
    request_bodies  Request bodies of OpenAI's API: the accepted values of each field, and the fields that are refused
    routes          Served model and HTTP routes: what each path returns, as long as its client is connected
    serve_options   Options of the server: its address, how much it computes at a time, and what it accepts
    server          HTTP server that reports its address and stops gracefully on a signal
"""
