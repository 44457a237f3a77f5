"""accelerate's ``save_state`` and ``load_state`` with directories that it rotates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_galore.checkpoint.reader import CheckpointReader
from tests import jobs
from tests.checkpoint.engines import assert_same, logical


def prepared(directory: str) -> tuple[Any, Any]:
    """An accelerator that numbers its checkpoints and keeps two, and its engine."""
    import torch.distributed as dist
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, ProjectConfiguration

    import ds_galore

    for each in (AcceleratorState, PartialState, GradientState):
        each._reset_state()
    ds_galore.enable()
    section = {"ds_galore": {"checkpoint": {"mode": "differential", "full_every": 4}}}
    settings = jobs.config(jobs.galore(update_proj_gap=5), micro=3, **section)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        project_config=ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=2),
    )
    assert (accelerator.process_index, accelerator.num_processes) == (dist.get_rank(), 2)
    model = jobs.tiny_llama()
    from accelerate.utils import DummyOptim

    engine, *_ = accelerator.prepare(model, DummyOptim(model.parameters()))
    return accelerator, engine


def run(directory: str) -> list[str]:
    accelerator, engine = prepared(directory)
    data = jobs.batches(9, 6)
    kinds = []
    for step in range(6):
        jobs.train(engine, data[step : step + 1])
        accelerator.save_state()
        accelerator.wait_for_everyone()
    expected = logical(engine)
    losses = jobs.train(engine, data[6:])
    engine.checkpoint_engine.wait()
    for number in (4, 5):
        reader = CheckpointReader(Path(directory, "checkpoints", f"checkpoint_{number}", "pytorch_model"))
        assert reader.verify() == []
        kinds.append(f"{number}: {reader.manifest.kind}")
    assert sorted(path.name for path in Path(directory, "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_5"]
    accelerator, engine = prepared(directory)
    accelerator.load_state(str(Path(directory, "checkpoints", "checkpoint_5")))
    assert engine.global_steps == 6
    assert_same(expected, logical(engine))
    assert jobs.train(engine, data[6:]) == losses
    accelerator.project_configuration.iteration = 6
    accelerator.save_state()
    engine.checkpoint_engine.wait()
    after = CheckpointReader(Path(directory, "checkpoints", "checkpoint_6", "pytorch_model"))
    kinds.append(f"6: {after.manifest.kind}")
    return kinds


def test_save_state_and_load_state_with_directories_that_rotate(pool, tmp_path):
    outcomes = pool.run(2, run, str(tmp_path))
    pool.close()  # accelerate leaves its state in the workers
    assert outcomes[0] == ["4: full", "5: differential", "6: differential"]
    assert [path.name for path in (tmp_path / ".ds_galore-last-durable").iterdir()] == ["checkpoint_6"]
