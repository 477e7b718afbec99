"""A server's entry in discovery: made once it is ready, changed while it drains, taken back at the end.

`teacher` does so for a `TeacherServer`, `probe` decides it for a server of another make (`edl register`).
What does not belong here: the registry itself, which is `edl.discovery`.
"""
