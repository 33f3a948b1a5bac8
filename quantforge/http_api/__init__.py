"""The HTTP interface of a served model: documents of OpenAI's API in and out, over the serving engine.

In this folder:

    answer_endpoint     An endpoint that answers: from a body to a document, or to a stream of them
    answer_text         The text of one answer over its tokens: whole characters, up to a stop string
    api_error           Refusals of a request over HTTP, as the error documents that clients of OpenAI's API read
    application         The ASGI application: paths and what answers there; every refusal is an error document
    asked_answers       A request over HTTP as data: prompts, how tokens are chosen, how answers are told
    body_values         Checks of the values in a body: each takes the name of a field and its value
    chat_body           Bodies of ``/v1/chat/completions``: a conversation to answer
    client_link         The client of a request: work goes on while it is there, and while there is time
    completion_body     Bodies of ``/v1/completions``: texts or token ids to continue
    engine_thread       The engine on a thread of its own: commands go in by a queue
    event_stream        Server-sent events: documents one by one, until the last or until the client is gone
    json_body           The body of a request: bytes that are read up to a limit
    json_response       A JSON document as a response: in ASCII, so that no text in it depends on an encoding
    live_answers        Answers of one request over HTTP while they come: requests to the engine
    prompt_ids          Prompts as token ids: texts encoded, conversations rendered by the chat template in its sandbox
    request_fields      Fields of a body: those that are read, those that mean nothing here
    response_documents  Documents of answers: whole ones and chunks of a stream, of completions and of chats
    run_server          Running the server: it listens, tells where, and stops cleanly when it is asked to
    served_model        A model as it is served: its name, its text side, the engine that computes it
    server_limits       Limits of a server: what it accepts from a client, and how long it works for one
    serving_metrics     Figures of a server in the text format of Prometheus (version 0.0.4)
    token_texts         Texts of single tokens, as log-probabilities are told: what a token adds behind another
"""
