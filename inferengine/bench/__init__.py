"""Load on any OpenAI-compatible server over HTTP, and what a client sees of it: what `inferengine bench` runs."""
