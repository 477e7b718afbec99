"""Load records in the Store: how much students request, how long they wait, and how much teachers compute.

A student or teacher gives a `LoadPublisher` a function that reads its counters. Every two seconds, the publisher's
thread writes a record with the current counters and those from about fifteen seconds earlier; both times are from the
publisher's own clock. So a single record is enough to compute rates, clocks on different machines are never compared,
and a restarted process gets a new record instead of a counter that falls. `read_service` turns all records of a service
into rates.

Publishing never disturbs the process: if the Store is unreachable, slow or full, the publisher only logs a line.
"""

from __future__ import annotations

from edl.load_reporting.publisher import LoadPublisher, LoadSource
from edl.load_reporting.records import ServiceLoad, StudentRate, TeacherRate, read_service, read_services
from edl.load_reporting.wanted import read_all_wanted, read_wanted

__all__ = [
    "LoadPublisher",
    "LoadSource",
    "ServiceLoad",
    "StudentRate",
    "TeacherRate",
    "read_all_wanted",
    "read_service",
    "read_services",
    "read_wanted",
]
