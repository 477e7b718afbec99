"""A gateway to a language model that vLLM or SGLang already serves, through the engine's own HTTP protocol.

The gateway is a teacher server like any other, whose backend asks the engine for the log-probabilities of prompts. It
should run next to the engine: the bulky JSON stays local, and students get arrays. Importing this package does not
import an HTTP library.
"""
