"""Decides which teacher gets a request, when it is sent to a second teacher, and when it is given up. No I/O.

`dispatcher.Dispatcher` is a state machine that turns events into `actions` within the limits of a `Policy`.
`teacher_state` holds its knowledge of each teacher, and decides how many requests the teacher gets at a time.

There are no clocks, sockets, threads or tensors here. Time is an argument.
"""
