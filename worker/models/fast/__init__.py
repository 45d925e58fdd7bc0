"""The fast backend: llama-family models computed on the GGUF's own quantised blocks, by kernels compiled at start."""
