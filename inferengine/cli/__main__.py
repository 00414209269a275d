"""`python -m inferengine.cli`: the same as the command `inferengine`."""

import sys

from inferengine.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
