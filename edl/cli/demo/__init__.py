"""`edl demo`: teachers that come and go, and students that never notice, on scikit-learn's handwritten digits.

- `story` runs it all; `plan` says how much of everything, `data` and `models` make images, teacher and students;
- `fleet` starts the teachers, which are ordinary `edl serve` processes, and lets none of them outlive the demo;
- `epoch` trains the students from a `DistillReader` while `timeline` watches, and `check` looks at every label again;
- `page` shows it in a browser, if asked to; `screen`, `picture` and `report` show what happens, and what happened.

What does not belong here: anything that EDL itself would need. It is a user's program: it uses public
names, and `page` the advisor's classes as docs/scaling.md shows them.
"""
