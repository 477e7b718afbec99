"""A gateway to a language model that an engine serves already: vLLM or SGLang, asked over their own HTTP protocols.

The gateway is a teacher server like any other (KServe v2, batches, drain, metrics, discovery), whose backend asks the
engine for the prompt's log-probabilities. It runs beside the engine: JSON is read here, and students get arrays.

What does not belong here: how a model is served (`edl_serving.server`), students, and starting or stopping engines.
Importing this package imports no HTTP library.
"""
