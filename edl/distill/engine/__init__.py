"""Runs the requests of a service on the event loop: carries out what `edl.distill.dispatch` decides.

- `engine` owns the jobs of a service; `jobs` brings them from the feeding thread to the event loop, counts them, and
  says when they have waited too long;
- `connection` keeps a connection to every teacher that discovery names (`edl.distill.teachers` follows it);
- `compatibility` refuses teachers and answers that differ from earlier teachers and answers;
- `event_loop` is the thread that all readers of a process share.

What does not belong here: the user's data, the order of delivery (`edl.distill.pipeline`), and bytes on the wire
(`edl.distill.transport`).
"""
