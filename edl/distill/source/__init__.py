"""Cuts the user's data into requests, and checks that it does not change while its labels are pending.

- `iterator` iterates over a source so that no error is mistaken for its end;
- `cutters` makes a `chunk` of rows from samples, sequences and batches, for each target service;
- `fingerprint` detects whether an item has changed.

There are no threads, teachers or networks here.
"""
