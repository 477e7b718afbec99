"""Cuts the user's data into requests, and checks that it does not change while its labels are on their way.

- `iterator` goes through a source so that no error passes for its end;
- `cutters` makes a `chunk` of rows from samples and batches, in a `row_buffer` where rows come singly, of `arrays`;
- `fingerprint` and `reuse` find items that change, by `checksum`; `sizes` counts bytes.

What does not belong here: threads, teachers and networks.
"""
