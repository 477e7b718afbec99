"""Language models and encoders of Hugging Face's transformers, from a folder with safetensors files.

`loading` checks the folder and loads the model, `probes` find out what an architecture does, `backends` serve it.

What does not belong here: downloads, tokenization, generation, code that comes with a checkpoint. Students send token
ids; nothing is run but what the installed transformers has.
"""
