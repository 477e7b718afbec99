"""An alias of `edl.collective.training`, for scripts that import its policies and schedules from here."""

from edl.collective.training import AdaScale, AutoBatch, Linear, SampleSchedule, SquareRoot

__all__ = ["AdaScale", "AutoBatch", "Linear", "SampleSchedule", "SquareRoot"]
