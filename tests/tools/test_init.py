"""``ds-galore init``: what is chosen for which machines, that it works, and how it is asked for and written."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ds_galore import check_deepspeed_config
from ds_galore.checkpoint import files
from ds_galore.cli.proposing import BUFFERS, CHOICES, Machines, Run, _checkpoints, _Model, propose
from ds_galore.cli.starting import init
from ds_galore.errors import ConfigError
from ds_galore.explain import explain
from ds_galore.tools.estimate import estimate
from ds_galore.tools.footprint import footprint
from ds_galore.tools.llamas import FAMILY
from ds_galore.tools.storage import Schedule, peak_storage, storage
from tests import jobs
from tests.test_cli import ROOT, command

GIB = 2**30
SEVEN = {"params": FAMILY["7B"].parameters}
NUMEL = FAMILY["7B"].parameters


def machines(gpus: int, gib: float, *, host: float | None = None, disk: float = 1e13, room: float = 0.3) -> Machines:
    memory = round(gib * GIB)
    return Machines(
        gpus, memory, round(room * memory), min(gpus, 8), None if host is None else round(host * GIB), int(disk)
    )


# ---------------------------------------------------------------------- what is chosen


@pytest.mark.parametrize(
    ("place", "name", "stage", "before"),
    [
        (machines(8, 80), "GaLoreAdamW, fp32 moments", 2, 0),
        (machines(8, 40), "GaLoreAdamW, fp32 moments", 2, 0),
        (machines(8, 24), "GaLoreAdamW, fp32 moments", 3, 1),
        (machines(2, 40), "GaLoreAdamW8bit, bf16 without fp32 masters", 2, 4),
        (machines(1, 80), "GaLoreAdamW8bit, fp32 masters", 3, 3),
        (machines(1, 24, host=256), "GaLoreAdamW, optimizer offloaded", 2, 6),
        (machines(1, 24, host=128), "GaLoreAdamW8bit, optimizer offloaded", 2, 8),
        (machines(1, 16, host=256), "GaLoreAdamW, optimizer and weights offloaded", 3, 10),
    ],
)
def test_the_first_choice_that_fits_is_taken_and_the_others_are_refused_with_figures(place, name, stage, before):
    found = propose(Run(SEVEN), place)
    assert (found.choice.name, found.estimate.zero_stage, len(found.refused)) == (name, stage, before)
    assert found.footprint.on_device(place.room) <= place.gpu_memory
    order = [each.name for each in CHOICES]
    assert [order.index(each.name) for each in found.refused] == sorted(
        order.index(each.name) for each in found.refused
    )
    for each in found.refused:
        limit = place.gpu_memory if each.where == "gpu" else place.host_memory
        assert each.needs - limit == each.missing > 0
        assert "too much" in each.reason


def test_masters_are_kept_where_that_is_asked_for():
    place = machines(1, 40, host=512)
    assert propose(Run(SEVEN), place).choice.offload == ("offload_optimizer",)
    place = machines(2, 40, host=512)
    assert propose(Run(SEVEN), place).choice.bf16
    kept = propose(Run(SEVEN, keep_masters=True), place)
    assert kept.choice.name == "GaLoreAdamW, optimizer offloaded"
    assert not any("without fp32" in each.name for each in kept.refused)


def test_memory_by_hand():
    found = propose(Run(SEVEN), machines(8, 80))
    part = NUMEL // 8  # every shape divides by 8
    low = 32 * (4 * 4096 + 2 * 11008 + 4096) * 1024
    others = NUMEL - 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    device = found.footprint.device
    assert device["weights"] == 2 * NUMEL  # whole at stage 2
    assert device["gradients"] == 2 * part
    assert device["master_weights"] == 4 * part
    assert device["moments"] == pytest.approx(8 * (low + others) / 8, rel=1e-6)
    assert device["projectors"] == pytest.approx(4 * 32 * (4 * 4096 + 2 * 4096 + 11008) * 1024 / 8, rel=1e-6)
    assert device["reduction_bucket"] == 2 * 2 * 200_000_000  # two of them, while communication overlaps
    update = found.footprint.phases["update"]
    assert found.footprint.step == sum(update.values())
    assert update["flat_gradients"] == 6 * part
    assert 4 * 2**26 * 0.9 < update["whole_projectors"] <= 4 * 2**26
    assert update["refreshes"] == 6 * 4 * 11008 * 1024  # one matrix on a step: its bases, and four blocks to work with
    assert found.footprint.phases["norm"] == {"a_gradient_in_fp64": 8 * 32000 * 4096 // 8}
    assert found.footprint.host == {}
    assert found.footprint.snapshot == device["master_weights"] + device["moments"] + device["projectors"]
    third = propose(Run(SEVEN), machines(8, 24)).footprint
    assert third.device["weights"] == 2 * part
    assert third.device["reduction_bucket"] == 2 * 200_000_000
    assert third.device["gathered_weights"] == 2 * 1_050_000_000  # a billion weights at once, and prefetched
    offloaded = propose(Run(SEVEN), machines(1, 24, host=256)).footprint
    assert set(offloaded.device) == {"weights", "reduction_bucket"}
    assert (
        offloaded.device["reduction_bucket"] == 2 * 200_000_000 + 2 * 32000 * 4096
    )  # the largest gradient, on its way
    assert offloaded.host["master_weights"] == 4 * NUMEL
    assert offloaded.host["gradients"] == (2 + 4) * NUMEL
    assert offloaded.step == 0


def test_the_figures_are_those_of_the_planner_for_the_same_file(tmp_path):
    place = ["--gpus", "16", "--gpu-memory", "24GiB", "--disk", "1TB"]
    done = invoke(tmp_path, "--params", "13e9", *place, "--json")
    told = json.loads(done.stdout)
    again = command(
        *("estimate", "--config", str(tmp_path / "ds.json"), "--params", "13e9", "--world-size", "16", "--json")
    )
    planned = json.loads(again.stdout)["memory_per_rank"]
    for kind in ("weights", "gradients", "master_weights", "moments", "projectors"):
        assert told["memory"]["device"][kind] == planned[kind]


def test_tight_memory_gets_small_buffers():
    room = dict.fromkeys(("reduce_bucket_size", "sub_group_size"))
    sizes = []
    for gib in (24, 15, 13):
        zero = propose(Run(SEVEN), machines(8, gib)).config["zero_optimization"]
        sizes.append([zero[key] for key in room])
    assert sizes == [[each[0], each[3]] for each in BUFFERS]
    small = propose(Run({"params": FAMILY["60M"].parameters}), machines(1, 8)).config["zero_optimization"]
    assert small["reduce_bucket_size"] == 59_000_000  # not larger than the model, since it is allocated whole


def test_the_rank_is_a_quarter_or_what_is_asked_for_and_large_models_get_a_smaller_rate():
    small = propose(Run({"params": FAMILY["130M"].parameters}), machines(1, 24)).config["optimizer"]["params"]
    large = propose(Run(SEVEN), machines(8, 80)).config["optimizer"]["params"]
    assert (small["rank"], small["lr"], small["update_proj_gap"]) == (192, 0.01, 200)
    assert (large["rank"], large["lr"], large["update_proj_gap"]) == (1024, 0.005, 500)
    assert propose(Run(SEVEN, rank=128), machines(8, 80)).config["optimizer"]["params"]["rank"] == 128


def test_sizes_by_name_are_those_of_the_shipped_models():
    for name, llama in FAMILY.items():
        shipped = json.loads((ROOT / "configs" / "models" / f"llama_{name.lower()}.json").read_text())
        keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        assert [shipped[key] for key in keys] == [llama.hidden, llama.intermediate, llama.layers, llama.vocabulary]
        assert not shipped["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("choice", "precision"),
    [(choice, each) for choice in CHOICES for each in ("bf16", "fp16", "fp32") if each == "bf16" or not choice.bf16],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_choice_passes_every_check(choice, precision):
    """Ours, of which no key may be idle, and DeepSpeed's own parser."""
    from deepspeed.runtime.config import DeepSpeedConfig

    run = Run({"params": FAMILY["1B"].parameters}, precision=precision, steps=1000, save_every=100)
    model = _Model(run)
    for stage in choice.stages:
        for sizes in BUFFERS:
            config = model.config(choice, stage, sizes, 4)
            job = model.job(config, 4)
            _checkpoints(config, estimate(job), footprint(config, job), run, machines(4, 80, host=512), [])
            found = explain(config)
            assert (found.conflicts, found.ignored) == ([], [])
            check_deepspeed_config(config)
            DeepSpeedConfig(config)


