"""The ds-galore command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/zero3_galore.json"


def command(*arguments: str, block: str = "") -> subprocess.CompletedProcess[str]:
    """Run it; ``block`` names a module that must not be imported."""
    start = f"import sys; sys.modules[{block!r}] = None; " if block else ""
    code = f"{start}from ds_galore.cli import main; main(prog_name='ds-galore')"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_it_is_installed_under_its_name_and_runs_as_a_module():
    installed = subprocess.run(
        [Path(sys.executable).parent / "ds-galore", "--version"], capture_output=True, text=True, check=True
    )
    assert installed.stdout.startswith("ds-galore, version 0.")
    module = subprocess.run([sys.executable, "-m", "ds_galore", "--help"], capture_output=True, text=True, check=True)
    assert "estimate" in module.stdout


@pytest.mark.timed
def test_help_needs_neither_torch_nor_deepspeed_and_comes_at_once():
    begin = time.monotonic()
    assert command("--help", block="torch").returncode == 0
    assert time.monotonic() - begin < 2.0  # 0.25 s on an idle machine
    assert command("config", "check", CONFIG, block="torch").stdout.startswith(f"{CONFIG}: fine\nuses\n")


def test_a_wrong_configuration_is_one_line_and_status_2(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"optimizer": {"type": "GaLoreAdamW", "params": {"rank": 0}}}')
    done = command("config", "check", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"ds-galore: error: {path}: optimizer.params.rank is 0: input should be greater than or equal to 1\n"
    )
    assert "Traceback" in command("--debug", "config", "check", str(path)).stderr
    assert command("config", "check", "nowhere.json").returncode == 2
    assert command("estimate").returncode == 2


def test_estimate_gives_bytes_by_kind_without_deepspeed():
    arguments = ["estimate", "--config", CONFIG, "--model-config", "configs/models/llama_60m.json", "--world-size", "4"]
    done = command(*arguments, "--json", block="deepspeed")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, adamw = found["memory_per_rank"], found["plain_adamw"]["memory_per_rank"]
    assert adamw["moments"] == pytest.approx(2 * 4 * 58_073_600 / 4, rel=1e-3)
    assert adamw["weights"] * 2 == adamw["master_weights"]
    assert ours["weights"] == adamw["weights"]
    assert ours["moments"] < adamw["moments"]
    assert ours["projectors"] > 0
    assert ours["total"] == sum(value for kind, value in ours.items() if kind != "total")
    assert "projectors" in command(*arguments).stdout


def test_quiet_prints_nothing():
    for arguments in (["config", "check", CONFIG], ["estimate", "--params", "7e9"], ["estimate", "--paper"]):
        done = command(*arguments, "--quiet")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = json.loads(command("config", "check", CONFIG, "--json").stdout)
    assert (found["path"], found["fine"], found["conflicts"]) == (CONFIG, True, [])


def test_a_shell_completes_commands_and_options():
    for words, expected in (("ds-galore re", "reshard"), ("ds-galore reshard --wor", "--world-size")):
        environment = {
            **os.environ,
            "_DS_GALORE_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }
        program = Path(sys.executable).parent / "ds-galore"
        done = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
        assert expected in done.stdout


@pytest.mark.parametrize("path", ["nowhere", "README.md", "configs"])
def test_estimate_names_a_model_that_it_cannot_read(path):
    done = command("estimate", "--config", CONFIG, "--model-config", path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"ds-galore: error: --model-config {path}: ")
    assert "Traceback" not in done.stderr
