"""A load of one of our checkpoints through DeepSpeed's ``load_checkpoint``.

Everything a rank needs is read before DeepSpeed's first collective, so that all ranks fail together where one finds
damage; DeepSpeed is then handed what it asks for, path by path. Seen in DeepSpeed 0.19.8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_galore.checkpoint.choosing import is_ours, latest_or_unfinished, other_than
from ds_galore.checkpoint.errors import DamageError, FormatError, NotCommittedError
from ds_galore.checkpoint.loading import PreparedLoad
from ds_galore.checkpoint.manifest import Manifest
from ds_galore.checkpoint.nodes import Nodes
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.config import CheckpointConfig
from ds_galore.zero.group import RankGroup

__all__ = ["Restorer"]

logger = logging.getLogger(__name__)


class Restorer:
    """What loads, and what has been read for the load in progress.

    Parameters
    ----------
    settings
        The ``ds_galore.checkpoint`` section.
    """

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings = settings
        self._loading: PreparedLoad | None = None

    def prepare(
        self, engine: Any, load_dir: Any, tag: Any, arguments: Mapping[str, Any], nodes: Nodes | None
    ) -> tuple[CheckpointStore, str, Manifest] | None:
        """Read what this rank needs of a checkpoint. Collective.

        Every rank reads files of its own, so one may find damage that the others do not see: all fail together, or,
        with ``on_damage: previous``, all take the newest checkpoint in which nothing is wrong.

        Parameters
        ----------
        engine
            DeepSpeed's, which loads.
        load_dir, tag, arguments
            Of its ``load_checkpoint``.
        nodes
            Where each has storage of its own.

        Returns
        -------
        tuple or None
            Where the checkpoint is, its tag and its manifest; None if it is none of ours.

        Raises
        ------
        ConfigError, CheckpointMismatchError
            For a checkpoint of another ZeRO stage, model or optimizer.
        NotCommittedError, FormatError, DamageError
            If the checkpoint is not what was written; the message names the newest that is.
        PeerError
            If that is so on another rank.
        """
        self.end()
        group = RankGroup(dist.group.WORLD)
        store = CheckpointStore(Path(load_dir).absolute())
        if tag is not None:
            chosen: str | None = str(tag)
        elif nodes is not None:
            chosen = nodes.latest(store)
        else:
            with group.together():
                chosen = latest_or_unfinished(store)
        with group.together():
            ours = chosen is not None and is_ours(store, chosen)
        if not group.agree([ours], None)[0]:
            return None
        tried: set[str] = set()
        while True:
            error: BaseException | None = None
            tried.add(str(chosen))
            try:
                if nodes is not None:
                    nodes.bring(store, str(chosen))
                self._loading = PreparedLoad(store, str(chosen), engine, arguments, group)
            except Exception as caught:  # noqa: BLE001 - raised again by all ranks below
                error = caught
            wrong = [error is not None, isinstance(error, DamageError | FormatError | NotCommittedError)]
            failed, damaged = group.agree(wrong, None)
            if not failed:
                break
            self.end()
            other = other_than(store, str(chosen), tried, group, nodes) if damaged else None
            if damaged and self._settings.on_damage == "previous" and other is not None and other[1] is not None:
                if group.rank == 0:
                    logger.warning("%s cannot be loaded: %s; loading %s", store.path(str(chosen)), error, other[0])
                chosen = other[1]
                continue
            if error is not None and other is not None:
                error.args = (f"{error}; {other[0]}",)
            group.agree([], error)
        assert self._loading is not None
        return store, str(chosen), self._loading.manifest

    def run(self, engine: Any, load: Callable[..., Any], arguments: Mapping[str, Any], tag: str) -> Any:
        """Have DeepSpeed load what :meth:`prepare` has read. Collective.

        Parameters
        ----------
        engine
            DeepSpeed's.
        load
            Its ``load_checkpoint``.
        arguments
            Of it, by name.
        tag
            What was chosen.
        """
        loading = self._loading
        assert loading is not None
        changed: dict[str, Any] = {"tag": tag}
        module_only = bool(arguments["load_module_only"])
        stage3 = int(engine.zero_optimization_stage()) == 3
        if stage3 and loading.weights_only:
            # Told False, DeepSpeed would look for weights in its own format, in the newest checkpoint.
            changed["load_optimizer_states"] = True
        try:
            result = load(**{**arguments, **changed})
            if loading.weights_only and (module_only or not stage3):
                loading.settle_weights(engine)
        finally:
            self.end()
        return result

    def state_for(self, path: Path) -> Any:
        """The state dict that this rank is to get for a path of the load in progress; None for any other path."""
        return self._loading.state_for(path) if self._loading is not None else None

    @property
    def loads_weights_only(self) -> bool:
        """Whether the load in progress is to leave the optimizer's state alone."""
        return self._loading is not None and self._loading.weights_only

    def name_for_this_rank(self, found: list[str], load_dir: str, tag: str) -> list[str]:
        """DeepSpeed's list of model state files, or the first rank's, where this rank did not save one."""
        if found or self._loading is None:
            return found
        return sorted(str(path) for path in (Path(load_dir) / str(tag)).glob("*_model_states.pt"))[:1]

    def end(self) -> None:
        """Forget what was read for a load."""
        self._loading = None
