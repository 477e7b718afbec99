"""What the commands `edl serve` and `edl register` share: their options, the parser, and the report of a failed model.

The commands themselves are `edl_serving.cmd_serve` and `edl_serving.cmd_register`, named in the package's metadata.
What does not belong here: what a setting does. This package reads settings, checks them and hands objects over.
"""
