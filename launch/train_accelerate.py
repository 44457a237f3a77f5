"""Pretrain a causal language model with Accelerate, DeepSpeed and ds_galore, on the samples that launch/train.py takes.

    accelerate launch --config_file configs/accelerate_zero3_galore.yaml launch/train_accelerate.py --steps 250

What is special to ds_galore is one line, ``ds_galore.enable()``; the optimizer and the checkpoints are chosen in the
DeepSpeed configuration that the YAML names. Without an ``optimizer`` there, the script makes one itself.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, InitProcessGroupKwargs, ProjectConfiguration
from torch.utils.data import DataLoader

import ds_galore
from ds_galore.errors import DsGaloreError
from ds_galore.zero.group import RankGroup

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import build_model, load_model_config
from reporting import Metrics
from resuming import newest_complete
from text_data import InOrder, Windows, load_corpus


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="a size in configs/models, or a Hugging Face model directory or config file")
    add("--data", nargs="*", default=[], metavar="PATH", help="text; without it, the standard library's sources")
    add("--tokenizer", metavar="DIR", help="Hugging Face tokenizer; without it, bytes are the tokens")
    add("--seq-len", type=int, default=256, help="tokens a sample")
    add("--batch", type=int, default=8, help="samples of a rank and micro-batch, where the configuration says 'auto'")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    add("--total-limit", type=int, default=3, help="how many checkpoints stay")
    add("--lr", type=float, default=0.01, help="learning rate, where the configuration has no optimizer")
    add("--rank", type=int, default=64, help="rank of the projection, where the configuration has no optimizer")
    add("--output", default="runs/accelerate", metavar="DIR", help="where metrics.jsonl and checkpoints/ go")
    add(
        "--resume",
        nargs="?",
        const="auto",
        metavar="DIR",
        help="a checkpoint; without a value, the newest complete one",
    )
    add("--seed", type=int, default=0, help="of the model's weights and the order of samples")
    return parser.parse_args(argv)


class Position:
    """How many steps have been taken: Accelerate saves it, as everything with these two methods that it is told of."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        """What is saved."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.step = state["step"]


def connect(arguments: argparse.Namespace) -> Accelerator:
    """The accelerator, of as many processes as the launcher started."""
    project = ProjectConfiguration(
        arguments.output, automatic_checkpoint_naming=True, total_limit=arguments.total_limit
    )
    # Accelerate finds no backend for DeepSpeed on a CPU by itself, and would leave the ranks unconnected.
    backend = None if torch.cuda.is_available() else "gloo"
    accelerator = Accelerator(project_config=project, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    expected = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != expected or accelerator.state.deepspeed_plugin is None:
        raise DsGaloreError(
            f"the launcher started {expected} ranks, and {accelerator.num_processes} are connected"
            f" ({accelerator.distributed_type}): accelerate launch needs a --config_file with DeepSpeed, and no --cpu"
        )
    return accelerator


def make_optimizer(arguments: argparse.Namespace, config: dict[str, Any], model: torch.nn.Module) -> Any:
    """A placeholder for the configuration's optimizer, or one of ours."""
    if "optimizer" in config:
        return DummyOptim(model.parameters())
    return ds_galore.GaLoreAdamW(model.parameters(), model=model, lr=arguments.lr, rank=arguments.rank)


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train, save, and go on from a checkpoint."""
    plugin = accelerator.state.deepspeed_plugin
    micro = (
        arguments.batch
        if plugin.is_auto("train_micro_batch_size_per_gpu")
        else plugin.get_value("train_micro_batch_size_per_gpu")
    )
    accumulation = plugin.get_value("gradient_accumulation_steps")
    accumulation = 1 if accumulation == "auto" else accumulation
    corpus = load_corpus(arguments.data, tokenizer=arguments.tokenizer, length=arguments.seq_len)
    samples = arguments.steps * accumulation * micro * accelerator.num_processes
    loader = DataLoader(
        Windows(corpus.train), batch_size=micro, sampler=InOrder(len(corpus.train), samples, seed=arguments.seed)
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    model = build_model(*load_model_config(arguments.model), dtype=dtype, seed=arguments.seed)
    optimizer = make_optimizer(arguments, plugin.deepspeed_config, model)
    scheduled = [
        DummyScheduler(
            optimizer,
            total_num_steps=arguments.steps * accelerator.num_processes,  # Accelerate divides by the number of ranks
            warmup_num_steps=max(2, arguments.steps // 10),
        )
    ] * ("scheduler" in plugin.deepspeed_config)
    engine, optimizer, loader, *scheduled = accelerator.prepare(model, optimizer, loader, *scheduled)
    position = Position()
    accelerator.register_for_checkpointing(position)
    if arguments.resume:
        resume(arguments, accelerator, position)
    metrics = Metrics(Path(arguments.output) / "metrics.jsonl" if accelerator.is_main_process else None)
    mean = torch.zeros((), device=accelerator.device)
    begin = time.monotonic()
    for batch in accelerator.skip_first_batches(loader, position.step * accumulation):
        with accelerator.accumulate(engine):
            loss = engine(**batch).loss
            accelerator.backward(loss)  # with DeepSpeed, the optimizer's step and the scheduler's as well
            optimizer.step()
            optimizer.zero_grad()
        mean += loss.detach().float() / accumulation
        if not accelerator.sync_gradients:
            continue
        position.step += 1
        whole = float(accelerator.reduce(mean, "mean"))
        mean.zero_()
        seconds, begin = time.monotonic() - begin, time.monotonic()
        tokens = samples // arguments.steps * arguments.seq_len
        metrics.write(step=position.step, loss=whole, lr=engine.get_lr()[0], tokens_per_s=round(tokens / seconds, 1))
        if position.step % 20 == 0 or position.step == arguments.steps:
            accelerator.print(f"step {position.step}/{arguments.steps} loss {whole:.4f}", flush=True)
        if arguments.save_every and position.step % arguments.save_every == 0:
            accelerator.save_state()
    metrics.close()
    engine.destroy()  # sees the save in flight through
    accelerator.end_training()


def resume(arguments: argparse.Namespace, accelerator: Accelerator, position: Position) -> None:
    """Load a checkpoint; later ones get numbers after those that are there."""
    root = Path(arguments.output) / "checkpoints"
    names = ["custom_checkpoint_0.pkl", *(f"random_states_{rank}.pkl" for rank in range(accelerator.num_processes))]
    group = RankGroup(dist.group.WORLD)
    found = newest_complete(group, root, names) if arguments.resume == "auto" else Path(arguments.resume)
    if found is None:
        accelerator.print(f"--resume: {root} holds no complete checkpoint; starting anew", file=sys.stderr)
    else:
        accelerator.load_state(str(found))
        accelerator.print(f"resumed from {found} after step {position.step}", file=sys.stderr)
    numbers = [int(each.name.rpartition("_")[2]) for each in root.glob("checkpoint_*")]
    accelerator.project_configuration.iteration = max(numbers, default=-1) + 1


def main() -> int:
    """The program."""
    arguments = parse_arguments()
    ds_galore.enable()
    try:
        train(arguments, connect(arguments))
    except DsGaloreError as error:
        if error.first_rank in (None, int(os.environ.get("RANK", "0"))):
            print(f"train_accelerate.py: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
