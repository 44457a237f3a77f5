"""The documentation is true: its commands run, its outputs are theirs, its messages and keys are the sources'.

Commands stand in blocks of ``sh`` or, with what they print, of ``console``. Those of ``ds-galore`` are run here, page
by page, where the runs that the pages speak of lie. Any other must be in :data:`ELSEWHERE`, or the paragraph after its
block must say *Not run by the tests*, and why.
"""

from __future__ import annotations

import ast
import doctest
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from markdown_it import MarkdownIt
from torch import nn

from ds_galore.cli import main
from ds_galore.config import DsGaloreConfig
from ds_galore.conflicts import check_config
from ds_galore.parameters import OPTIMIZERS
from ds_galore.tools.merge import load_state_dict
from ds_galore.tools.reshard import reshard_checkpoint
from tests import jobs
from tests.checkpoint.engines import ADAMW, BATCH, make, save

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRAIN = "tests/launch/test_train.py::test_a_run_trains_validates_saves_and_is_resumed_exactly"
RESUME = (
    "tests/launch/test_resume.py::test_a_job_killed_as_a_whole_goes_on_exactly_and_so_does_one_that_was_asked_to_end"
)
LOOP = "launch/train.py --config ds.json --resume auto --save-every 500"
AUTO = "--config my_config.json --model tiny --steps 250 --save-every 50 --resume auto"

ECOSYSTEM = "tests/launch/test_ecosystem.py::test_it_is_killed_goes_on_exactly_and_has_the_losses_of_our_own_script"
ACCELERATE = (
    "accelerate launch --config_file configs/accelerate_zero3_galore.yaml launch/train_accelerate.py"
    " --steps 250 --save-every 50"
)
TRAINER = (
    "deepspeed --num_accelerators 2 launch/train_trainer.py --config configs/zero3_galore.json"
    " --steps 250 --save-every 50"
)

#: What runs a command that is not run here: a test, or a script in which it stands.
ELSEWHERE = {
    "make train": TRAIN,
    "make test": ".ci/run",
    ACCELERATE: ECOSYSTEM,
    f"{ACCELERATE} --resume": ECOSYSTEM,
    TRAINER: ECOSYSTEM,
    f"{TRAINER} --resume auto": ECOSYSTEM,
    "deepspeed --num_accelerators 2 launch/train.py --config configs/zero3_galore.json --model tiny --steps 250": TRAIN,
    f"deepspeed --num_accelerators 2 launch/train.py {AUTO}": RESUME,
    f"until deepspeed {LOOP}; do [ $? -eq 75 ] || break; done": RESUME,
    f"deepspeed --num_accelerators 4 launch/train.py {AUTO}": (
        "tests/launch/test_resume.py::test_on_other_numbers_of_ranks_the_same_samples_follow"
    ),
}
#: The same for blocks of Python, by something that stands in them.
PYTHON_ELSEWHERE = {
    'deepspeed.initialize(model=model, config="ds_config.json")': (
        "tests/checkpoint/test_engine.py::test_a_run_goes_on_bit_for_bit_from_any_of_its_checkpoints"
    ),
    "load_module_only=True": "tests/test_docs.py::test_weights_of_adamws_own_checkpoint_go_into_a_run_of_galore",
}
#: Exit status of commands that end with another than 0 when all is well.
STATUS = {"ds-galore diff": 1}
STEPS = (100, 200, 300)
NOT_RUN = re.compile(r"\*Not run by the tests: (.+)\.\*")


# ---------------------------------------------------------------------- what the pages hold


