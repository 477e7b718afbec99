"""Serves language models and encoders of Hugging Face's transformers from a folder with safetensors files.

There are no downloads, no tokenization and no generation here, since students send token ids.
"""
