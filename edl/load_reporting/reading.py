"""Reads what students and teachers published, and leaves out what cannot be believed."""

from __future__ import annotations

import logging
from collections import defaultdict

from edl.discovery import Store
from edl.load_reporting.rates import ServiceLoad, service_load
from edl.load_reporting.records import StudentRecord, TeacherRecord, parse_record, service_prefix, split_key
from edl.quoting import shown

__all__ = ["read_service", "read_services"]

logger = logging.getLogger(__name__)

_MOST_LOGGED = 1000
"""Unusable records that are remembered as logged: who writes more of them has them logged again."""
_logged: set[tuple[str, str]] = set()


def read_service(store: Store, service: str) -> ServiceLoad:
    """Read the load of a service.

    Args:
        store: where students and teachers publish.
        service: the service's name.

    Returns:
        Its load; empty if nothing is published. Records that cannot be used are left out, and logged once.

    Raises:
        DiscoveryError: the store cannot be reached.
        SettingsError: no service can have that name.
    """
    return _loads(store, service_prefix(service)).get(service, ServiceLoad(service))


def read_services(store: Store) -> dict[str, ServiceLoad]:
    """Read the load of all services.

    Args:
        store: where students and teachers publish.

    Returns:
        Loads by service, of services of which at least a record can be used.

    Raises:
        DiscoveryError: the store cannot be reached.
    """
    return _loads(store, service_prefix())


def _loads(store: Store, prefix: str) -> dict[str, ServiceLoad]:
    records: dict[str, list[StudentRecord | TeacherRecord]] = defaultdict(list)
    for entry in store.list(prefix):
        try:
            record = parse_record(entry.key, entry.value)
        except ValueError as exc:
            _log_once(entry.key, str(exc))
        else:
            records[split_key(entry.key)[0]].append(record)
    return {service: service_load(service, found) for service, found in sorted(records.items())}


def _log_once(key: str, reason: str) -> None:
    if (key, reason) in _logged:
        return
    if len(_logged) >= _MOST_LOGGED:
        _logged.clear()
    _logged.add((key, reason))
    logger.warning("load record %s is left out: %s", shown(key), reason)
