"""Some benchmarks in one process or one job, small and few: whether they still run. Nothing is judged or kept.

.venv/bin/python benchmarks/quick.py refresh "gpu_check --device cpu"
deepspeed --num_accelerators 2 benchmarks/quick.py zero "checkpoints --row load"
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
import time
from pathlib import Path


def main() -> int:
    """Run what the words name; the first that fails ends it."""
    own, *words = sys.argv
    given = [word for word in words if not word.startswith("--local_rank")]
    for each in given:
        name, *options = shlex.split(each)
        sys.argv = [str(Path(own).with_name(f"{name}.py")), *options, "--quick"]
        begin = time.perf_counter()
        failed = importlib.import_module(name).main()
        if failed:
            print(f"{each}: failed", file=sys.stderr)
            return 1
        print(f"{each}: runs, in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of jobs that are done need not be waited for
