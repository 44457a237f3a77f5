"""Some benchmarks in one process or one job, small and few: whether they still run. Nothing is judged or kept.

.venv/bin/python benchmarks/quick.py refresh "gpu_check --device cpu"
deepspeed --num_accelerators 2 benchmarks/quick.py zero "checkpoints --row load"
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Run what the words name; the first that fails ends it."""
    own, *words = sys.argv
    given = [word for word in words if not word.startswith("--local_rank")]
    for each in given:
        name, *options = shlex.split(each)
        path = Path(own).resolve().with_name(f"{name}.py")
        sys.argv = [str(path), *options, "--quick"]
        begin = time.perf_counter()
        if _loaded(path).main():
            print(f"{each}: failed", file=sys.stderr)
            return 1
        print(f"{each}: runs, in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return 0


def _loaded(path: Path) -> Any:
    """A script as a module, under a name that is not one of the standard library's."""
    name = f"benchmark_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of jobs that are done need not be waited for
