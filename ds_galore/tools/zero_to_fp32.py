"""What the ``zero_to_fp32.py`` in our save directories runs: DeepSpeed's arguments, our merge.

Imports no DeepSpeed; torch only without ``--safe_serialization``, as DeepSpeed's own script then writes torch's format.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_galore.cli.checkpoints import parse_size
from ds_galore.errors import DsGaloreError
from ds_galore.tools.merge import merge_checkpoint

__all__ = ["SCRIPT", "main"]

#: The script's text, written beside ``latest`` at each save.
SCRIPT = '''#!/usr/bin/env python
"""Merge the partitions of a checkpoint in this directory into fp32 weights; takes the arguments of DeepSpeed's script.

    python zero_to_fp32.py . OUTPUT_DIR [--tag TAG] [--safe_serialization] [--max_shard_size 5GB]
"""

import sys

try:
    from ds_galore.tools.zero_to_fp32 import main
except ImportError:
    sys.exit("this checkpoint was written by ds_galore, which is needed to read it: pip install ds_galore")

if __name__ == "__main__":
    sys.exit(main())
'''


def main(argv: Sequence[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(description="Merge a checkpoint of ds_galore or DeepSpeed into fp32 weights.")
    parser.add_argument("checkpoint_dir", help="directory with the file 'latest', such as path/checkpoint-12")
    parser.add_argument("output_dir", help="directory to make")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file of weights")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch's format")
    parser.add_argument("-t", "--tag", help="which checkpoint, such as global_step1; the latest by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen parameters")
    parser.add_argument("-d", "--debug", action="store_true", help="show tracebacks")
    arguments = parser.parse_args(argv)
    try:
        report = merge_checkpoint(
            arguments.checkpoint_dir,
            arguments.output_dir,
            tag=arguments.tag,
            max_shard_size=parse_size(arguments.max_shard_size),
            format="safetensors" if arguments.safe_serialization else "torch",
            exclude_frozen=arguments.exclude_frozen_parameters,
        )
    except (DsGaloreError, ValueError, OSError) as error:
        if arguments.debug:
            raise
        print(f"zero_to_fp32.py: error: {error}", file=sys.stderr)
        return 1
    print(f"{report.source}: {report.tensors} tensors, {report.parameters:,} elements written to {report.out}")
    return 0
