"""Decides which teacher gets a request, when to send it to a second teacher, and when to give it up. No I/O.

`dispatcher.Dispatcher` is a state machine that turns events into `actions` within the limits of a `Policy`.
`teacher_state` holds its knowledge of each teacher, and decides how many requests the teacher gets at a time.

There are no clocks, sockets, threads or tensors here. Time is an argument.
"""
