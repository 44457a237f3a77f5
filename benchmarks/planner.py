"""Bytes of optimizer states on each rank beside what the planner says, ours and others; and what it says of many ranks.

    deepspeed --num_accelerators 2 benchmarks/planner.py         # and with 1 and 4
    .venv/bin/python benchmarks/planner.py --planned             # the planner alone, for models and ranks of any number

The first trains layers of ``llama_60m`` (bytes for tokens) for one step under ZeRO-3 on some ranks and adds up the
tensors of each optimizer's state: torch's AdamW in fp32 and bf16, bitsandbytes' 8-bit AdamW, GaLoreAdamW in fp32 and
8 bits; on one rank galore-torch as well, without DeepSpeed. Beside it is what ``ds-galore estimate`` says of the
same job: moments and projectors of the fullest rank. The second asks it about states of Llamas of 1B and 7B on 1 to 64
ranks, and about traffic of the jobs that ``zero.py`` measures, and of the whole 1B, on 2 to 1024.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner
from common import ROOT, arguments, bytes_of, write

from ds_galore.cli import main as ds_galore_command

RANK = 128
SETTINGS = {"lr": 1e-4, "rank": RANK, "first_basis": "random"}
#: DeepSpeed's optimizer section (None: made here), precision, and the planner's name and its options.
KINDS: dict[str, tuple[dict[str, Any] | None, str, list[str]]] = {
    "AdamW, fp32": ({"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "fp32", ["adamw"]),
    "AdamW, bf16": (None, "bf16", ["adamw"]),
    "AdamW, 8-bit (bitsandbytes)": (None, "fp32", ["adamw_8bit"]),
    "GaLoreAdamW": ({"type": "GaLoreAdamW", "params": SETTINGS}, "fp32", ["galore_adamw"]),
    "GaLoreAdamW, sharded projectors": (
        {"type": "GaLoreAdamW", "params": {**SETTINGS, "projector_storage": "sharded"}},
        "fp32",
        ["galore_adamw", "--projector-storage", "sharded"],
    ),
    "GaLoreAdamW8bit": ({"type": "GaLoreAdamW8bit", "params": SETTINGS}, "fp32", ["galore_adamw_8bit"]),
    "GaLoreAdamW8bit, sharded projectors": (
        {"type": "GaLoreAdamW8bit", "params": {**SETTINGS, "projector_storage": "sharded"}},
        "fp32",
        ["galore_adamw_8bit", "--projector-storage", "sharded"],
    ),
}


def model_config(layers: int) -> dict[str, Any]:
    """Of the model that is trained."""
    found: dict[str, Any] = json.loads((ROOT / "configs" / "models" / "llama_60m.json").read_text())
    return {**found, "num_hidden_layers": layers, "vocab_size": 256}


def planned(config: Path, options: list[str], world_size: int, rank: int, precision: str = "fp32") -> dict[str, Any]:
    """What ``ds-galore estimate`` says of a job under ZeRO-3."""
    words = ["estimate", "--json", "--model-config", str(config), "--zero-stage", "3", "--world-size", str(world_size)]
    words += ["--precision", precision, "--state-precision", precision, "--optimizer", *options]
    if "galore" in options[0]:
        words += ["--rank", str(rank)]
    outcome = CliRunner().invoke(ds_galore_command, words)
    if outcome.exit_code:
        raise SystemExit(f"ds-galore {' '.join(words)}: {outcome.output}")
    found: dict[str, Any] = json.loads(outcome.output)
    return found


def planned_state(*job: Any) -> int:
    """Bytes of moments and projectors on the fullest rank."""
    kept = planned(*job)["memory_per_rank"]
    return int(kept["moments"]) + int(kept["projectors"])


def state_bytes(kind: str, config: dict[str, Any]) -> int:
    """Of one optimizer on this rank, after a step."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    section, precision, _ = KINDS[kind]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"}))
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    chosen: dict[str, Any] = {"model_parameters": list(model.parameters())}
    if section is not None:
        settings["optimizer"] = section
    elif precision == "bf16":
        settings["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    else:
        import bitsandbytes

        chosen = {"optimizer": bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-4)}
    engine, *_ = deepspeed.initialize(model=model, config=settings, **chosen)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0)).to(engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    found = sum(bytes_of(state) for state in engine.optimizer.optimizer.state.values())
    engine.destroy()
    return found


def galore_torch(config: dict[str, Any]) -> int:
    """Bytes of galore-torch's state after a step, in one process."""
    from galore_torch import GaLoreAdamW
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in config.items() if key != "architectures"}))
    matrices = [module.weight for name, module in model.named_modules() if name.endswith("_proj")]
    chosen = {id(each) for each in matrices}
    others = [each for each in model.parameters() if id(each) not in chosen]
    group = {"params": matrices, "rank": RANK, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
    optimizer = GaLoreAdamW([{"params": others}, group], lr=1e-4, no_deprecation_warning=True)
    tokens = torch.randint(256, (1, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return sum(bytes_of(state) for state in optimizer.state.values())


def measure(options: argparse.Namespace) -> None:
    """Train a step with each on these ranks, and compare."""
    import deepspeed
    import torch.distributed as dist

    import ds_galore

    ds_galore.enable()
    deepspeed.init_distributed("gloo", verbose=False)
    world, config = dist.get_world_size(), model_config(options.layers)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "config.json"
        path.write_text(json.dumps(config))
        for kind, (_, precision, words) in KINDS.items():
            taken = torch.tensor([float(state_bytes(kind, config))])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            rows[kind] = {"measured": int(taken), "planned": planned_state(path, words, world, RANK, precision)}
        if world == 1:
            rows["galore-torch, one process"] = {"measured": galore_torch(config)}
    if dist.get_rank() == 0:
        print(json.dumps(rows, indent=1))
        write(f"memory-{world}", options, {"layers": options.layers, "world_size": world, "rows": rows})
    dist.barrier()


def plan(options: argparse.Namespace) -> None:
    """Ask the planner about larger models and more ranks."""
    sharded = ["--projector-storage", "sharded"]
    kinds = {
        "AdamW, bf16 states": ["adamw"],
        "AdamW, 8-bit": ["adamw_8bit"],
        "GaLoreAdamW8bit, sharded projectors": ["galore_adamw_8bit", *sharded],
        "GaLoreAdamW8bit, sharded int4 projectors": ["galore_adamw_8bit", "--projector-dtype", "int4", *sharded],
        "GaLoreAdamW8bit, replicated projectors": ["galore_adamw_8bit", "--projector-storage", "replicated"],
    }
    states: dict[str, Any] = {}
    for name, rank in (("llama_1b", 512), ("llama_7b", 1024)):
        path = ROOT / "configs" / "models" / f"{name}.json"
        states[name] = {
            kind: {str(world): planned_state(path, words, world, rank, "bf16") for world in options.worlds}
            for kind, words in kinds.items()
        }
    found = {"states": states, "traffic": traffic(options)}
    print(json.dumps(found, indent=1))
    write("planned", options, found)


def traffic(options: argparse.Namespace) -> dict[str, Any]:
    """By job, projector storage and number of ranks, bytes that a rank sends in a step: ZeRO-3's, and low rank's."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        for title, shape, layers in (("60m", "llama_60m", 2), ("1b", "llama_1b", 1), ("llama_1b", "llama_1b", None)):
            config = json.loads((ROOT / "configs" / "models" / f"{shape}.json").read_text())
            if layers is not None:  # as zero.py cuts it
                config.update(num_hidden_layers=layers, vocab_size=256)
            path = Path(work) / f"{title}.json"
            path.write_text(json.dumps(config))
            found[title] = {}
            for storage in ("replicated", "sharded"):
                words = ["galore_adamw", "--projector-storage", storage]
                found[title][storage] = {}
                for world in options.ranks:
                    sent = planned(path, words, world, 128 if shape == "llama_60m" else 512)["traffic_per_step"]
                    own = sent["total"] - sent["low_rank"]
                    found[title][storage][str(world)] = {"zero": own, "low_rank": sent["low_rank"]}
    return found


def main() -> None:
    """Measure, or plan."""
    parser = arguments(__doc__)
    parser.add_argument("--planned", action="store_true", help="the planner alone")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 64], help="numbers of ranks for --planned")
    ranks = [2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="the same, for traffic")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.layers = 1
    plan(options) if options.planned else measure(options)


if __name__ == "__main__":
    main()