@dataclass(frozen=True)
class Block:
    """A fenced block; ``reason``: why the tests do not run it."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    tokens = MarkdownIt().enable("table").parse(page.read_text())
    for number, token in enumerate(tokens):
        if token.type == "fence":
            assert token.map is not None
            after = tokens[number + 2].content if number + 2 < len(tokens) else ""
            found = NOT_RUN.fullmatch(after)
            language = token.info.split()[0] if token.info.strip() else ""
            yield Block(page, token.map[0] + 1, language, token.content, found[1] if found else None)


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> list[tuple[str, str | None]]:
    """The commands of a block, each with what it prints, where that is told."""
    text = re.sub(r"\\\n\s*", "", block.text)
    if block.language == "console":
        parts = re.split(r"^\$ (.+)$", text, flags=re.MULTILINE)
        assert not parts[0].strip(), f"{block}: a console block begins with a command"
        return [(parts[i], parts[i + 1].strip("\n") + "\n") for i in range(1, len(parts), 2)]
    lines = (re.sub(r"(^|\s)#.*$", "", line) for line in text.splitlines())
    return [(" ".join(line.split()), None) for line in lines if line.strip()]


def inline(page: Path, *types: str) -> Iterator[Any]:
    """The tokens within paragraphs, headings and cells."""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        yield from (each for each in token.children or () if each.type in types)


def runs_here(command: str) -> bool:
    return command.startswith("ds-galore ")


# ---------------------------------------------------------------------- the runs that the pages speak of


def train_and_save(directory: str) -> None:
    """A run of GaLore with our checkpoints, and one of AdamW with DeepSpeed's own."""
    import torch.distributed as dist
    from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

    data = jobs.batches(2 * len(STEPS), BATCH)
    engine = make(jobs.galore(update_proj_gap=50))
    for number, step in enumerate(STEPS):
        jobs.train(engine, data[2 * number : 2 * number + 2])
        engine.global_steps = step  # what the pages say
        save(engine, f"{directory}/runs/latest/checkpoints", f"step-{step}")
    if dist.get_rank() == 0:
        engine.module.config.save_pretrained(f"{directory}/my_model")
    engine = make(ADAMW)
    jobs.train(engine, data[:2])
    engine.global_steps = STEPS[-1]
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)
    engine.save_checkpoint.__wrapped__(f"{directory}/runs/native/checkpoints")
    dist.barrier()


