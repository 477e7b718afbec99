"""Cuts the user's data into requests, and checks that it does not change while its labels are on their way.

- `iterator` goes through a source so that no error passes for its end;
- `cutters` makes a `chunk` of rows from samples and batches, `sequence_cutters` from sequences, and `routes` chunks for
  several services where samples go to different ones;
- `fingerprint` tells whether an item has changed.

What does not belong here: threads, teachers and networks.
"""
