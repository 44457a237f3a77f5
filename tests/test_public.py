"""What users build on: public names, signatures, hyperparameters, commands and options.

A change here is a change of the interface. Adding is a line in a table; what is renamed or removed is for CHANGELOG.md,
and keeps working for a while under its old name.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import click
import pytest

import ds_galore
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.cli import main
from ds_galore.config import CheckpointConfig, CompressionConfig, DsGaloreConfig, MonitorConfig
from ds_galore.errors import DsGaloreError
from ds_galore.parameters import ALIASES, LAYERWISE, OPTIMIZERS

#: What AdamW takes by position, in galore-torch's order.
_ADAM = "lr=0.001, betas=(0.9, 0.999), eps=1e-06, weight_decay=0.0, correct_bias=True"
#: ``ds_galore.__all__``, and how what can be called is called.
NAMES = {
    "__version__": None,
    "enable": "()",
    "check_deepspeed_config": "(config, *, client_optimizer=None)",
    "load_state_dict": "(path, tag=None)",
    "merge_checkpoint": (
        "(path, out, *, tag=None, dtype='fp32', max_shard_size=5000000000, model_config=None, optimizer=False,"
        " format='safetensors', prune=0.0, quantize=None, exclude_frozen=False, overwrite=False, workers=2, progress)"
    ),
    "reshard_checkpoint": (
        "(path, out, *, world_size, tag=None, format='ds_galore', sub_group_size=None, overwrite=False, workers=2,"
        " progress)"
    ),
    "GaLoreAdamW": f"(params, {_ADAM}, *, model=None, **values)",
    "GaLoreAdamW8bit": f"(params, {_ADAM}, *, model=None, **values)",
    "GaLoreAdafactor": "(params, *, model=None, **values)",
    "APOLLOAdamW": f"(params, {_ADAM}, *, model=None, **values)",
    "FiraAdamW": f"(params, {_ADAM}, *, model=None, **values)",
    "DsGaloreError": None,
    "ConfigError": None,
    "DataError": None,
    "BindingError": None,
    "CheckpointMismatchError": None,
    "PeerError": None,
}

#: The exit status with which our programs end on an error.
EXIT_CODES = {
    "DsGaloreError": 10,
    "ConfigError": 2,
    "DataError": 3,
    "BindingError": 4,
    "CheckpointMismatchError": 5,
    "PeerError": 6,
}

#: Hyperparameters and their defaults: of all optimizers, and what each has beside or instead.
COMMON = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "rank": None,
    "update_proj_gap": 200,
    "scale": 0.25,
    "proj_type": "right",
    "refresh": "subspace",
    "power_iterations": 1,
    "first_basis": "gradient",
    "gradients": "full",
    "adaptive_gap": False,
    "stable_overlap": 0.6,
    "max_gap_factor": 8,
    "refresh_budget": None,
    "stagger_refresh": True,
    "reproject_moments": True,
    "target_modules": None,
    "moment_dtype": "fp32",
    "unprojected_moment_dtype": None,
    "projector_storage": "auto",
    "projector_dtype": "fp32",
    "projector_rounding": "nearest",
    "stochastic_rounding": False,
    "seed": 0,
}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-6, "correct_bias": True}
OWN = {
    "GaLoreAdamW": ADAM,
    "GaLoreAdamW8bit": {**ADAM, "moment_dtype": "8bit", "projector_dtype": "int8"},
    "GaLoreAdafactor": {
        "eps": (1e-30, 1e-3),
        "clip_threshold": 1.0,
        "decay_rate": -0.8,
        "beta1": None,
        "scale_parameter": False,
        "relative_step": False,
        "warmup_init": False,
    },
    "APOLLOAdamW": {
        **ADAM,
        "scale": 1.0,
        "refresh": "random",
        "reproject_moments": False,
        "scaling": "channel",
        "norm_growth_limit": 1.01,
    },
    "FiraAdamW": {**ADAM, "norm_growth_limit": 1.01},
}
#: Hugging Face's names.
OTHER_NAMES = {
    "galore_adamw": "GaLoreAdamW",
    "galore_adamw_8bit": "GaLoreAdamW8bit",
    "galore_adafactor": "GaLoreAdafactor",
    "apollo_adamw": "APOLLOAdamW",
}

#: The ``ds_galore`` section of a configuration: keys and defaults.
SECTION = {
    "checkpoint": None,
    "checkpoint.mode": "differential",
    "checkpoint.full_every": 10,
    "checkpoint.async": True,
    "checkpoint.base_memory_gb": 4.0,
    "checkpoint.keep_last": None,
    "checkpoint.keep_every": None,
    "checkpoint.on_damage": "fail",
    "checkpoint.state_dtype": "exact",
    "checkpoint.links": "hardlink",
    "checkpoint.compression": CompressionConfig(),
    "checkpoint.compression.codec": "zstd",
    "checkpoint.compression.level": 1,
    "monitor": None,
    "monitor.log": None,
}

#: Arguments and options of every command, with the words that an option takes, and its default where it has one.
#: All of them have --json, --quiet (-q) and --help (-h) too, and --debug may stand anywhere.
COMMANDS = {
    "config check": "PATH",
    "diff": "FIRST SECOND",
    "estimate": (
        "--config --model-config --params --optimizer --rank --proj-type=right|left|std|reverse_std"
        " --refresh=subspace|svd|random --moment-dtype=fp32|bf16|8bit --unprojected-moment-dtype=fp32|bf16|8bit"
        " --projector-dtype=fp32|bf16|int8|int4 --projector-storage=auto|replicated|sharded --beta1"
        " --precision=fp32|bf16|fp16 --state-precision=fp32|bf16|fp16 --zero-stage --world-size[1] --steps"
        " --save-every --keep-last --full-every --sequence-length --activation-checkpointing(flag) --paper(flag)"
        " --table=8bit|crossover"
    ),
    "init": (
        "--model-config --params --gpus --gpu-memory --gpus-per-machine --host-memory --disk --steps --save-every"
        " --activations[30%] --precision=bf16|fp16|fp32[bf16] --keep-masters(flag) --rank --micro-batch[1]"
        " --accumulation[1] --output[ds_config.json] --force(flag) --yes/-y(flag)"
    ),
    "inspect": "PATH --tag --tensors(flag)",
    "list": "DIRECTORY --verify(flag)",
    "merge": (
        "PATH --tag OUT --dtype=fp32|bf16|fp16[fp32] --max-shard-size[5GB] --model-config --exclude-frozen(flag)"
        " --optimizer(flag) --format=safetensors|torch[safetensors] --prune[0.0] --quantize=int8 --workers[2]"
        " --overwrite(flag)"
    ),
    "report": "DIRECTORIES --output[report.html]",
    "reshard": (
        "PATH --tag OUT --world-size(required) --format=ds_galore|deepspeed[ds_galore] --sub-group-size --workers[2]"
        " --overwrite(flag)"
    ),
    "rollback": "DIRECTORY --to(required)",
    "verify": "PATH --tag --quick(flag) --sample[1/1]",
}


def called(function: Any) -> str:
    """A signature without annotations; a default that is a function is left out."""
    parameters = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=inspect.Parameter.empty if inspect.isfunction(each.default) else each.default,
        )
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def test_public_names_and_signatures_are_these():
    assert set(ds_galore.__all__) == set(NAMES)
    assert set(ds_galore.__all__) <= set(dir(ds_galore))
    for name, signature in NAMES.items():
        found = getattr(ds_galore, name)
        if signature is not None:
            assert called(found) == signature, name
    with pytest.raises(AttributeError):
        ds_galore.nothing  # noqa: B018


def test_errors_and_their_exit_statuses_are_these():
    assert {name: getattr(ds_galore, name).exit_code for name in EXIT_CODES} == EXIT_CODES
    assert set(EXIT_CODES) == {name for name in NAMES if name.endswith("Error")}
    assert CheckpointStore is not None  # imports the errors of checkpoints, which have statuses of their own

    def below(kind: type) -> list[type]:
        return [each for child in kind.__subclasses__() for each in (child, *below(child))]

    statuses = [each.exit_code for each in below(DsGaloreError)]
    assert len(statuses) == len(set(statuses))


@pytest.mark.parametrize("name", OWN)
def test_hyperparameters_and_their_defaults_are_these(name):
    fields = OPTIMIZERS[name].model_fields
    assert {key: each.default for key, each in fields.items()} == {**COMMON, **OWN[name]}
    assert all(each.description for each in fields.values())


def test_optimizers_and_their_other_names_are_these():
    assert list(OPTIMIZERS) == list(OWN)
    assert dict(ALIASES) == OTHER_NAMES
    assert dict(LAYERWISE) == {f"{name}_layerwise": kind for name, kind in OTHER_NAMES.items() if kind != "APOLLOAdamW"}
    from transformers.training_args import OptimizerNames

    assert {*ALIASES, *LAYERWISE} <= {each.value for each in OptimizerNames}


def test_the_section_of_a_configuration_is_this():
    found = {
        f"{prefix}{each.alias or name}": each.default
        for prefix, model in (
            ("", DsGaloreConfig),
            ("checkpoint.", CheckpointConfig),
            ("checkpoint.compression.", CompressionConfig),
            ("monitor.", MonitorConfig),
        )
        for name, each in model.model_fields.items()
    }
    assert found == SECTION


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def described(parameter: click.Parameter) -> str:
    """An argument or option as the table has it."""
    if isinstance(parameter, click.Argument):
        return str(parameter.name).upper()
    assert isinstance(parameter, click.Option)
    text = "/".join(parameter.opts)
    if isinstance(parameter.type, click.Choice):
        text += f"={'|'.join(parameter.type.choices)}"
    if parameter.is_flag:
        return f"{text}(flag)"
    if parameter.required:
        return f"{text}(required)"
    default = parameter.to_info_dict()["default"]
    return text if default is None else f"{text}[{default}]"


def test_commands_and_options_are_these():
    found = dict(commands(main))
    assert sorted(found) == sorted(COMMANDS)
    for name, command in found.items():
        own = [each for each in command.params if each.name not in ("as_json", "quiet")]
        assert " ".join(map(described, own)) == COMMANDS[name], name
        assert {"--json", "--quiet", "-q"} <= {opt for each in command.params for opt in each.opts}, name
        assert command.help, name
    assert [each.opts for each in main.params] == [["--version"], ["--debug"]]


_LAZY = """
import sys

