"""How the embedded model is made: a deterministic text generator, a tokenizer, two trainings and an evaluation.

Read in this order: `example` (what a piece of text is, and the held-out split), the skills (`stories`, `dialogue`,
`memory`, `arithmetic`, `extraction`, `everyday`, `concepts`, `engine_help`, `passages`, `unknown`), `conversation` and
`plain_text` (which compose them), `corpus` (the mixture, in numbered chunks), then `vocabulary`, `network`,
`optimizer`, `training`, `evaluation`. Everything but the last five is the standard library alone: every sentence is
written here, none is taken from elsewhere.
"""
