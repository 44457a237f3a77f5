"""Pretrain a causal language model with Hugging Face's Trainer, on the samples that launch/train.py takes.

    deepspeed --num_accelerators 2 launch/train_trainer.py --config configs/zero3_galore.json --steps 250

What is special to ds_galore is one line, ``ds_galore.enable()``. The optimizer is that of the DeepSpeed configuration;
where it has none, ``--optim galore_adamw --optim-target-modules attn mlp --optim-args rank=64`` chooses one, as
anywhere with the Trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

import ds_galore
from ds_galore.config import load_config, section
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
    add("--config", required=True, metavar="JSON", help="DeepSpeed configuration")
    add("--model", default="tiny", help="a size in configs/models, or a Hugging Face model directory or config file")
    add("--data", nargs="*", default=[], metavar="PATH", help="text; without it, the standard library's sources")
    add("--tokenizer", metavar="DIR", help="Hugging Face tokenizer; without it, bytes are the tokens")
    add("--seq-len", type=int, default=256, help="tokens a sample")
    add("--batch", type=int, default=8, help="samples of a rank and micro-batch, where the configuration says 'auto'")
    add("--steps", type=int, default=400, help="optimizer steps")
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0 for none")
    add("--save-total-limit", type=int, default=3, help="how many checkpoints stay")
    add("--save-only-model", action="store_true", help="weights without what a run goes on from")
    add("--eval-every", type=int, default=0, help="steps between validations; 0 for none")
    add("--load-best-model-at-end", action="store_true", help="go back to the checkpoint of the least validation loss")
    add("--optim", default="adamw_torch", help="the Trainer's name, where the configuration has no optimizer")
    add("--optim-target-modules", nargs="+", metavar="MODULE", help="which modules are projected")
    add("--optim-args", metavar="KEY=VALUE,...", help="of the optimizer, as the Trainer takes them")
    add("--lr", type=float, default=0.01, help="learning rate, where the configuration has no optimizer")
    add("--output", default="runs/trainer", metavar="DIR", help="where metrics.jsonl and checkpoints go")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="DIR",
        help="a checkpoint; without a value the newest; with 'auto', the newest complete one, or none",
    )
    add("--seed", type=int, default=0, help="of the model's weights and the order of samples")
    add("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


class SameSamples(Trainer):  # type: ignore[misc]
    """A Trainer that takes the samples in the order of launch/train.py."""

    def _get_train_sampler(self, train_dataset: Any = None) -> InOrder:
        arguments = self.args
        samples = arguments.max_steps * arguments.gradient_accumulation_steps * arguments.train_batch_size
        return InOrder(len(self.train_dataset), samples * arguments.world_size, seed=arguments.data_seed)


class Logged(TrainerCallback):  # type: ignore[misc]
    """Writes what the Trainer logs, on the first rank."""

    def __init__(self, path: Path) -> None:
        self._path, self._metrics, self._begin = path, None, time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Append a line."""
        if not state.is_world_process_zero:
            return
        if self._metrics is None:
            self._metrics = Metrics(self._path)
        names = {"loss": "loss", "learning_rate": "lr", "grad_norm": "grad_norm", "eval_loss": "validation_loss"}
        found = {ours: float(logs[name]) for name, ours in names.items() if name in logs}
        if found:
            self._metrics.write(step=state.global_step, **found)


def connect() -> None:
    """Join the process group before the Trainer does, over gloo where there is no accelerator."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:  # started without a launcher
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
    deepspeed.init_distributed(get_accelerator().communication_backend_name(), verbose=False)


def training_arguments(arguments: argparse.Namespace, config: dict[str, Any]) -> TrainingArguments:
    """The Trainer's arguments; those that the DeepSpeed configuration fixes are taken from there."""

    def fixed(key: str, otherwise: int) -> int:
        value = config.get(key, "auto")
        return otherwise if value == "auto" else int(value)

    cpu = not torch.cuda.is_available()
    optimizer = section(config, "optimizer", "params")
    beta1, beta2 = optimizer.get("betas", (0.9, 0.999))
    best = (
        {"metric_for_best_model": "eval_loss", "greater_is_better": False} if arguments.load_best_model_at_end else {}
    )
    return TrainingArguments(
        output_dir=arguments.output,
        deepspeed=config,
        use_cpu=cpu,
        bf16=not cpu and torch.cuda.is_bf16_supported(including_emulation=False),
        max_steps=arguments.steps,
        per_device_train_batch_size=fixed("train_micro_batch_size_per_gpu", arguments.batch),
        gradient_accumulation_steps=fixed("gradient_accumulation_steps", 1),
        # The Trainer refuses a configuration that says otherwise than its own arguments.
        learning_rate=optimizer.get("lr", arguments.lr),
        weight_decay=optimizer.get("weight_decay", 0.0),
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_epsilon=optimizer.get("eps", 1e-8),
        max_grad_norm=config.get("gradient_clipping", 1.0),
        warmup_steps=max(2, arguments.steps // 10),
        optim=arguments.optim,
        optim_target_modules=arguments.optim_target_modules,
        optim_args=arguments.optim_args,
        save_strategy="steps" if arguments.save_every else "no",
        save_steps=arguments.save_every or 500,
        save_total_limit=arguments.save_total_limit,
        save_only_model=arguments.save_only_model,
        eval_strategy="steps" if arguments.eval_every else "no",
        eval_steps=arguments.eval_every or None,
        load_best_model_at_end=arguments.load_best_model_at_end,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
        data_seed=arguments.seed,
        **best,
    )


def train(arguments: argparse.Namespace) -> None:
    """Train, save, and go on from a checkpoint."""
    corpus = load_corpus(arguments.data, tokenizer=arguments.tokenizer, length=arguments.seq_len)
    settings = training_arguments(arguments, load_config(arguments.config))
    expected = int(os.environ["WORLD_SIZE"])
    if settings.world_size != expected:
        raise DsGaloreError(f"the launcher started {expected} ranks, and the Trainer sees {settings.world_size}")
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    model = build_model(*load_model_config(arguments.model), dtype=dtype, seed=arguments.seed)
    trainer = SameSamples(
        model=model,
        args=settings,
        train_dataset=Windows(corpus.train),
        eval_dataset=Windows(corpus.validation[:64]),
        callbacks=[Logged(Path(arguments.output) / "metrics.jsonl")],
    )
    trainer.train(resume_from_checkpoint=resumed(arguments))
    trainer.deepspeed.destroy()  # sees the save in flight through


def resumed(arguments: argparse.Namespace) -> str | bool | None:
    """What the Trainer is told to go on from."""
    if arguments.resume is None:
        return None
    if arguments.resume == "latest":
        return True
    if arguments.resume != "auto":
        return str(arguments.resume)
    ranks = dist.get_world_size()
    states = [f"rng_state_{rank}.pth" for rank in range(ranks)] if ranks > 1 else ["rng_state.pth"]
    found = newest_complete(RankGroup(dist.group.WORLD), Path(arguments.output), ["trainer_state.json", *states])
    if dist.get_rank() == 0:
        what = f"{arguments.output} holds no complete checkpoint; starting anew" if found is None else f"from {found}"
        print(f"--resume auto: {what}", file=sys.stderr)
    return None if found is None else str(found)


def main() -> int:
    """The program."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", category=FutureWarning, message=r".*is deprecated\. Please use.*_single")
    connect()
    ds_galore.enable()
    try:
        train(arguments)
    except DsGaloreError as error:
        if error.first_rank in (None, dist.get_rank()):
            print(f"train_trainer.py: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
