"""GGUF files: a reader that does not trust them (`reader`), and their content in the form of a transformers checkpoint:
configuration and tensors (`checkpoint`), tokenizer files (`tokenizer`). Needs no torch."""
