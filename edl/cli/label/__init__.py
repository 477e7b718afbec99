"""Parts of the command `edl label`: its `options`, its `output`, and a `job` that several processes share.

Labelling (`edl.distill.labelling`) and masters (`edl.master`) know nothing of each other; `job` joins them.
"""
