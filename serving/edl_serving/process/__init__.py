"""A teacher server as a process: run until a signal, and end with a parent process.

What does not belong here: requests, models and discovery.
"""
