"""A served model behind OpenAI's API over HTTP.

A request passes through `routes`: `request_bodies` checks it, `completions` makes requests to the engine of it,
`engine_thread` computes them together with those of others, and `completions` makes text and documents of the tokens.

In this folder:

    api_error       Refusals of a request, as the error documents of OpenAI's API that its clients read
    completions     Completions while they are computed: prompts become requests to the engine, its tokens text
    engine_thread   The engine on a thread of its own: commands go in through a queue
    metrics         Figures of a server in the text format of Prometheus (version 0.0.4)
    request_bodies  Bodies of requests as OpenAI's API has them: what each field may be, and which fields are refused
    routes          A served model and the routes of its HTTP interface: what each path answers
    serve_options   Options of a server: where it listens, how much it computes at a time, and what it accepts
    server          The server: it listens, says where, and stops cleanly when it is asked to
"""
