"""Long runs of the service: mixed load under faults for hours (mixed.py), connecting clients (clients.py), or storms of
connections alone (storms.py).

    python -m benchmarks.soak --hours 1 [--rate 1.2] [--seed 1] [--device cpu] [--json FILE] [--plots FOLDER]
    python -m benchmarks.soak --hours 1 --faults "kill engine,freeze ws"     only these faults, once each
    python -m benchmarks.soak --judge FOLDER [--json FILE] [--plots FOLDER]  judge a finished run again
    python -m benchmarks.soak --storms 15 [--json FILE]                      memory after storms of connections
    python -m benchmarks.soak [--cycles 10000] [--idle 1000] [--streams 200] [--json FILE]

The exit code of a mixed run is 1 if no fault explains the outcome of a request, if anything was left in a quiet window,
or if a process grew. A run that SIGTERM ends is judged too, by what it has up to its last quiet window; then, or if a
machine was lost, FOLDER has what `--judge` reads.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.soak import clients, mixed, report, storms
from inferengine.bench.environment import write_result
from inferengine.bench.plots import require_matplotlib


def main() -> int:
    if not any(word.split("=")[0] in ("--hours", "--judge", "--storms", "-h", "--help") for word in sys.argv[1:]):
        return clients.main()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--storms", type=int, metavar="N", help="only N storms of each kind")
    parser.add_argument("--rate", type=float, default=1.2, help="requests begun a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of the engine, on a CPU")
    parser.add_argument("--cycle-s", type=float, default=mixed.CYCLE_S, help="load between two quiet windows")
    parser.add_argument(
        "--kills", type=float, help="share of the time in which processes are killed (as much as leaves time to judge)"
    )
    parser.add_argument("--faults", default="", metavar="NAME,NAME", help="only these faults, once each, in this order")
    parser.add_argument("--folder", type=Path, help="where samples.jsonl, run.json and service.log are left")
    parser.add_argument("--judge", type=Path, metavar="FOLDER", help="judge the finished run in this folder")
    parser.add_argument("--json", type=Path, help="write the result here, with figures by the minute")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write SVG files here (needs matplotlib)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started is ended
    if options.storms is not None:
        mixed.raise_file_limit()
        found = storms.run(options.storms)
        if options.json is not None:
            write_result(options.json, found)
        return 0
    if options.plots is not None:
        require_matplotlib()
    folder = options.judge or options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    cut: SystemExit | None = None
    if options.judge is None:
        try:
            mixed.run(options, folder)
        except SystemExit as error:
            if not (folder / "run.json").exists():
                raise
            cut = error  # ended by a signal: judge what there is
    document = report.write(folder, options.json, options.plots)
    print(json.dumps({name: value for name, value in document.items() if name != "minutes"}, indent=1))
    print(f"The samples and the service's log are in {folder}")
    if cut is not None:
        raise cut
    return 0 if document["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
