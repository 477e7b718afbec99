"""Helps you test programs that use EDL: real teachers on this machine, well-behaved or faulty.

`LocalTeacher` is a real `edl serve` process that you can kill, pause and drain. `edl.testing.models` contains models
for `LocalTeacher`. These models need no training, take a configurable time, show which row an answer belongs to, and
can misbehave.
"""

from __future__ import annotations

from edl.testing.teacher import LocalTeacher

__all__ = ["LocalTeacher"]
