"""Serves language models and encoders of transformers from safetensors files; students send token ids."""
