"""Models in GGUF files: read, dequantised and given to `transformers`, the same on every version of it."""
