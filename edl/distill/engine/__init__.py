"""Runs the requests of a service on the event loop, as `edl.distill.dispatch` decides.

- `engine` takes jobs from the feeding thread, sends them, and detects when they have waited too long;
- `connection` keeps a connection to every teacher in discovery (which `edl.distill.teachers` watches);
- `compatibility` refuses teachers and answers that differ from earlier ones;
- `event_loop` is the thread that all readers of a process share.
"""
