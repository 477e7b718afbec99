"""Runs the requests of a service on the event loop, as `edl.distill.dispatch` decides."""
