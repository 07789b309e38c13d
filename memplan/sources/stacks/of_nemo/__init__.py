"""Parts of the reader of NeMo AutoModel's files: sizes and degrees, kernels, and what is tuned."""
