"""Serves language models and encoders from transformers, loaded from safetensors files; students send token ids."""
