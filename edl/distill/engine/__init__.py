"""Runs the requests of a service on the event loop: carries out what `edl.distill.dispatch` decides.

- `engine` owns the jobs of a service; `job_queue` has what other threads need of it: jobs, the way from the feeding
  thread to the event loop, and the limits of the teachers;
- `connection_pool` keeps a `connection` to every teacher that discovery names (`edl.distill.teachers` follows it);
- `compatibility` refuses teachers and answers that differ from earlier teachers and answers; `counters` feeds
  `stats()`;
- `event_loop` is the thread that all readers of a process share.

What does not belong here: the user's data, the order of delivery (`edl.distill.pipeline`), and bytes on the wire
(`edl.distill.transport`).
"""
