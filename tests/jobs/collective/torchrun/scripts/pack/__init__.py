"""A package that `-m` runs."""
