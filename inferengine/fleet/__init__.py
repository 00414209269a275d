"""Fleets: engines on many machines. Ray places and restarts them; a directory actor counts and replaces them.

- `spec`: the wanted state of a fleet. `ledger`: its observed state, and the next actions. `scaling`: how many engines.
  These are plain objects that take the time as an argument, so tests need neither Ray nor waiting.
- `host`: runs one engine process on the machine where Ray placed it. The engine ends when the host's process ends.
- `actors`: host and ledger as Ray actors. The only file that imports Ray.
- `watcher`: writes the engines' addresses to a file that front ends read.

Tokens never travel through Ray: front ends speak to the engines over the ZeroMQ wire, with CURVE keys.
"""