# ---------------------------------------------------------------------- nothing fits


def test_what_is_said_to_help_helps():
    with pytest.raises(ConfigError) as error:
        propose(Run(SEVEN), machines(1, 24))
    told = str(error.value)
    assert "\n" not in told
    assert re.search(r"needs 5\d\.\d GB a GPU, 2\d\.\d GB more than there is", told)
    gpus = int(re.search(r"what would help: (\d+) such GPUs", told)[1])
    host = float(re.search(r"--host-memory ([\d.]+)GB", told)[1])
    assert not propose(Run(SEVEN), machines(gpus, 24)).choice.offload
    assert propose(Run(SEVEN), machines(1, 24, host=host * 1e9 / GIB)).choice.offload
    with pytest.raises(ConfigError):
        propose(Run(SEVEN), machines(1, 24, host=(host - 0.2) * 1e9 / GIB))
    with pytest.raises(ConfigError):
        propose(Run(SEVEN), machines(gpus // 2, 24))


def test_nothing_is_written_where_nothing_fits(tmp_path):
    done = command(
        *("init", "--params", "7B", "--gpus", "1", "--gpu-memory", "8GiB", "--disk", "1TB"),
        *("--output", str(tmp_path / "ds.json")),
        block="torch",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ds-galore: error: nothing fits 1 GPU of 8.6 GB with 2.6 GB left for activations; ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(("keep", "every"), [(1, 1), (1, 3), (2, 10), (5, 2), (7, 3)])
def test_the_peak_is_the_most_that_any_moment_takes(keep, every, incremental):
    sizes = {"full_compressed": [1000, 1000], "differential_compressed": [300, 300], "total": 0}
    schedule = Schedule(1, 1, keep, every, incremental=incremental)
    moments = [
        storage(Schedule(saves, 1, keep + 1, every, incremental=incremental), sizes)["ours"][1]
        for saves in range(1, 60)  # the next one is there, and none has gone for it yet
    ]
    assert peak_storage(schedule, 1000, 300) == max(moments)


@pytest.mark.parametrize(
    ("save_every", "mode", "full_every"),
    [(None, "differential", 10), (10, "differential", 10), (50, "differential", 5), (200, "differential", 2)],
)
def test_the_base_is_renewed_while_its_bases_live(save_every, mode, full_every):
    run = Run({"params": FAMILY["1B"].parameters}, save_every=save_every)
    found = propose(run, machines(8, 80)).config["ds_galore"]["checkpoint"]
    assert (found["mode"], found["full_every"]) == (mode, full_every)


def test_saves_further_apart_than_refreshes_are_incremental_and_no_gain_is_planned_with():
    run = Run({"params": FAMILY["1B"].parameters}, save_every=1000)
    found = propose(run, machines(8, 80))
    assert found.config["ds_galore"]["checkpoint"]["mode"] == "incremental"
    assert found.storage["difference"] == found.storage["full"]


def test_as_many_checkpoints_stay_as_the_disk_holds():
    run = Run({"params": FAMILY["1B"].parameters}, save_every=50)
    kept = []
    for gigabytes in (200, 40, 30, 25, 20):
        found = propose(run, machines(8, 80, disk=gigabytes * 1e9))
        checkpoint = found.config["ds_galore"]["checkpoint"]
        kept.append((checkpoint["mode"], checkpoint["keep_last"]))
        assert found.storage["at_most"] <= 0.9 * gigabytes * 1e9
        assert explain(found.config).ignored == []
    assert kept == [*(("differential", number) for number in (5, 4, 2, 1)), ("full", 1)]
    with pytest.raises(ConfigError, match=r"--disk 10\.0 GB is too small: .* more than there is; what would help"):
        propose(run, machines(8, 80, disk=1e10))


def test_what_host_memory_leaves_is_for_the_base():
    known = propose(Run(SEVEN), machines(8, 80, host=512))
    base = known.config["ds_galore"]["checkpoint"]["base_memory_gb"]
    assert known.footprint.snapshot - 1e8 < base * 1e9 <= known.footprint.snapshot
    tight = propose(Run(SEVEN), machines(8, 80, host=60))
    base = tight.config["ds_galore"]["checkpoint"]["base_memory_gb"]
    assert 8 * (base * 1e9 + tight.footprint.snapshot) <= 0.9 * 60 * GIB
    assert "base_memory_gb" not in propose(Run(SEVEN), machines(8, 80)).config["ds_galore"]["checkpoint"]
    assert any("host memory has" in note for note in propose(Run(SEVEN), machines(8, 80, host=20)).notes)


# ---------------------------------------------------------------------- the command


PLACE = ("--gpus", "4", "--gpu-memory", "24GiB", "--disk", "1TB")


def invoke(directory: Path, *arguments: str) -> Any:
    return CliRunner().invoke(init, [*arguments, "--output", str(directory / "ds.json")])


def test_the_text_beside_it_repeats_the_command_and_says_why(tmp_path):
    done = invoke(tmp_path, "--model-config", "llama_7b", *PLACE, "--steps", "5000", "--save-every", "100")
    assert done.exception is None, done.stderr
    text = (tmp_path / "ds.md").read_text()
    again = re.search(r"```sh\n(ds-galore init .*)\n```", text)[1].split()
    config = json.loads((tmp_path / "ds.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    assert invoke(other, *again[2 : again.index("--output")]).exception is None
    assert json.loads((other / "ds.json").read_text()) == config
    for expected in (
        "| GaLoreAdamW, fp32 moments | 2 | needs",
        "fits, and is taken",
        "Activations are not counted: 7.7 GB of a GPU are left",
        "It has not been run",
        "- optimizer: GaLore",
        "`differential`, every 6th full",
    ):
        assert expected in text
    assert config["scheduler"]["params"] == {
        "total_num_steps": 5000,
        "warmup_num_steps": 500,
        "warmup_type": "linear",
        "cos_min_ratio": 0.1,
    }
    assert "fits; of 25.8 GB a GPU" in done.stdout
    checked = command("config", "check", str(tmp_path / "ds.json"))
    assert checked.returncode == 0
    assert "ignored" not in checked.stdout


def test_json_holds_the_figures_and_quiet_nothing(tmp_path):
    done = invoke(tmp_path, "--params", "7B", *PLACE, "--json")
    found = json.loads(done.stdout)
    assert found["config"] == json.loads((tmp_path / "ds.json").read_text())
    assert found["memory"]["needed"] <= found["memory"]["gpu_memory"] == 24 * GIB
    assert found["memory"]["needed"] == sum(found["memory"]["device"].values()) + found["memory"]["room"]
    assert found["refused"][0]["reason"].startswith("needs ")
    done = invoke(tmp_path, "--params", "7B", *PLACE, "--quiet", "--force")
    assert (done.exception, done.stdout, done.stderr) == (None, "", "")


def test_nothing_is_overwritten_without_force(tmp_path):
    (tmp_path / "ds.md").write_text("mine")
    done = invoke(tmp_path, "--params", "7B", *PLACE)
    assert isinstance(done.exception, ConfigError)
    assert "ds.md exists; --force replaces it" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["ds.md"]
    assert invoke(tmp_path, "--params", "7B", *PLACE, "--force").exception is None
    assert (tmp_path / "ds.md").read_text().startswith("# ds.json\n")


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    write, calls = files.replace_file, []

    def second_fails(path: Path, blocks: Any, **options: Any) -> Any:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, blocks, **options)

    monkeypatch.setattr(files, "replace_file", second_fails)
    assert isinstance(invoke(tmp_path, "--params", "7B", *PLACE).exception, OSError)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model-config or --params is missing: give it"),
        (["--params", "7B"], "--gpus is missing"),
        (["--params", "7B", "--gpus", "2"], "--gpu-memory is missing"),
        (["--params", "7B", "--gpus", "2", "--gpu-memory", "1GB"], "--disk is missing"),
        (["--params", "7B", "--model-config", "llama_7b", *PLACE], "and not by both"),
        (["--params", "many", *PLACE], "model 'many': no such file or directory, and none of llama_60m,"),
        (["--params", "README.md", *PLACE], r"--params README.md: it must be a number"),
        (["--params", "7B", *PLACE, "--steps", "5", "--save-every", "6"], "--save-every 6 is more than --steps 5"),
        (["--params", "60M", "--rank", "600", *PLACE], "rank is 600: no matrix of a Llama 60M is larger"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    for flags in ([], ["--yes"]):
        done = invoke(tmp_path, *arguments, *flags)
        assert isinstance(done.exception, ConfigError), done
        assert message in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--gpu-memory", "80 pounds", "'80 pounds' is no size such as 5GB or 512MiB"),
        ("--activations", "100%", "'100%' is no share from 0% to below 100%"),
        ("--activations", "some", "'some' is no size"),
        ("--output", "ds.md", ".md is for the text beside it"),
        ("--output", "nowhere/ds.json", "nowhere is no directory"),
    ],
)
def test_wrong_values_are_named(tmp_path, monkeypatch, flag, value, message):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(init, ["--params", "7B", *PLACE, flag, value])
    assert done.exit_code != 0
    assert message in done.stderr + str(done.exception)
    assert list(tmp_path.iterdir()) == []


def on_terminal(directory: Path, answers: list[str]) -> tuple[int, str]:
    """The command on a terminal of its own, with answers typed one after another."""
    leader, follower = pty.openpty()
    code = "from ds_galore.cli import main; main(prog_name='ds-galore')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "init", "--output", str(directory / "ds.json")],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=ROOT,
    )
    os.close(follower)
    os.write(leader, "".join(f"{answer}\n" for answer in answers).encode())
    told = b""
    try:
        while part := os.read(leader, 4096):
            told += part
    except OSError:  # it has ended
        pass
    os.close(leader)
    return process.wait(timeout=60), told.decode()


def test_on_a_terminal_what_is_not_given_is_asked_for(tmp_path):
    status, told = on_terminal(tmp_path, ["llama_1b", "no", "4", "24GiB", "", "", "1000", "", "y"])
    assert status == 0, told
    assert "'no' is not a whole number above 0" in told
    assert "Free disk for checkpoints [" in told
    config = json.loads((tmp_path / "ds.json").read_text())
    assert config["optimizer"]["params"]["rank"] == 512
    assert config["scheduler"]["params"]["total_num_steps"] == 1000
    (tmp_path / "ds.json").unlink()
    (tmp_path / "ds.md").unlink()
    status, told = on_terminal(tmp_path, ["llama_1b", "4", "24GiB", "1TB", "", "", "", "n"])
    assert status == 130, told
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- a job with it


def trained(config: dict[str, Any], directory: str) -> tuple[list[float], bool, str]:
    """Losses of a small Llama, whether a checkpoint is exactly loaded, and the optimizer."""
    import torch
    import torch.distributed as dist

    engine = jobs.start(jobs.tiny_llama(), config)
    data = jobs.batches(6, dist.get_world_size())
    losses = jobs.train(engine, data)
    engine.save_checkpoint(directory, tag="a")
    engine.checkpoint_engine.wait()
    before = [each.clone() for each in engine.module.parameters()]
    jobs.train(engine, data[:2])
    same = [torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)]
    assert not all(same), "the check would not notice anything"
    engine.load_checkpoint(directory)
    same = [torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)]
    return losses, all(same), type(engine.basic_optimizer).__name__


def test_a_job_trains_saves_and_loads_with_it(pool, tmp_path):
    model = jobs.tiny_llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "model")
    place = ["--gpus", "2", "--gpu-memory", "1.2GB", "--disk", "1GB", "--steps", "6", "--save-every", "3"]
    done = invoke(tmp_path, "--model-config", str(tmp_path / "model"), *place)
    assert done.exception is None, done.exception
    config = json.loads((tmp_path / "ds.json").read_text())
    assert config["optimizer"]["params"]["rank"] == 8
    for losses, same, kind in pool.run(2, trained, config, str(tmp_path / "checkpoints")):
        assert losses[-1] < losses[0]
        assert same
        assert kind == "GaLoreAdamW"
