"""Run the command `inferengine`, as `python -m inferengine.cli`."""

import sys

from inferengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
