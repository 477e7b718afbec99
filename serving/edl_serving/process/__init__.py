"""A teacher server as a process: run until a signal, end with a parent process, and write log lines to stderr.

What does not belong here: requests, models and discovery.
"""
