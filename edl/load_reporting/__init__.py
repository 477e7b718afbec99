"""Records of load: what students ask of teachers and how long they wait, what teachers compute, through the Store.

What does not belong here: what follows from these figures (`edl.master.scaling`).
"""

__all__: list[str] = []
