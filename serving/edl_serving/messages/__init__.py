"""KServe v2's inference messages: requests decoded and checked against the model, responses encoded.

What does not belong here: calls, clients and queues. Everything here is a function of one message and the model.
"""
