"""The workers of a node: started and stopped as a group, checked, and judged where they fail.

`worker_group` holds them through the generations, by their `status_pages`; `generation_outcome` keeps how they ended
and says what follows. What does not belong here: how a worker is forked (`processes`), and what a failure means
(`health`).
"""
