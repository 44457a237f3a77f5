"""``python -m ds_galore`` is the ``ds-galore`` command."""

from ds_galore.cli import main

main()
