"""Merging against DeepSpeed's ``zero_to_fp32`` and transformers' ``from_pretrained``; no torch, no leftovers."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ds_galore.checkpoint.errors import DamageError, FormatError
from ds_galore.checkpoint.store import CheckpointStore
from ds_galore.errors import ConfigError, DataError
from ds_galore.tools.merge import dequantize, load_state_dict, merge_checkpoint
from ds_galore.tools.torchfile import TorchFile
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, BF16, make, save

ROOT = Path(__file__).resolve().parent.parent.parent
GALORE = jobs.galore(update_proj_gap=5)


def both(directory: str, optimizer: dict[str, Any], extra: dict[str, Any]) -> Any:
    """The same state as our differential checkpoint and as DeepSpeed's own; the model's logits and what is merged."""
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine = make(optimizer, **extra)
    data = jobs.batches(6, BATCH)
    jobs.train(engine, data[:3])
    save(engine, f"{directory}/ours", "a")
    jobs.train(engine, data[3:5])
    save(engine, f"{directory}/ours", "b")
    engine.checkpoint_engine, save_ours = TorchCheckpointEngine(engine._config), engine.save_checkpoint
    save_ours.__wrapped__(f"{directory}/native", tag="b")
    dist.barrier()
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=data[5][:2]).logits.float()
    merged = get_fp32_state_dict_from_zero_checkpoint(f"{directory}/native") if dist.get_rank() == 0 else {}
    if dist.get_rank() == 0:
        engine.module.config.save_pretrained(f"{directory}/model")
    dist.barrier()
    return logits, {name: tensor.detach().clone() for name, tensor in merged.items()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    )


CASES = [
    (GALORE, {}),
    (GALORE, {"special": True, "zero": {"sub_group_size": 3000}}),
    (ADAMW, {"special": True, **BF16}),
    (ADAMW, {"zero": {"stage": 1}}),
    (ADAMW, {"zero": {"stage": 2}, "special": True}),
    (ADAMW, {"zero": {"stage": 2, "round_robin_gradients": True}, **BF16}),
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("optimizer", "extra"), CASES)
def test_a_merge_is_zero_to_fp32s_bit_for_bit_and_from_pretrained_takes_it(pool, tmp_path, optimizer, extra, ranks):
    from transformers import AutoModelForCausalLM

    logits, expected = pool.run(ranks, both, str(tmp_path), optimizer, extra)[0]
    for source in ("native", "ours"):
        out = tmp_path / f"merged-{source}"
        report = merge_checkpoint(tmp_path / source, out, model_config=tmp_path / "model", workers=2)
        assert report.step == 5
        found = load_file(out / "model.safetensors")
        lazy = load_state_dict(tmp_path / source)
        assert set(lazy) == set(expected)
        for name, tensor in expected.items():
            if name in lazy.source.aliases:
                assert name not in found
                continue
            # zero_to_fp32 leaves frozen 16-bit parameters as they are; the export has one dtype
            wanted = tensor.float() if tensor.is_floating_point() else tensor
            assert same_bits(found[name], wanted), name
            assert lazy[name].shape == tuple(tensor.shape)
        assert found.keys() <= expected.keys()
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        with torch.no_grad():
            again = loaded(input_ids=jobs.batches(6, BATCH)[5][:2]).logits
        if "bf16" not in extra:
            assert torch.equal(again, logits[: len(again)])


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A save directory of ours and one of DeepSpeed's, of the same state."""
    directory = tmp_path_factory.mktemp("saved")
    _, expected = pool.run(2, both, str(directory), GALORE, {"special": True})[0]
    return directory, expected


@pytest.fixture(scope="module")
def plain(pool, tmp_path_factory):
    """The same with AdamW."""
    directory = tmp_path_factory.mktemp("plain")
    pool.run(2, both, str(directory), ADAMW, {})
    return directory


