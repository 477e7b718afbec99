"""EDL in other libraries' trainers and loops. Each module is loaded only when a script imports it.

Scripts import the public names from `edl.collective.accelerate`, `.keras`, `.lightning`, `.transformers` and `.paddle`.
"""