@pytest.fixture(scope="module")
def original(pool, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("docs")
    pool.run(2, train_and_save, str(directory))
    runs = directory / "runs"
    for name in ("crashed", "damaged"):
        copy(runs / "latest", runs / name)
    (runs / "crashed" / "checkpoints" / "step-300" / "manifest.json").unlink()
    (runs / "crashed" / "checkpoints" / "latest").write_text("step-200")
    victim = next((runs / "damaged" / "checkpoints" / "step-300").glob("rank-00001-*.diff.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-200] ^= 1
    victim.unlink()
    victim.write_bytes(data)
    for name, start in (("latest", 3.0), ("galore", 3.0), ("adamw", 3.5)):  # as launch/train.py writes them
        (runs / name).mkdir(exist_ok=True)
        lines = [{"step": step, "loss": start - 0.1 * step, "tokens_per_s": 900.0} for step in range(1, 9)]
        lines.append({"step": 8, "validation_loss": start - 0.7})
        (runs / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name in ("configs", "launch"):
        (directory / name).symlink_to(ROOT / name)
    config = json.loads((ROOT / "configs" / "zero3_galore.json").read_text())
    config["ds_galore"] = {"checkpoint": {"mode": "differential", "full_every": 10, "keep_last": 5}}
    (directory / "my_config.json").write_text(json.dumps(config))
    return directory


def copy(source: Path, target: Path) -> None:
    """With hard links as they are."""
    subprocess.run(["cp", "-a", source, target], check=True)


@pytest.fixture
def place(original, tmp_path, monkeypatch) -> Path:
    """A directory of the test's own with all of it, to be in."""
    copy(original, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(command: str) -> tuple[int, str]:
    """Exit status, and what is printed."""
    words = shlex.split(command)
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(main, words[1:])
    finally:
        signal.signal(signal.SIGTERM, before)
    return done.exit_code, done.output


def comparable(output: str) -> str:
    """An output without what differs from machine to machine: sizes, times, and the widths of columns."""
    for pattern, word in ((r"\d+(\.\d+)? (B|[kMGT]B)", "SIZE"), (r"\d{4}-\d\d-\d\dT[\d:]+", "TIME")):
        output = re.sub(pattern, word, output)
    output = re.sub(r"([━─])+", r"\1", output)
    return "".join(f"{' '.join(line.split())}\n" for line in output.splitlines())


# ---------------------------------------------------------------------- commands


def test_every_command_is_run_by_a_test_or_says_why_not():
    homeless = [
        f"{block}: {command}"
        for block in all_blocks("sh", "console")
        if block.reason is None
        for command, _ in commands(block)
        if not runs_here(command) and command not in ELSEWHERE
    ]
    assert not homeless, "name the test in tests/test_docs.py, or say after the block why none runs it"
    assert not all_blocks("bash", "shell"), "commands stand in blocks of sh or console"


def test_what_runs_commands_elsewhere_is_there():
    found = [command for block in all_blocks("sh") for command, _ in commands(block)]
    python = "\n".join(block.text for block in all_blocks("python"))
    assert sorted(set(ELSEWHERE) - set(found)) == [], "no longer in the docs"
    assert [key for key in PYTHON_ELSEWHERE if key not in python] == [], "no longer in the docs"
    for command, where in [*ELSEWHERE.items(), *PYTHON_ELSEWHERE.items()]:
        path, _, name = where.partition("::")
        text = (ROOT / path).read_text()
        if not name:
            assert command in text, where
            continue
        functions = {each.name: each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)}
        assert name in functions, where
        assert not any("crashtest" in ast.unparse(each) for each in functions[name].decorator_list), where


def to_run(page: Path) -> list[tuple[Block, str, str | None]]:
    """The commands of a page that are run here, in order, with what they print where that is told."""
    chosen = (block for block in blocks(page) if block.language in ("sh", "console") and block.reason is None)
    return [(block, *each) for block in chosen for each in commands(block) if runs_here(each[0])]


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(place, page):
    checker = doctest.OutputChecker()
    for block, command, expected in to_run(page):
        status, output = run(command)
        if expected is None:
            wanted = next((code for start, code in STATUS.items() if command.startswith(start)), 0)
            assert status == wanted, f"{block}: {command}: {output}"
        else:
            same = checker.check_output(comparable(expected), comparable(output), doctest.ELLIPSIS)
            assert same, f"{block}: {command}\nprints\n{output}\nand is said to print\n{expected}"


def test_commands_that_are_not_run_are_well_formed():
    scripts = "\n".join(path.read_text() for path in (ROOT / "launch").glob("*.py"))
    options = set(re.findall(r'add(?:_argument)?\(\s*"(--[a-z_-]+)"', scripts))
    for block in all_blocks("sh"):
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        text = re.sub(r"\\\n\s*", "", block.text)
        for file in re.findall(r"(?:configs|launch)/[\w./]+\w", text):
            assert (ROOT / file).exists(), f"{block}: {file}"
        for rest in re.findall(r"launch/train\.py(.*)", text):
            assert set(re.findall(r"\s(--[\w-]+)", rest)) <= options, f"{block}: {rest}"


def test_commands_and_files_in_the_text_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for token in inline(page, "code_inline"):
            words = token.content.split()
            files = [
                word
                for word in words
                if re.fullmatch(r"(benchmarks|configs|docs|ds_galore|launch|tests)/\S+\.\w+", word)
            ]
            assert not [file for file in files if not (ROOT / file).exists()], f"{page}: {token.content}"
            if words[0] == "make" and len(words) > 1:
                assert words[1] in targets, f"{page}: {token.content}"
            if words[0] == "ds-galore" and len(words) > 1 and words[1].isalpha():
                command: Any = main
                for word in words[1:]:
                    if isinstance(command, click.Group):
                        assert word in command.commands, f"{page}: {token.content}"
                        command = command.commands[word]
                    elif word.startswith("--"):
                        assert any(word in each.opts for each in command.params), f"{page}: {token.content}"


# ---------------------------------------------------------------------- blocks of Python and JSON


def test_python_can_be_compiled():
    for block in all_blocks("python"):
        compile(block.text, str(block), "exec")


def is_run_here(block: Block) -> bool:
    return block.reason is None and not any(key in block.text for key in PYTHON_ELSEWHERE)


@pytest.mark.parametrize("block", [block for block in all_blocks("python") if is_run_here(block)], ids=str)
def test_python_runs(place, block):
    code = compile(block.text, str(block), "exec")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 192), nn.Linear(192, 256))
    galore, others = [[p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False)]
    known = {"model": model, "galore_params": galore, "non_galore_params": others}
    exec("import ds_galore", known)
    exec(code, known)
    if "optimizer" in known:
        model(torch.randn(4, 256)).square().sum().backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        known["optimizer"].step()
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_configurations_are_accepted(block):
    check_config(json.loads(block.text))


def masters_after_loading(directory: str) -> dict[str, torch.Tensor]:
    engine = make(jobs.galore())
    engine.load_checkpoint(directory, load_module_only=True)
    found = jobs.whole_weights(engine)
    losses = jobs.train(engine, jobs.batches(6, BATCH))
    assert losses[-1] < losses[0]
    return found


def test_weights_of_adamws_own_checkpoint_go_into_a_run_of_galore(pool, place):
    expected = load_state_dict(place / "runs" / "native" / "checkpoints")
    reshard_checkpoint(place / "runs" / "native" / "checkpoints", place / "runs" / "converted", world_size=2)
    found = pool.run(2, masters_after_loading, str(place / "runs" / "converted"))[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, torch.from_numpy(expected[name].copy())) for name, tensor in found.items())


# ---------------------------------------------------------------------- messages, keys, links


def texts_in_sources() -> set[str]:
    """What stands in strings of the sources, but for docstrings; formatted ones in parts."""
    found: set[str] = set()
    for path in [*(ROOT / "ds_galore").rglob("*.py"), *(ROOT / "launch").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found.discard(node.value.value)
    return {part for each in found for part in re.split(r"%[sdr]", each)}


def test_every_message_is_one_of_the_sources():
    sources = "\0".join(texts_in_sources())
    page = (ROOT / "docs" / "troubleshooting.md").read_text().partition("## Nothing is said")[0]
    rows = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 80
    for message in messages:
        parts = [part.strip(" ,:;()") for part in message.split("…")]
        long = [part for part in parts if len(part) >= 10]
        assert long, f"{message}: nothing in it can be looked up"
        for part in parts:
            assert part in sources or part.removesuffix(" is") in sources, f"{message}: {part!r} is not in the sources"


def test_the_reference_has_every_key_of_every_optimizer_with_its_default():
    from config_reference import common_keys, keys_of, optimizers_text, own_keys

    text = optimizers_text()
    common = {key.name: key for key in common_keys()}
    for name, model in OPTIMIZERS.items():
        shown = text.partition(f"## `{name}`")[2].partition("\n## ")[0]
        own = {key.name: key for key in own_keys(model)}
        assert {**common, **own} == {key.name: key for key in keys_of(model)}
        assert set(model.model_json_schema()["properties"]) <= set(common) | set(own)
        for key in own.values():
            assert f"[`{key.name}`]" in shown, (name, key)
            assert f"| {key.allowed} | {key.default} | {key.meaning} |" in shown, (name, key)
    shown = text.partition("\n## `GaLoreAdamW`")[0]
    assert all(f"[`{key.name}`]" in shown and key.meaning in shown for key in common.values())


def test_the_reference_has_every_key_of_the_section():
    from config_reference import keys_of, section_text

    def names(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[str]:
        for name, each in node.get("properties", {}).items():
            yield name
            for reference in re.findall(r"#/\$defs/(\w+)", json.dumps(each)):
                yield from names(schema, schema["$defs"][reference])

    schema = DsGaloreConfig.model_json_schema(by_alias=True)
    expected = list(names(schema, schema))
    assert sorted(key.name.rpartition(".")[2] for key in keys_of(DsGaloreConfig)) == sorted(expected)
    assert {"checkpoint", "async", "codec", "level"} <= set(expected)
    text = section_text()
    assert all(f"[`{name}`]" in text for name in expected)


def test_words_for_values_are_those_of_json():
    from config_reference import keys_of

    found = {key.name: key for key in keys_of(OPTIMIZERS["GaLoreAdafactor"])}
    assert (found["eps"].allowed, found["eps"].default) == ("list of 2: number > 0", "`[1e-30, 0.001]`")
    assert (found["beta1"].allowed, found["beta1"].default) == ("0 ≤ number < 1, `null`", "`null`")
    assert found["rank"].allowed == "integer ≥ 1, object, `null`"
    assert (found["rank.energy"].allowed, found["rank.max"].default) == ("0 < number < 1", "required")
    assert found["proj_type"].allowed == '`"right"`, `"left"`, `"std"`, `"reverse_std"`'
    assert found["target_modules"].allowed == "string, list of strings, `null`"
    assert [key.allowed for key in keys_of(DsGaloreConfig) if key.name == "monitor.log"] == [
        "string, not empty, `null`"
    ]


def headings(page: Path) -> set[str]:
    """What GitHub, and the documentation, name the sections of a page."""
    tokens = MarkdownIt().parse(page.read_text())
    titles = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for token in inline(page, "link_open", "image"):
        target = str(token.attrGet("href") or token.attrGet("src"))
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page}: {target}"
        if anchor and found.suffix == ".md":
            assert anchor in headings(found), f"{page}: {target}"


# ---------------------------------------------------------------------- proposals to others


def test_the_patches_for_deepspeed_apply_to_it(tmp_path):
    import deepspeed
    from deepspeed.runtime.zero import stage3

    assert deepspeed.__version__.startswith("0.19.8"), "docs/upstream.md names the version"
    copied = tmp_path / "deepspeed" / "runtime" / "zero" / "stage3.py"
    copied.parent.mkdir(parents=True)
    copied.write_text(Path(stage3.__file__).read_text())
    patches = sorted((ROOT / "docs" / "upstream").glob("*.patch"))
    assert [path.name for path in patches] == ["gradients-on-arrival.patch", "shared-masters.patch"]
    for path in patches:
        assert f"upstream/{path.name}" in (ROOT / "docs" / "upstream.md").read_text()
        subprocess.run(["git", "apply", str(path)], cwd=tmp_path, check=True, capture_output=True)
    ast.parse(copied.read_text())
    assert "def _takes_gradient(self, param)" in copied.read_text()