def test_shards_dtypes_and_the_index(saved, tmp_path):
    directory, expected = saved
    for dtype, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        out = tmp_path / dtype
        report = merge_checkpoint(directory / "ours", out, dtype=dtype, max_shard_size=12_000)
        index = json.loads((out / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
        assert len(files) > 3
        assert sorted(report.files) == sorted([*files, "model.safetensors.index.json"])
        total = 0
        for name, file in index["weight_map"].items():
            with safe_open(out / file, framework="pt") as opened:
                tensor = opened.get_tensor(name)
            wanted = expected[name].to(kind) if expected[name].is_floating_point() else expected[name]
            assert same_bits(tensor, wanted), name
            total += tensor.numel() * tensor.element_size()
        assert index["metadata"]["total_size"] == total


def test_the_optimizer_goes_along_as_it_is(saved, tmp_path):
    directory, _ = saved
    merge_checkpoint(directory / "ours", tmp_path / "ours", optimizer=True)
    found = load_file(tmp_path / "ours" / "optimizer.safetensors")
    reader = CheckpointStore(directory / "ours").open("b")
    names = [name for name in reader.tensors if name.endswith(("/exp_avg", "/exp_avg_sq", "/projector"))]
    assert set(found) == set(names)
    for name in names:
        assert found[name].numpy().tobytes() == np.ascontiguousarray(reader.bits(name)).tobytes()


def test_pytorch_model_bin(saved, tmp_path):
    directory, expected = saved
    merge_checkpoint(directory / "ours", tmp_path / "bin", format="torch")
    found = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert set(found) == set(expected)
    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    merge_checkpoint(directory / "native", tmp_path / "bins", format="torch", max_shard_size=20_000, dtype="bf16")
    index = json.loads((tmp_path / "bins" / "pytorch_model.bin.index.json").read_text())
    for name, file in index["weight_map"].items():
        tensor = torch.load(tmp_path / "bins" / file, weights_only=True)[name]
        wanted = expected[name].to(torch.bfloat16) if expected[name].is_floating_point() else expected[name]
        assert same_bits(tensor, wanted), name


def test_pruning_and_int8_lose_what_they_say(saved, tmp_path):
    directory, expected = saved
    report = merge_checkpoint(directory / "ours", tmp_path / "pruned", prune=0.25)
    found = load_file(tmp_path / "pruned" / "model.safetensors")
    matrices = {name for name, tensor in expected.items() if tensor.dim() == 2 and name in found}
    assert set(report.pruned) == matrices
    for name in found:
        if name not in matrices:
            assert same_bits(found[name], expected[name])
            continue
        flat, original = found[name].flatten(), expected[name].flatten()
        zeroed = (flat == 0) & (original != 0)
        assert report.pruned[name] == int(0.25 * flat.numel()) >= int(zeroed.sum())
        assert original[zeroed].abs().max() <= flat[flat != 0].abs().min()
        assert torch.equal(flat[~zeroed], original[~zeroed])
    merge_checkpoint(directory / "ours", tmp_path / "int8", quantize="int8")
    with safe_open(tmp_path / "int8" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata()["lossy"] == "int8 with a scale a row"
    found = load_file(tmp_path / "int8" / "model.safetensors")
    for name in matrices:
        again = torch.from_numpy(dequantize(found[name].numpy(), found[f"{name}.scale"].numpy()))
        largest = expected[name].abs().amax(dim=1, keepdim=True)
        assert ((again - expected[name]).abs() <= largest * 0.51 / 127).all()


# ---------------------------------------------------------------------- mistakes and damage


def test_missing_and_extra_rank_files_are_refused_by_count_before_any_work(saved, tmp_path):
    directory, _ = saved
    for kind in ("optim", "model"):
        broken = tmp_path / kind
        shutil.copytree(directory / "native" / "b", broken)
        victim = broken / f"zero_pp_rank_1_mp_rank_00_{kind}_states.pt"
        shutil.copy(victim, broken / f"zero_pp_rank_2_mp_rank_00_{kind}_states.pt")
        with pytest.raises(DamageError, match=rf"was written by 2 ranks, and 3 \*_{kind}_states.pt are there"):
            merge_checkpoint(broken, tmp_path / "out")
        (broken / f"zero_pp_rank_2_mp_rank_00_{kind}_states.pt").unlink()
        victim.unlink()
        with pytest.raises(DamageError, match=rf"was written by 2 ranks, and 1 \*_{kind}_states.pt are there"):
            merge_checkpoint(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_there_is_left_alone_without_overwrite(saved, tmp_path):
    directory, _ = saved
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match=r"out: is not empty; give another directory, or --overwrite"):
        merge_checkpoint(directory / "ours", out)
    assert (out / "mine.txt").read_text() == "precious"
    merge_checkpoint(directory / "ours", out, overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors"]
    with pytest.raises(DataError, match="no such directory, and x is to be made in it"):
        merge_checkpoint(directory / "ours", tmp_path / "nowhere" / "x")
    for key, value, message in (
        ("dtype", "fp8", "dtype is 'fp8': it must be fp32 or bf16 or fp16"),
        ("prune", 1.0, r"prune is 1.0: it must be at least 0 and less than 1"),
        ("quantize", "int4", "quantize is 'int4'"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge_checkpoint(directory / "ours", tmp_path / "y", **{key: value})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_output_that_is_or_holds_what_is_read_is_refused_even_to_be_overwritten(saved, tmp_path):
    directory, _ = saved
    shutil.copytree(directory / "ours", tmp_path / "run")
    for out in (tmp_path / "run", tmp_path / "run" / "b", tmp_path):
        with pytest.raises(DataError, match="is, or holds, the checkpoint that is read"):
            merge_checkpoint(tmp_path / "run", out, overwrite=True)
    assert CheckpointStore(tmp_path / "run").open("b").verify() == []


def test_descriptions_of_tensors_cannot_be_used_to_read_or_allocate_memory(tmp_path):
    # BUILD on what stands for a tensor: pickled as an object with a state.
    stream = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x08tQK\x00(K\x08t(K\x01t\x89NtR"
    )
    bombs = {
        "build": stream + b"}X\x06\x00\x00\x00strideK\x00\x85sb.",
        "bytearray": b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x10\x00\x85R.",
        "stride": stream.replace(b"(K\x08t(K\x01t", b"(\x8a\x06\x00\x00\x00\x00\x10\x00t(K\x00t") + b".",
    }
    for name, data in bombs.items():
        with zipfile.ZipFile(tmp_path / f"{name}.pt", "w") as archive:
            archive.writestr("x/data.pkl", data)
            archive.writestr("x/data/0", bytes(32))
        with pytest.raises(DamageError):
            [tensor.bits() for tensor in _tensors(TorchFile(tmp_path / f"{name}.pt").content)]
    with zipfile.ZipFile(tmp_path / "fine.pt", "w") as archive:
        archive.writestr("x/data.pkl", stream + b".")
        archive.writestr("x/data/0", bytes(range(32)))
    assert TorchFile(tmp_path / "fine.pt").content.bits().tobytes() == bytes(range(32))


def test_damage_leaves_nothing_behind(saved, tmp_path):
    directory, _ = saved
    shutil.copytree(directory / "ours" / "b", tmp_path / "b")
    victim = next((tmp_path / "b").glob("rank-00001-*.diff.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-200] ^= 1
    victim.unlink()
    victim.write_bytes(data)
    with pytest.raises(DamageError, match=victim.name):
        merge_checkpoint(tmp_path / "b", tmp_path / "out", optimizer=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ds-galore-was-here",)


def test_a_malicious_pickle_is_refused_and_not_run(saved, tmp_path):
    directory, _ = saved
    marker = Path("/tmp/ds-galore-was-here")
    marker.unlink(missing_ok=True)
    shutil.copytree(directory / "native" / "b", tmp_path / "b")
    torch.save({"optimizer_state_dict": _Evil()}, tmp_path / "b" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(DamageError, match=r"names posix\.system, which is not among what may be read"):
        merge_checkpoint(tmp_path / "b", tmp_path / "out")
    assert not marker.exists()
    for name, payload in (("legacy", pickle.dumps(_Evil())), ("text", b"hello"), ("empty", b"")):
        path = tmp_path / f"{name}.pt"
        path.write_bytes(payload)
        with pytest.raises(FormatError, match="is no zip archive"):
            TorchFile(path)
    assert not marker.exists()


def test_native_files_with_flipped_bytes_raise_nothing_but_our_errors(saved, tmp_path):
    directory, _ = saved
    original = (directory / "native" / "b" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes()
    generator = np.random.default_rng(0)
    begin = original.find(b"data.pkl")
    positions = np.concatenate([generator.integers(0, len(original), 150), begin + generator.integers(0, 4000, 250)])
    path = tmp_path / "broken.pt"
    told = 0
    for position in positions:
        data = bytearray(original)
        data[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(data)
        try:
            found = TorchFile(path)
            for tensor in _tensors(found.content):
                if tensor.numel < 10**6:
                    tensor.bits()
        except (DamageError, FormatError):
            told += 1
    assert told > 50


def _tensors(value: Any) -> Any:
    from ds_galore.tools.torchfile import TorchTensor

    if isinstance(value, TorchTensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def test_what_torch_saves_is_read_without_torch(tmp_path):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    value = {
        "whole": base,
        "row": base[1],
        "column": base[:, 2],
        "turned": base.t(),
        "bf16": base.to(torch.bfloat16),
        "bool": base > 3,
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base * 2),
        "numbers": [1, 2.5, None, "text", (3, 4), {5}],
        "dtype": torch.float16,
        "size": base.shape,
        "random": np.random.default_rng(0).standard_normal(3),
    }
    torch.save(value, tmp_path / "x.pt")
    found = TorchFile(tmp_path / "x.pt").content
    for key, tensor in value.items():
        if isinstance(tensor, torch.Tensor):
            assert found[key].shape == tuple(tensor.shape), key
            expected = (
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            )
            assert found[key].bits().tobytes() == expected, key
            if tensor.numel() > 3:
                whole = found[key].bits()
                assert np.array_equal(found[key].bits(1, 3), whole[1:3])
    assert found["numbers"] == value["numbers"]
    assert found["size"] == (4, 6)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("x/data.pkl", pickle.dumps(1, protocol=2))
    (tmp_path / "y.pt").write_bytes(archive.getvalue())
    assert TorchFile(tmp_path / "y.pt").content == 1


# ---------------------------------------------------------------------- as a program

DEEPSPEED = ("--format", "deepspeed")
FORMATS = ("ds_galore", "deepspeed")
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, *rest):
        if name.split(".")[0] in ("torch", "deepspeed", "transformers", "accelerate"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from ds_galore.cli import main
main()
"""


def run(*arguments: str, blocked: bool = True, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED] if blocked else [sys.executable, "-m", "ds_galore"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, **kwargs)


def test_every_command_runs_where_torch_and_deepspeed_cannot_be_imported(saved, plain, tmp_path):
    directory, expected = saved
    ours, native = str(directory / "ours"), str(directory / "native")
    for number, source in enumerate((ours, native)):
        done = run("merge", source, str(tmp_path / f"m{number}"), "--dtype", "bf16", "--optimizer", "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["parameters"] == sum(t.numel() for n, t in expected.items() if n != "lm_head.weight")
        assert report["bytes"] == sum(path.stat().st_size for path in (tmp_path / f"m{number}").iterdir())
        done = run("verify", source)
        assert (done.returncode, "fine" in done.stdout) == (0, True), done.stdout + done.stderr
        done = run("inspect", source, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["step"] == 5
        assert run("inspect", source, "--tensors").returncode == 0
        done = run("list", source, "--json")
        rows = json.loads(done.stdout)
        assert [row["state"] for row in rows] == ["intact"] * len(rows)
        assert [row["tag"] for row in rows if row["latest"]] == ["b"]
        done = run("merge", source, str(tmp_path / f"t{number}"), "--format", "torch", "--quiet")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert run("rollback", source, "--to", "b", "--json").returncode == 0
        done = run("report", source, "--output", str(tmp_path / "report.html"), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["runs"][0]["step"] == 5
        for command in (["list"], ["inspect"], ["verify"], ["rollback", "--to", "b"]):
            done = run(command[0], source, *command[1:], "--quiet")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), command
    adamw = str(plain / "ours"), str(plain / "native")
    for number, (source, form) in enumerate([(ours, "ds_galore"), *((s, f) for s in adamw for f in FORMATS)]):
        out = str(tmp_path / f"r{number}")
        done = run("reshard", source, out, "--world-size", "3", "--format", form, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert (report["from_world_size"], report["world_size"], report["tag"], report["step"]) == (2, 3, "b", 5)
    for source in (ours, native):
        done = run("reshard", source, str(tmp_path / "refused"), "--world-size", "3", "--format", "deepspeed")
        assert (done.returncode, "low-rank states" in done.stderr) == (2, True)
    assert run("estimate", "--params", "7e9", "--json").returncode == 0
    assert run("config", "check", "configs/zero3_galore.json").returncode == 0
    rows = json.loads(run("list", ours, "--verify", "--json").stdout)
    assert [(row["tag"], row["step"], row["kind"], row["base"]) for row in rows] == [
        ("a", 3, "full", None),
        ("b", 5, "differential", "a"),
    ]
    assert rows[0]["shared"] == rows[1]["shared"] > 0
    same = run("diff", f"{ours}/b", f"{native}/b")
    assert same.returncode in (0, 1), same.stderr
    done = run("diff", f"{ours}/a", f"{ours}/b", "--json")
    assert done.returncode == 1
    changed = json.loads(done.stdout)
    assert changed["steps"] == [3, 5]
    assert not any("layers.0.self_attn" in name for name in changed["changed"])
    assert changed["changed"]["model.norm.weight"]["largest"] > 0
    assert run("diff", f"{ours}/a", f"{ours}/a", "--json").returncode == 0


def test_ours_and_native_of_the_same_state_do_not_differ(saved):
    directory, _ = saved
    done = run("diff", str(directory / "ours" / "b"), str(directory / "native" / "b"), "--json")
    found = json.loads(done.stdout)
    weights = {name: each for name, each in found["changed"].items() if "/" not in name}
    assert weights == {}, done.stderr


def test_mistakes_are_told_in_one_line_with_what_to_do(saved, tmp_path):
    directory, _ = saved
    ours = directory / "ours"
    (tmp_path / "empty").mkdir()
    cases = [
        (["verify", str(tmp_path / "nowhere")], "nowhere: no such file or directory"),
        (["verify", str(tmp_path / "empty")], "has no file 'latest' (--tag chooses a checkpoint); it holds no ch"),
        (["verify", str(directory)], f"it holds no checkpoints; {directory / 'native'} does"),
        (["list", str(ours / "latest")], "is a file"),
        (["rollback", str(ours), "--to", "latest"], "this is the file that names the newest checkpoint"),
        (["merge", str(ours), str(ours / "b" / "inside")], "lies in the checkpoint that is read"),
        (["merge", str(ours), str(tmp_path / "x"), "--tag", "c"], "no such checkpoint; "),
        (["merge", str(ours), str(tmp_path / "x"), "--model-config", str(tmp_path)], "holds no config.json"),
        (["list", str(tmp_path / "empty")], "holds no checkpoints"),
        (["rollback", str(ours), "--to", "c"], "no such checkpoint; "),
        (["merge", str(ours / "latest"), str(tmp_path / "x")], "is a file; give a checkpoint's directory"),
    ]
    for arguments, message in cases:
        done = run(*arguments)
        assert (done.returncode, message in done.stderr) == (2, True), (arguments, done.stderr)
        assert done.stderr.startswith("ds-galore: error: ")
        assert len(done.stderr.strip().splitlines()) == 1
    assert run("merge", str(ours), str(tmp_path / "x"), "--max-shard-size", "5 parsecs").returncode == 2
    assert run("verify", str(ours), "--sample", "3/2").returncode == 2
    assert run().returncode in (0, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_verify_names_the_damaged_file_and_the_newest_intact_tag_and_rollback_goes_there(saved, tmp_path):
    directory, _ = saved
    shutil.copytree(directory / "ours", tmp_path / "run")
    victim = next((tmp_path / "run" / "b").glob("rank-00001-*.diff.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-200] ^= 1
    victim.unlink()
    victim.write_bytes(data)
    done = run("verify", str(tmp_path / "run"), "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["newest_intact"] == "a"
    assert any(victim.name in problem and "/" in problem for problem in found["problems"])
    assert run("verify", str(tmp_path / "run"), "--quick").returncode == 0
    parts = [run("verify", str(tmp_path / "run"), "--sample", f"{n}/3").returncode for n in (1, 2, 3)]
    assert 1 in parts
    listed = run("list", str(tmp_path / "run"), "--verify", "--json")
    assert json.loads(listed.stdout)[1]["state"] != "intact"
    assert listed.returncode == 1
    listed = run("list", str(tmp_path / "run"), "--verify", "--quiet")
    assert (listed.returncode, listed.stdout) == (1, "")
    assert listed.stderr.startswith("b: ")
    done = run("merge", str(tmp_path / "run"), str(tmp_path / "out"))
    assert done.returncode == 1
    assert "'ds-galore list --verify' on the save directory tells which checkpoints are intact" in done.stderr
    done = run("rollback", str(tmp_path / "run"), "--to", "b")
    assert (done.returncode, "'latest' is unchanged" in done.stderr) == (1, True)
    assert (tmp_path / "run" / "latest").read_text() == "b"
    done = run("rollback", str(tmp_path / "run"), "--to", "a")
    assert done.returncode == 0
    assert done.stdout.strip().endswith("names a; newer ones are left: b")
    assert (tmp_path / "run" / "latest").read_text() == "a"


def test_damage_to_deepspeeds_own_is_seen_by_every_command(plain, tmp_path):
    shutil.copytree(plain / "native", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "b", tmp_path / "run" / "a")
    os.utime(tmp_path / "run" / "a" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", (1, 1))
    victim = tmp_path / "run" / "b" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    tensor = next(iter(TorchFile(victim).content["optimizer_state_dict"]["fp32_flat_groups"]))
    data = bytearray(victim.read_bytes())
    data[TorchFile(victim)._where(tensor.key) + 1000] ^= 4
    victim.write_bytes(data)
    done = run("verify", str(tmp_path / "run"), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["newest_intact"]) == (1, "a")
    assert victim.name in found["problems"][0]
    assert found["checked"] == found["ranges"] > 4
    samples = [
        json.loads(run("verify", str(tmp_path / "run"), "--sample", f"{n}/3", "--json").stdout) for n in (1, 2, 3)
    ]
    assert sum(each["checked"] for each in samples) == found["ranges"]
    assert sum(len(each["problems"]) for each in samples) == 1
    listed = run("list", str(tmp_path / "run"), "--verify", "--json")
    assert listed.returncode == 1
    assert {row["tag"]: row["state"] == "intact" for row in json.loads(listed.stdout)} == {"a": True, "b": False}
    for arguments in (
        ["merge", str(tmp_path / "run"), str(tmp_path / "out")],
        ["reshard", str(tmp_path / "run"), str(tmp_path / "out"), "--world-size", "1", *DEEPSPEED],
    ):
        done = run(*arguments)
        assert (done.returncode, "its checksum differs" in done.stderr) == (1, True)
        assert len(done.stderr.splitlines()) == 1
    assert run("rollback", str(tmp_path / "run"), "--to", "b").returncode == 1
    done = run("rollback", str(tmp_path / "run"), "--to", "a/")
    assert (done.returncode, (tmp_path / "run" / "latest").read_text()) == (0, "a")
    assert done.stdout.strip().endswith("newer ones are left: b")
    (tmp_path / "run" / "a" / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    assert run("verify", str(tmp_path / "run")).returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.timed
def test_help_and_list_answer_quickly(saved):
    directory, _ = saved
    for arguments in (["--help"], ["list", str(directory / "ours")]):
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            assert run(*arguments, blocked=False).returncode == 0
            times.append(time.perf_counter() - begin)
        assert min(times) < 0.4, (arguments, times)


SLOW = """import time
import ds_galore.{module} as module
old = module.{name}
def slow(*a, **k):
    print('working', flush=True)
    time.sleep(0.5)
    return old(*a, **k)
module.{name} = slow
from ds_galore.cli import main"""


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("tools.merge", "_Conversion.run", ["merge", "ours", "{out}"]),
        ("tools.merge", "_Conversion.run", ["merge", "native", "{out}", "--format", "torch"]),
        ("checkpoint.reader", "decode", ["reshard", "ours", "{out}", "--world-size", "3"]),
        ("checkpoint.store", "encode", ["reshard", "ours", "{out}", "--world-size", "3"]),
        ("tools.reshard.writing", "write_torch_file", ["reshard", "plain", "{out}", "--world-size", "1", *DEEPSPEED]),
        ("checkpoint.reader", "decode", ["rollback", "ours", "--to", "a"]),
    ],
)
def test_what_is_interrupted_leaves_nothing_half_done(saved, plain, tmp_path, module, name, arguments):
    directory, _ = saved
    shutil.copytree(directory, tmp_path / "run")
    shutil.copytree(plain / "native", tmp_path / "run" / "plain")
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    arguments = [str(tmp_path / "run" / each) if each in ("ours", "native", "plain") else each for each in arguments]
    arguments = [each.format(out=tmp_path / "out") for each in arguments]
    program = BLOCKED.replace("from ds_galore.cli import main", SLOW.format(module=module, name=name))
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("working")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.strip() == "ds-galore: interrupted; nothing was left half done"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
    assert (tmp_path / "run" / "ours" / "latest").read_text() == "b"


def test_a_disk_that_is_full_is_told_and_nothing_is_left(saved, plain, tmp_path):
    directory, _ = saved
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        for arguments in (
            ["merge", str(directory / "ours"), str(disk / "out")],
            ["merge", str(directory / "native"), str(disk / "out"), "--format", "torch"],
            ["reshard", str(directory / "ours"), str(disk / "out"), "--world-size", "1"],
            ["reshard", str(plain / "native"), str(disk / "out"), "--world-size", "3", *DEEPSPEED],
        ):
            done = run(*arguments)
            assert done.returncode == 2, done.stderr
            assert "No space left on device; nothing was left behind: make room" in done.stderr
            assert len(done.stderr.splitlines()) == 1
            assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_script_in_the_save_directory_takes_deepspeeds_arguments(saved, tmp_path):
    directory, expected = saved
    script = directory / "ours" / "zero_to_fp32.py"
    assert os.access(script, os.X_OK)
    for number, options in enumerate((["--safe_serialization", "-t", "b"], ["--max_shard_size", "12kB"])):
        command = [sys.executable, str(script), str(directory / "ours"), str(tmp_path / str(number)), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "0" / "model.safetensors")
    assert all(same_bits(tensor, expected[name]) for name, tensor in found.items())
    index = json.loads((tmp_path / "1" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert set(index) == set(expected)
    command = [sys.executable, str(script), str(directory / "ours"), str(tmp_path / "2"), "--exclude_frozen_parameters"]
    subprocess.run(command, check=True, capture_output=True)
    left = torch.load(tmp_path / "2" / "pytorch_model.bin", weights_only=True)
    assert set(expected) - set(left) == {name for name in expected if "layers.0.self_attn" in name}
    done = subprocess.run([*command[:3], str(directory / "ours")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "is, or holds, the checkpoint that is read" in done.stderr
