"""Universal checkpoints that DeepSpeed's own program made, read like the others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from ds_galore.errors import DataError
from ds_galore.tools.merge import load_state_dict, merge_checkpoint
from ds_galore.tools.reshard import reshard_checkpoint
from tests.checkpoint.engines import ADAMW
from tests.tools.test_merge import both, run, same_bits


@pytest.fixture(scope="module", params=[3, 2])
def universal(request, pool, tmp_path_factory):
    """A save directory with a universal checkpoint, DeepSpeed's own of the same state, and merged weights."""
    directory = tmp_path_factory.mktemp("universal")
    extra = {"zero": {"stage": request.param}, "special": request.param == 3}
    _, expected = pool.run(2, both, str(directory), ADAMW, extra)[0]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    arguments = [
        "--input_folder",
        str(directory / "native" / "b"),
        "--output_folder",
        str(directory / "universal" / "b"),
    ]
    subprocess.run([*command, *arguments], check=True, capture_output=True, cwd=directory, timeout=170)
    return directory, expected


def test_weights_and_moments_are_those_of_the_checkpoint_that_it_was_made_of(universal, tmp_path):
    directory, expected = universal
    merge_checkpoint(directory / "universal", tmp_path / "out", optimizer=True)
    merge_checkpoint(directory / "native", tmp_path / "native", optimizer=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    aliases = load_state_dict(directory / "universal").source.aliases
    assert set(found) | set(aliases) == set(expected)
    for name, tensor in found.items():
        wanted = expected[name].float() if expected[name].is_floating_point() else expected[name]
        assert same_bits(tensor, wanted), name
    moments, wanted = (load_file(tmp_path / each / "optimizer.safetensors") for each in ("out", "native"))
    assert moments.keys() == wanted.keys()
    assert all(same_bits(moments[name], tensor) for name, tensor in wanted.items())


def test_other_commands_know_it_too(universal, tmp_path):
    directory, _ = universal
    source = str(directory / "universal")
    (row,) = json.loads(run("list", source, "--json").stdout)
    assert (row["tag"], row["step"], row["kind"], row["state"]) == ("b", 5, "universal", "intact")
    assert json.loads(run("inspect", source, "--json").stdout)["format"] == "deepspeed universal"
    assert run("verify", source).returncode == 0
    done = run("diff", f"{source}/b", str(directory / "native" / "b"), "--json")
    assert done.returncode == 0, done.stdout
    with pytest.raises(DataError, match="is a universal checkpoint"):
        reshard_checkpoint(source, tmp_path / "out", world_size=2)
    shutil.copytree(source, tmp_path / "run")
    part = tmp_path / "run" / "b" / "zero" / "model.norm.weight" / "fp32.pt"
    part.write_bytes(part.read_bytes()[:-300])
    done = run("verify", str(tmp_path / "run"))
    assert (done.returncode, "fp32.pt: is damaged" in done.stderr) == (1, True)
    part.unlink()
    done = run("merge", str(tmp_path / "run"), str(tmp_path / "out"))
    assert (done.returncode, "fp32.pt: is missing" in done.stderr) == (1, True)
