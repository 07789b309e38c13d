"""Decoders that are made for what their towers see: the texts of Gemma 4, Llama 3.2 Vision and Muse Glimmer."""
