"""GGUF files: read without trust (`reader`), as the configuration and tensors of a checkpoint (`checkpoint`), and as
the files of its tokenizer (`tokenizer`). Knows nothing of torch."""
