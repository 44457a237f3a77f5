"""Pretrain or fine-tune a causal language model with DeepSpeed ZeRO-3 and a ds_galore configuration.

    deepspeed --num_accelerators 2 launch/train.py --config configs/zero3_galore.json --model tiny

Everything that DeepSpeed takes from its configuration is taken from there; the arguments say what to train on what.
Exit status: 0 done, 2 a mistake in the configuration or the arguments, 3 in data or model files, 75 ended by SIGTERM or
SIGUSR1 after a checkpoint was saved (``--resume auto`` goes on from it), others as in ``ds_galore/errors.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ds_galore
from ds_galore.checkpoint.nodes import Nodes
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.config import GALORE_OPTIMIZERS, load_config, resolve_auto, section
from ds_galore.errors import ConfigError, DataError, DsGaloreError
from ds_galore.monitoring.accounting import memory_plans
from ds_galore.optim.targets import describe_model, select_targets
from ds_galore.zero.group import RankGroup

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import MODELS, build_model, dtype_of, load_model_config
from reporting import Metrics, Progress, show_memory
from resuming import (
    INTERRUPTED,
    Interruption,
    client_state,
    find_checkpoint,
    is_ours,
    newest_intact,
    seed_new_rank,
    set_random_states,
)
from text_data import Corpus, SampleOrder, load_corpus


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = sorted(path.stem for path in MODELS.glob("*.json"))
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--config", required=True, metavar="JSON", help="DeepSpeed configuration")
    add("--model", default="tiny", help=f"one of {', '.join(names)}, or a Hugging Face model directory or config file")
    add(
        "--data",
        nargs="*",
        default=[],
        metavar="PATH",
        help="text files, directories of them, or a datasets folder; without it, the standard library's sources",
    )
    add("--text-column", default="text", help="column of a datasets folder")
    add("--tokenizer", metavar="DIR", help="Hugging Face tokenizer; without it, bytes are the tokens")
    add("--seq-len", type=_at_least_two, default=256, help="tokens a sample")
    add("--steps", type=_positive, default=400, help="optimizer steps")
    add("--eval-every", type=int, default=100, help="steps between validations; 0 for the last one only")
    add("--eval-samples", type=_positive, default=64, help="validation samples")
    add("--log-every", type=_positive, default=20, help="steps between progress lines where there is no terminal")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    add("--output", default="runs/latest", metavar="DIR", help="where metrics.jsonl and checkpoints/ go")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="TAG",
        help="continue from a checkpoint under --output: the latest, the one of this tag, or, with 'auto', the newest"
        " one in which nothing is wrong, from the beginning where there is none",
    )
    add("--seed", type=int, default=0, help="of the model's weights and the order of samples")
    add("--gradient-checkpointing", action="store_true", help="recompute activations in the backward pass")
    add("--debug", action="store_true", help="show tracebacks")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _at_least_two(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} leaves nothing to predict; at least 2")
    return int(text)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration with its ``"auto"`` values resolved, and refused if it cannot work."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DeepSpeedConfig

    config = load_config(arguments.config)
    ds_galore.check_deepspeed_config(config)
    if not section(config, "optimizer"):
        raise ConfigError(
            f"optimizer is missing from {arguments.config}: launch/train.py trains with the one named there"
        )
    accelerator = get_accelerator()
    # A CPU says that it supports bf16; without hardware for it, it is about 20 times slower than fp32.
    hardware = accelerator.device_name() != "cpu"
    bf16 = hardware and accelerator.is_bf16_supported()
    if accelerator.device_name() == "cuda":  # which says yes to bf16 that it emulates, too
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    resolved = resolve_auto(
        config,
        {
            "bf16.enabled": bf16,
            "fp16.enabled": hardware and not bf16 and accelerator.is_fp16_supported(),
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "scheduler.params.total_num_steps": arguments.steps,
            "scheduler.params.warmup_num_steps": max(2, arguments.steps // 10),
            "train_batch_size": _batch(config),
            "train_micro_batch_size_per_gpu": 8,
        },
    )
    ours = section(resolved, "ds_galore")
    if not section(ours, "monitor").get("log"):
        log = str(Path(arguments.output) / "ds_galore.jsonl")
        resolved["ds_galore"] = {**ours, "monitor": {**section(ours, "monitor"), "log": log}}
    stage = section(resolved, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage is {stage!r}: launch/train.py trains with stages 0 to 3")
    try:
        DeepSpeedConfig(resolved)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"{arguments.config}: DeepSpeed refuses it: {error}") from None
    return resolved


def _batch(config: dict[str, Any]) -> int:
    micro, accumulation = config.get("train_micro_batch_size_per_gpu", 8), config.get("gradient_accumulation_steps", 1)
    return (
        (micro if isinstance(micro, int) else 8)
        * (accumulation if isinstance(accumulation, int) else 1)
        * _world_size()
    )


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def connect() -> RankGroup:
    """Join the job's process group, before anything that a rank could fail in."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ and _world_size() == 1:  # started without a launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", _world_size()))))
    deepspeed.init_distributed(accelerator.communication_backend_name(), verbose=False)
    group = RankGroup(dist.group.WORLD)
    expected = _world_size()
    if group.world_size != expected:
        raise ConfigError(f"the launcher started {expected} ranks, and {group.world_size} are connected")
    return group


