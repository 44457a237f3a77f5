"""The exception tree.

Every error that a user can cause or has to act on derives from :class:`DsGaloreError`, and each class
names the exit status with which our programs end on it. Imports nothing of this package.
"""

from __future__ import annotations

__all__ = [
    "BindingError",
    "CheckpointMismatchError",
    "ConfigError",
    "DataError",
    "DsGaloreError",
    "PeerError",
]


class DsGaloreError(Exception):
    """Something went wrong in ds_galore; the message says what, and what to do next."""

    exit_code = 10
    #: The first rank that failed, where several ranks failed together: the one that should tell the user.
    first_rank: int | None = None


class ConfigError(DsGaloreError, ValueError):
    """A configuration key or an argument is unknown, of a wrong type, impossible, or in conflict."""

    exit_code = 2


class DataError(DsGaloreError, ValueError):
    """The training data, a tokenizer or a model directory is missing or cannot be used."""

    exit_code = 3


class BindingError(DsGaloreError, RuntimeError):
    """The optimizer cannot find out how DeepSpeed laid out its parameters, or does not support that layout."""

    exit_code = 4


class CheckpointMismatchError(DsGaloreError, ValueError):
    """A checkpoint holds another optimizer configuration, and continuing would not continue that run."""

    exit_code = 5


class PeerError(DsGaloreError, RuntimeError):
    """Another rank failed in a collective operation; the message carries its first cause."""

    exit_code = 6
