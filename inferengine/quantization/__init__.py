"""Weights in 8 and 4 bits: how they are made (`schemes`), how checkpoints store them (`checkpoints`), how they multiply
(`cpu`, `cuda`), and how a model comes to use them (`apply`). A new scheme or layout is a file and a line in a table."""
