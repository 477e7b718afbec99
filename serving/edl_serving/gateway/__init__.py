"""A gateway to a language model that vLLM or SGLang already serves, through the engine's own HTTP protocol.

The gateway is a teacher server whose backend asks the engine for the log-probabilities of prompts. Run it next to the
engine: the bulky JSON stays local, and students get arrays.
"""
