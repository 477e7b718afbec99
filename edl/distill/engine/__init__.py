"""Runs the requests of a service on the event loop: carries out what `edl.distill.dispatch` decides.

- `engine` owns the jobs of a service, and `job_queue` brings them from the feeding thread to the event loop;
- `connection_pool` keeps a `connection` to every teacher that discovery names (`edl.distill.teachers` follows it);
- `compatibility` refuses teachers and answers that differ from earlier teachers and answers; `counters` feeds
  `stats()`, `service_limits` is what other threads read;
- `event_loop` is the thread that all readers of a process share.

What does not belong here: the user's data, the order of delivery (`edl.distill.pipeline`), and bytes on the wire
(`edl.distill.transport`).
"""
