"""A stream of requests, sent to a model here or to any OpenAI-compatible server, and what each had to wait for.

One token rate says little about serving. A person waits for the first token (TTFT), then for each further one (TPOT),
and a machine is paid for by the hour; how these trade off shows only while requests come at their own times and
compete. So a seeded stream of them is made once and sent the same way to whatever is measured.

In this folder:

    latency_figures     Waiting of requests: percentiles of latencies, throughput, goodput and cost
    on_engine           A stream of requests on an engine in this process, in real time
    on_server           A stream of requests to an OpenAI-compatible server, in real time
    stream_of_requests  A seeded stream of requests: when each comes, how long its prompt is, and how much it asks for
"""
