"""Decides which teacher gets a request, when a second teacher also gets it, and when to give it up. No I/O.

A `Dispatcher` turns events into `actions` within the limits of a `Policy`. This package uses no clocks, sockets,
threads or tensors: the time is passed as an argument.
"""
