"""The optimizers: update rules, subspaces, and the walker that applies them to whatever slices a rank holds."""
