"""Cuts the user's data into requests, and checks that it does not change while its labels are pending.

- `iterator` iterates over a source such that no error is mistaken for its end;
- `cutters` makes a `chunk` of rows from samples, sequences and batches, for each service that they go to;
- `fingerprint` detects whether an item has changed.

There are no threads, teachers or networks here.
"""
