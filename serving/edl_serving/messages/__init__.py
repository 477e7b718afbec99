"""KServe v2's inference messages: requests decoded and checked against the model, responses encoded.

What does not belong here: calls, clients and queues. Functions here take a message and the model.
"""
