"""What users may use to test programs that use EDL: real teachers on this machine, well-behaved and otherwise.

`LocalTeacher` is a real `edl serve` process that can be killed, paused and drained; `edl.testing.models` are models for
it that need no training, take as long as told, tell which row an answer belongs to, and misbehave when asked.

What does not belong here: fakes of EDL's own parts.
"""

from __future__ import annotations

from edl.testing.teacher import LocalTeacher

__all__ = ["LocalTeacher"]
