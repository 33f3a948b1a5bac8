"""A stream of requests, sent to a model here or to any OpenAI-compatible server, and what each had to wait for.

One token rate says little about serving. A person waits for the first token (TTFT), then for each further one (TPOT),
and a machine is paid for by the hour; how these trade off shows only while requests come at their own times and
compete. So a seeded stream of them is made once and sent the same way to whatever is measured.

In this folder:

    latency_figures     Compute percentiles of latencies, throughput, goodput and cost from the times of tokens
    on_engine           Serve a stream of requests with an engine in this process, in real time
    on_server           Send a stream of requests to an OpenAI-compatible server in real time
    stream_of_requests  Draw a seeded stream of requests: arrivals, lengths of prompts, and lengths of answers
"""
