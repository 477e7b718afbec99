"""Whole stories on the cluster: jobs and pools as resources, and what happens to them.

`programs` has what their pods run, `scene` what all stories need.
"""
