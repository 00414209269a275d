"""Load on any OpenAI-compatible server: `inferengine bench` under the name of the other benchmarks, figures as JSON.

    python -m benchmarks.serving --concurrency 32 --requests 256 --input 128 --output 64
    python -m benchmarks.serving --rate 20 --requests 400 --input 64:512 --output 16:128 --goodput ttft:500 tpot:50

Options are those of `inferengine bench --help`; without `--json FILE` the figures are printed.
"""

from __future__ import annotations

import sys

from inferengine.cli.main import main

if __name__ == "__main__":
    words = sys.argv[1:]
    named = any(word.partition("=")[0] == "--json" for word in words)
    sys.exit(main(["bench", *words, *([] if named else ["--json", "-"])]))
