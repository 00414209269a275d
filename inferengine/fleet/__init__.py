"""Fleets: engines on many machines, placed and restarted by Ray, counted and replaced by a directory.

- `spec`: what a fleet is to be; `ledger`: what it is, and what is to be done next; `scaling`: how many engines.
  They are plain objects without a clock: Ray is not needed to test them.
- `host`: one engine process, run on whichever machine it was put on. It ends with the process that runs the host.
- `actors`: host and ledger as actors; the only file that imports Ray.
- `watcher`: keeps the addresses in a file, from which front ends read them.

Tokens never travel through Ray: front ends speak to the engines over the ZeroMQ wire, with CURVE keys.
"""