import ds_galore

ds_galore.enable()
print(sorted({"accelerate", "transformers", "peft"} & {name.partition(".")[0] for name in sys.modules}))
from accelerate import accelerator
from transformers import trainer, trainer_optimizer
from transformers.integrations import deepspeed

ours = [
    accelerator.map_pytorch_optim_to_deepspeed,
    deepspeed.deepspeed_optim_sched,
    trainer.get_last_checkpoint,
    trainer_optimizer._OPTIMIZER_HANDLERS["galore_adamw"],
]
print([hasattr(each, "_ds_galore_wrapped") for each in ours])
"""


def test_what_a_job_does_not_use_is_not_imported_and_changed_when_it_is():
    done = subprocess.run([sys.executable, "-c", _LAZY], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "[True, True, True, True]"]


def test_a_transformers_whose_names_are_not_ours_is_told_of(monkeypatch):
    from types import SimpleNamespace

    from transformers.integrations import deepspeed

    ds_galore.enable()
    monkeypatch.delitem(sys.modules, "transformers.trainer_optimizer", raising=False)
    config, given = SimpleNamespace(config={}), SimpleNamespace(optim="galore_adamw")
    with pytest.raises(ds_galore.ConfigError, match=r"optim is 'galore_adamw': .*; install a newer one"):
        deepspeed.deepspeed_optim_sched(None, config, given)
