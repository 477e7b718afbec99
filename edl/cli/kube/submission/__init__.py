"""From the options of `edl submit`, or a file, to the resources of a job, and into the cluster.

`options` are what the user said, `script` the file to send along, `manifests` makes resources of both (pure), and
`sending` writes them.
"""

__all__: list[str] = []
