"""What can be wrong with a checkpoint. Part of the tree in :mod:`ds_galore.errors`."""

from __future__ import annotations

from ds_galore.errors import DsGaloreError

__all__ = ["DamageError", "FormatError", "NotCommittedError"]


class DamageError(DsGaloreError):
    """A checkpoint, or a file of one, is missing, cut off or changed."""

    exit_code = 8


class FormatError(DsGaloreError):
    """A file is of another format, or of a version that this program does not read."""

    exit_code = 9


class NotCommittedError(DsGaloreError):
    """A checkpoint was never finished: it has no manifest."""

    exit_code = 11
