"""A gateway to a language model that vLLM or SGLang already serves, through the engine's own HTTP protocol.

The gateway is a teacher server like any other (KServe v2, batching, draining, metrics, discovery). Its backend asks the
engine for the log-probabilities of prompts. It should run next to the engine: the bulky JSON stays local, and students
get arrays.

Serving is in `edl_serving.server`; engines are neither started nor stopped here. Importing this package does not import
an HTTP library.
"""
