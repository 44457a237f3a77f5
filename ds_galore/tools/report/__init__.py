"""A page about some runs: curves, checkpoints, memory and subspaces, in one HTML file. See docs/report.md."""
