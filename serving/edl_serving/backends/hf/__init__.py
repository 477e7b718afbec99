"""Language models and encoders of Hugging Face's transformers, from a folder with safetensors files.

`loading` checks the folder and loads the model, `probes` find out what an architecture does, `length_dependence` what
changes with the length of a call, `buckets` plans which sequences are computed together, `top_k` finds the largest
logits on the device. `language_model` and `encoder` are the backends, on what `transformers_backend` has for both.

What does not belong here: downloads, tokenization, generation, code that comes with a checkpoint. Students send token
ids; nothing is run but what the installed transformers has.
"""

from __future__ import annotations

__all__: list[str] = []
