"""How the embedded model is made: a deterministic text generator, a tokenizer, two trainings and an evaluation.

Read in this order: `example` (what a piece of text is, and the held-out split), the skills (`knowledge` over the tables
in `facts`, `arithmetic`, `extraction`, `stories`, `memory`, `tasks`), `conversation` and `plain_text` (which compose
them), `corpus` (the mixture, in numbered chunks), then `vocabulary`, `packing`, `network`, `training`, `checkpoint`,
`evaluation` and `main`. Up to the corpus it is the standard library alone: every sentence is written here, none is
taken from elsewhere.
"""
