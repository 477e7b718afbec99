"""Another name of `edl.collective.inprocess.run_in_process`, for scripts that import `Place` from here."""

from edl.collective.inprocess.run_in_process import Place, stay

__all__ = ["Place", "stay"]
