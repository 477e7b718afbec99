"""Serves language models and encoders of Hugging Face's transformers from a folder with safetensors files.

`loading` checks the folder and loads the model, `probes` tests how its architecture behaves, and `backends` serves it.

There are no downloads, no tokenization and no generation here, since students send token ids. Code that comes with a
checkpoint is never run; a model must be one that the installed transformers implements.
"""