def open_metrics(output: str, *, enabled: bool) -> Metrics:
    """The metrics file, opened before anything costs time."""
    try:
        return Metrics(Path(output) / "metrics.jsonl" if enabled else None)
    except OSError as error:
        raise DataError(f"--output {output}: cannot be written to: {error.strerror}") from None


def check_targets(model: torch.nn.Module, config: dict[str, Any]) -> None:
    """Refuse ``target_modules`` that match nothing, on all ranks together, before DeepSpeed is set up."""
    optimizer = section(config, "optimizer")
    if optimizer.get("type") in GALORE_OPTIMIZERS:
        if "rank" not in section(optimizer, "params"):
            raise ConfigError("optimizer.params.rank is missing: give the rank of the projection, such as 128")
        select_targets(describe_model(model), section(optimizer, "params").get("target_modules"))


class Trainer:
    """The training loop: it owns the engine, the data's position and what is reported."""

    def __init__(self, arguments: argparse.Namespace, engine: Any, corpus: Corpus, metrics: Metrics) -> None:
        self.arguments, self.engine, self.corpus, self.metrics = arguments, engine, corpus, metrics
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.micro = engine.train_micro_batch_size_per_gpu()
        self.accumulation = engine.gradient_accumulation_steps()
        self.order = SampleOrder(len(corpus.train), seed=arguments.seed)
        self.group = RankGroup(dist.group.WORLD)
        self.output = Path(arguments.output)
        self.checkpoints = self.output / "checkpoints"
        self.interruption = Interruption()

    def run(self) -> int:
        """Train, validate and save; the exit status."""
        if self.arguments.resume:
            self.load(self.arguments.resume)
        try:
            with self.interruption:
                return self.loop()
        except BaseException:
            with contextlib.suppress(Exception):  # the save in flight may still come to its end; this error is told
                self.engine.checkpoint_engine.cleanup()
            raise

    def loop(self) -> int:
        """Step by step, from where the engine stands; the exit status."""
        arguments, engine = self.arguments, self.engine
        done = engine.global_steps
        tokens = self.micro * self.accumulation * self.world_size * arguments.seq_len
        progress = Progress(
            arguments.steps, done=done, tokens_per_step=tokens, every=arguments.log_every, enabled=self.rank == 0
        )
        metrics = self.metrics
        validated = -1
        for step in range(done + 1, arguments.steps + 1):
            begin = time.monotonic()
            loss, interrupted = self.step()
            seconds = time.monotonic() - begin
            memory = memory_in_use()
            speed = progress.update(step, loss, seconds=seconds, memory=memory)
            norm = engine.get_global_grad_norm()
            metrics.write(
                step=step,
                loss=loss,
                lr=engine.get_lr()[0],
                grad_norm=None if norm is None else float(norm),
                tokens_per_s=round(speed, 1),
                seconds=round(seconds, 4),
                memory_bytes=memory,
            )
            if not math.isfinite(loss):
                self.fail(step, loss)
            if arguments.eval_every > 0 and step % arguments.eval_every == 0 and step != arguments.steps:
                validated = step
                self.report(step, progress, metrics)
            due = arguments.save_every > 0 and step % arguments.save_every == 0
            if due or interrupted:
                self.save(step)
            if interrupted:
                self.finish_saving()
                progress.close()
                metrics.close()
                if self.rank == 0:
                    saved = self.checkpoints / f"step-{step}"
                    print(f"interrupted after step {step}; --resume auto goes on from {saved}", file=sys.stderr)
                return INTERRUPTED
        self.finish_saving()
        if validated != arguments.steps:
            self.report(arguments.steps, progress, metrics)
        progress.close()
        metrics.close()
        return 0

    def fail(self, step: int, loss: float) -> None:
        """End the run, and say where to go back to.

        The loss is of the weights after ``step - 1``, so a checkpoint of that step may hold what made it.
        """
        self.finish_saving()
        found: list[str | None] = [None]
        if self.nodes is not None:
            found = [self.nodes.newest_intact(CheckpointStore(self.checkpoints), up_to_step=step - 2)]
        else:
            with self.group.together(), contextlib.suppress(OSError):  # one rank searches, and the others wait for it
                found = [newest_intact(self.checkpoints, up_to_step=step - 2) if self.rank == 0 else None]
            dist.broadcast_object_list(found, src=0)
        advice = (
            f"go back with --resume {found[0]}, the newest intact checkpoint from before, and lower the learning rate"
            if found[0] is not None
            else "lower the learning rate; there is no intact checkpoint from before"
        )
        raise DsGaloreError(f"step {step}: the training loss is {loss}; {advice}")

    def step(self) -> tuple[float, bool]:
        """One optimizer step; the mean loss over the global batch, and whether some rank was asked to end."""
        indices = self.order.take(self.micro * self.accumulation * self.world_size)
        total = torch.zeros(2, device=self.engine.device)
        for part in indices.view(self.accumulation, self.world_size, self.micro)[:, self.rank]:
            tokens = self.corpus.train[part].long().to(self.engine.device)
            loss = self.engine(input_ids=tokens, labels=tokens).loss
            self.engine.backward(loss)
            self.engine.step()
            total[0] += loss.detach().float() / self.accumulation
        total[1] = float(self.interruption.signal is not None)
        dist.all_reduce(total)
        return float(total[0]) / self.world_size, bool(total[1] > 0)

    def validate(self) -> float:
        """The mean loss over the validation samples, in nats a token."""
        samples = min(self.arguments.eval_samples, len(self.corpus.validation))
        rounds = -(-samples // (self.micro * self.world_size))
        total = torch.zeros(2, device=self.engine.device)
        self.engine.eval()
        with torch.no_grad():
            for number in range(rounds):  # every rank runs every round: ZeRO-3 gathers weights together
                begin = (number * self.world_size + self.rank) * self.micro
                chosen = torch.arange(begin, begin + self.micro)
                part = self.corpus.validation[chosen.clamp(max=samples - 1)].long().to(self.engine.device)
                count = int((chosen < samples).sum())
                loss = self.engine(input_ids=part[: max(count, 1)], labels=part[: max(count, 1)]).loss.float()
                if count:
                    total += torch.stack([loss * count, torch.full_like(loss, count)])
        self.engine.train()
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def report(self, step: int, progress: Progress, metrics: Metrics) -> None:
        """Validate, and say so."""
        loss = self.validate()
        progress.say(f"step {step} validation loss {loss:.4f} perplexity {math.exp(min(loss, 700.0)):.3f}")
        metrics.write(step=step, validation_loss=loss)

    def save(self, step: int) -> None:
        """Write a checkpoint with the position in the data and every rank's random states."""
        self.engine.save_checkpoint(
            str(self.checkpoints), tag=f"step-{step}", client_state=client_state(self.group, self.order.consumed)
        )

    @property
    def nodes(self) -> Nodes | None:
        """Where each has a directory of its own for our checkpoints."""
        found: Nodes | None = getattr(self.engine.checkpoint_engine, "nodes", None)
        return found

    def finish_saving(self) -> None:
        """See the save in flight through, where DeepSpeed's checkpoint engine is ours."""
        wait = getattr(self.engine.checkpoint_engine, "wait", None)
        if wait is not None:
            wait()

    def load(self, wanted: str) -> None:
        """Continue from a checkpoint."""
        tag = find_checkpoint(self.group, self.checkpoints, wanted, self.nodes)
        if tag is None:
            if self.rank == 0:
                print(f"--resume auto: {self.checkpoints} holds no intact checkpoint; starting anew", file=sys.stderr)
            return
        with self.group.together():
            ranks = len(list((self.checkpoints / tag).glob("*_optim_states.pt")))  # none without ZeRO
            # Else a host has those of its own ranks.
            whole = self.nodes is None and not self.engine.use_node_local_storage()
            if whole and ranks and ranks != self.world_size and not is_ours(self.checkpoints, tag):
                raise DataError(
                    f"--resume {tag}: was saved by {ranks} ranks and cannot be loaded by {self.world_size}; only"
                    " ds_galore's checkpoints can"
                )
        _, client = self.engine.load_checkpoint(str(self.checkpoints), tag=tag)
        self.order.consumed = client["consumed"]
        states = client.get("random", {})
        if self.rank in states:
            set_random_states(states[self.rank])
        else:
            seed_new_rank(self.arguments.seed, self.rank, self.order.consumed)
        if self.rank == 0:
            print(f"resumed from {self.checkpoints / tag} after step {self.engine.global_steps}", file=sys.stderr)


def memory_in_use() -> int:
    """Bytes in use on this rank's device, or by this process where that is the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def announce(engine: Any, corpus: Corpus, world_size: int) -> None:
    """Print what is about to be trained, and the memory table."""
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    numbers = [getattr(p, "ds_numel", p.numel()) for p in trained]
    print(
        f"{sum(numbers):,} trained parameters, {corpus.train.numel():,} training and {corpus.validation.numel():,}"
        f" validation tokens from {corpus.source}",
        file=sys.stderr,
    )
    plans = memory_plans(engine, world_size)
    if plans is not None:
        show_memory(*plans, optimizer=type(engine.basic_optimizer).__name__, world_size=world_size)


def train(arguments: argparse.Namespace, group: RankGroup) -> int:
    """Everything after the ranks are connected; the exit status."""
    with group.together():
        config = read_config(arguments)
        model_config, weights = load_model_config(arguments.model)
        corpus = load_corpus(
            arguments.data, tokenizer=arguments.tokenizer, length=arguments.seq_len, text_column=arguments.text_column
        )
        if corpus.vocabulary > model_config.vocab_size:
            raise DataError(
                f"--model {arguments.model}: has a vocabulary of {model_config.vocab_size},"
                f" and the tokenizer one of {corpus.vocabulary}"
            )
        metrics = open_metrics(arguments.output, enabled=group.rank == 0)
    import deepspeed

    zero3 = config if section(config, "zero_optimization").get("stage") == 3 else None
    model = build_model(model_config, weights, dtype=dtype_of(config), seed=arguments.seed, zero3=zero3)
    with group.together():
        check_targets(model, config)
    if arguments.gradient_checkpointing:
        # transformers has another name for it since version 5.
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    if group.rank == 0:
        announce(engine, corpus, group.world_size)
    return Trainer(arguments, engine, corpus, metrics).run()


def run(arguments: argparse.Namespace, group: RankGroup) -> int:
    """Train; turn a user's mistake into one message for the whole job, and one exit status."""
    try:
        return train(arguments, group)
    except DsGaloreError as error:
        if arguments.debug:
            raise
        if error.first_rank in (None, group.rank):  # where several fail alike, the first tells
            print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def main() -> int:
    """The program."""
    arguments = parse_arguments()
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # DeepSpeed 0.19.8 calls collectives by names that torch 2.13 has renamed: nothing that a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*is deprecated\. Please use.*_single")
    ds_galore.enable()
    try:
        return run(arguments, connect())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    status = main()
    # Not sys.exit: about one finished run in ten was aborted while the interpreter tore torch down ("terminate called
    # without an active exception", no Python frame; torch 2.13, gloo, two ranks), and failed the job.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
