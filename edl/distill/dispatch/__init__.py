"""Decides which teacher gets a request, when it is sent to a second teacher, and when it is given up. No I/O.

`dispatcher.Dispatcher` is the state machine: events in, `actions` out, within the limits of a `Policy`. `teacher_state`
is what it knows of a teacher, and how many requests the teacher gets at a time.

What does not belong here: clocks, sockets, threads and tensors. Time is an argument.
"""
