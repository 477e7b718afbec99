"""Decides which teacher gets a request, when to send it to a second teacher, and when to give it up. No I/O.

A `Dispatcher` turns events into `actions` within the limits of a `Policy`. There are no clocks, sockets, threads or
tensors here: time is an argument.
"""
