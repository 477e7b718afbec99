"""One job's brain: hands out its data shard by shard, and says how many teachers and workers the job needs, and why.

What does not belong here: training (`edl.collective`), soft labels (`edl.distill`), and the page that shows all of it
(`edl.dashboard`).
"""

__all__: list[str] = []
