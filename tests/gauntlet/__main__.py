"""python -m tests.gauntlet"""

import sys

from tests.gauntlet.main import main

sys.exit(main(sys.argv[1:]))
