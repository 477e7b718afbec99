"""Decides which teacher gets a request, when it is sent to a second teacher, and when it is given up. No I/O.

`dispatcher.Dispatcher` is the state machine: events in, `actions` out, within the limits of a `policy`. `teacher_state`
is what it knows of a teacher, `window` how many requests a teacher gets at a time, `outage` how long work waits without
a live teacher.

What does not belong here: clocks, sockets, threads and tensors. Time is an argument.
"""
