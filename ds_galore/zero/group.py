"""The collectives that an optimizer step needs, on one process group, failing on all ranks together.

Imports torch alone. Every method is called by all ranks of the group in the same order. A tensor on a device that
the group's backend cannot send from (CPU-offloaded state under NCCL) travels through the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_galore.errors import DsGaloreError, PeerError

__all__ = ["Guard", "RankGroup"]

Result = TypeVar("Result")
_CPU = torch.device("cpu")

# torch 2.13 renamed both, and warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankGroup:
    """The ranks that hold one flat tensor together.

    Parameters
    ----------
    process_group
        The group, or None for a tensor that this process holds alone: then nothing is ever sent.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.rank = 0
        self.world_size = 1
        self._global_ranks: list[int] = [0]
        self._transport: torch.device | None = None
        if process_group is not None:
            self.rank = dist.get_rank(process_group)
            self.world_size = dist.get_world_size(process_group)
            self._global_ranks = dist.get_process_group_ranks(process_group)
            if self.world_size > 1 and dist.get_backend(process_group) != "gloo":
                accelerator = torch.accelerator.current_accelerator()
                if accelerator is not None:
                    current = torch.get_device_module(accelerator).current_device()
                    self._transport = torch.device(accelerator.type, current)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> Tensor:
        """The sum (or maximum) of ``tensor`` over the group; may overwrite ``tensor``."""
        if self.world_size == 1:
            return tensor
        sent = self._outbound(tensor)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self.process_group)
        return sent.to(tensor.device)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's part of the sum of ``tensor``, ``(world_size, k)`` on every rank: ``(k,)``."""
        if self.world_size == 1:
            return tensor[0]
        sent = self._outbound(tensor)
        out = sent.new_empty(sent.shape[1])
        _reduce_scatter(out, sent.view(-1), group=self.process_group)
        return out.to(tensor.device)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``(world_size, k)`` from every rank's ``(k,)``; ``k`` is the same everywhere."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        sent = self._outbound(tensor)
        out = sent.new_empty(self.world_size * sent.numel())
        _all_gather(out, sent, group=self.process_group)
        return out.view(self.world_size, -1).to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """``tensor`` of rank ``source`` (its number within the group) on all ranks; may overwrite ``tensor``."""
        if self.world_size == 1:
            return tensor
        sent = self._outbound(tensor)
        dist.broadcast(sent, src=self._global_ranks[source], group=self.process_group)
        return sent.to(tensor.device)

    def reduce(self, tensor: Tensor, target: int) -> Tensor:
        """The sum of ``tensor`` on rank ``target``; undefined elsewhere. May overwrite ``tensor``."""
        if self.world_size == 1:
            return tensor
        sent = self._outbound(tensor)
        dist.reduce(sent, dst=self._global_ranks[target], group=self.process_group)
        return sent.to(tensor.device)

    def exchange(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Point-to-point messages, all in flight together.

        Parameters
        ----------
        sends
            By rank within the group, what it is sent.
        receives
            By rank within the group, a tensor of the shape and dtype of what it sends here (its content is not used).

        Returns
        -------
        dict
            By rank, what was received. Peers must call this with matching shapes; ranks without any message
            need not call it.
        """
        outgoing = {peer: self._outbound(tensor) for peer, tensor in sends.items()}
        incoming = {peer: torch.empty_like(self._outbound(tensor)) for peer, tensor in receives.items()}
        operations = [
            dist.P2POp(dist.irecv, buffer, self._global_ranks[peer], self.process_group)
            for peer, buffer in sorted(incoming.items())
        ] + [
            dist.P2POp(dist.isend, buffer, self._global_ranks[peer], self.process_group)
            for peer, buffer in sorted(outgoing.items())
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return {peer: buffer.to(receives[peer].device) for peer, buffer in incoming.items()}

    def gather_flat(self, flat: Tensor, ranges: Sequence[tuple[int, int]], target: int) -> Tensor | None:
        """The flat tensor of which every rank holds a range, on rank ``target``; None elsewhere."""
        if self.world_size == 1:
            return flat
        others = [rank for rank, (start, stop) in enumerate(ranges) if stop > start and rank != target]
        if self.rank != target:
            self.exchange({target: flat} if self.rank in others else {}, {})
            return None
        whole = flat.new_empty(max(stop for _, stop in ranges))
        start, stop = ranges[target]
        whole[start:stop] = flat
        received = self.exchange({}, {rank: whole[ranges[rank][0] : ranges[rank][1]] for rank in others})
        for rank, part in received.items():
            whole[ranges[rank][0] : ranges[rank][1]] = part
        return whole

    def vote(self, flags: Tensor, error: BaseException | None) -> Tensor:
        """Agree on what every rank saw, and fail together if one of them failed.

        Parameters
        ----------
        flags
            ``(k,)``, uint8: a mark per item, set by the ranks that have something against it.
        error
            The exception that this rank ran into since the last vote, or None.

        Returns
        -------
        Tensor
            ``(k,)``, uint8 on the CPU: the marks that any rank set. One byte an item (and one more) is sent.

        Raises
        ------
        BaseException
            ``error`` itself, on the rank that ran into it.
        PeerError
            On the other ranks, with the number of the first rank that failed and its message.
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return flags.cpu()
        ballot = torch.cat([flags, flags.new_tensor([int(error is not None)])])
        result = self.all_reduce(ballot, maximum=True).cpu()
        if result[-1]:
            reports: list[tuple[str, int] | None] = [None] * self.world_size
            report = None if error is None else (f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1))
            dist.all_gather_object(reports, report, group=self.process_group)
            rank, (text, exit_code) = next((rank, each) for rank, each in enumerate(reports) if each is not None)
            first = self._global_ranks[rank]
            if error is None:
                error = PeerError(f"rank {first} failed, and no rank can go on: {text}")
                error.exit_code = exit_code
            if isinstance(error, DsGaloreError):
                error.first_rank = first
            raise error
        return result[:-1]

    def agree(
        self, marks: Sequence[bool | Tensor], error: BaseException | None, device: torch.device = _CPU
    ) -> list[bool]:
        """:meth:`vote` on a list of marks, which may be boolean scalars on ``device``; for one rank nothing is sent."""
        if self.world_size == 1:
            if error is not None:
                raise error
            if not any(isinstance(mark, Tensor) for mark in marks):
                return [bool(mark) for mark in marks]
        if marks and all(isinstance(mark, Tensor) for mark in marks):
            flags = torch.stack([torch.as_tensor(mark) for mark in marks]).to(torch.uint8)
        else:
            flags = torch.tensor([bool(mark) for mark in marks], dtype=torch.uint8, device=device)
        return [bool(flag) for flag in self.vote(flags, error).tolist()]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that some ranks may fail in; if one does, all ranks raise at its end, as :meth:`vote` does.

        The block itself must not contain collectives.
        """
        error: BaseException | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - raised again by the vote
            error = caught
        self.agree([], error)

    def _outbound(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        return tensor if self._transport is None else tensor.to(self._transport)


class Guard:
    """Keeps a rank that failed in step with the others until the next vote.

    Work that only one rank does (arithmetic, allocation) goes into ``with guard:``; its exception is kept, not
    raised, so that the rank still takes part in the collectives that the others have already entered. Collectives
    stay outside, with buffers whose shapes do not depend on that work. :meth:`RankGroup.vote` then raises on all ranks.

    Examples
    --------
    >>> guard = Guard()
    >>> guard.run(lambda: 1 / 0, lambda: 0.0)
    0.0
    >>> guard.ok
    False
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing has failed on this rank."""
        return self.error is None

    def run(self, work: Callable[[], Result], fallback: Callable[[], Result]) -> Result:
        """What ``work()`` returns; once this rank has failed, ``fallback()``: stand-ins of the same shapes."""
        if self.ok:
            with self:
                return work()
        return fallback()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False  # KeyboardInterrupt and SystemExit end the process at once
        if self.error is None:
            self.error = error
        return True
