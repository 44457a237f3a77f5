"""The image, the Slurm job and the Kubernetes job: linted by the usual tools, and their scripts run with stand-ins."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

LAUNCH = Path(__file__).resolve().parent.parent.parent / "launch"
ROOT = LAUNCH.parent
DOCKERFILE = LAUNCH / "docker" / "Dockerfile"
SBATCH = LAUNCH / "slurm" / "train.sbatch"
MANIFEST = LAUNCH / "kubernetes" / "pytorchjob.yaml"
KUBERNETES = "1.31"
YAMLLINT = "{extends: default, rules: {line-length: {max: 120}}}"


def lint(tool: str, *arguments: str, text: str | None = None) -> None:
    """Run a linter of the environment; it has to find nothing."""
    done = subprocess.run(
        [Path(sys.executable).parent / tool, *arguments], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stdout + done.stderr


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume and the job."""
    volume, job = yaml.safe_load_all(MANIFEST.read_text())
    return volume, job


def pod_script() -> str:
    template = documents()[1]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    return str(template["spec"]["containers"][0]["args"][0])


@pytest.mark.parametrize("path", [DOCKERFILE, SBATCH, MANIFEST], ids=lambda path: path.name)
def test_each_file_says_in_its_head_that_it_was_not_run_and_what_was_checked(path):
    head = path.read_text().partition("\n\n")[0].split("\nset ")[0]
    assert re.search(r"^# Not run", head, re.MULTILINE)
    assert "Checked" in head
    assert "tests/launch/test_deployment.py" in re.sub(r"\s*\n#\s*", " ", head)


def test_every_argument_is_one_of_the_trainers():
    known = set(re.findall(r'add\(\s*"(--[a-z-]+)"', (LAUNCH / "train.py").read_text()))
    assert len(known) > 10
    for script in (SBATCH.read_text(), pod_script()):
        call = script.partition("-u launch/train.py")[2]
        used = set(re.findall(r"(?<=\s)--[a-z-]+", call))
        assert {"--config", "--output", "--resume"} <= used <= known


# ---------------------------------------------------------------------- the image


def test_hadolint_finds_nothing_in_the_image_and_all_that_it_copies_exists():
    lint("hadolint", str(DOCKERFILE))
    text = DOCKERFILE.read_text()
    ignored = Path(f"{DOCKERFILE}.dockerignore").read_text().split()
    assert ignored[ignored.index("*") + 1 :]  # everything, but what is named after it
    for words in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in words.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in ignored, source
    extras = (ROOT / "setup.py").read_text()
    for extra in re.search(r"'\.\[(.+)\]'", text)[1].split(","):
        assert f'"{extra}": [' in extras


# ---------------------------------------------------------------------- Slurm


def stand_in(directory: Path, name: str, *lines: str) -> None:
    path = directory / name
    path.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment with stand-ins: two tasks one after the other, and a python that ends as STATUS says."""
    stand_in(
        tmp_path,
        "srun",
        'while [[ "$1" == --* ]]; do echo "$1" >>"$LOG/srun.log"; shift; done',
        'for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" || status=$?; done',
        'exit "${status:-0}"',
    )
    stand_in(
        tmp_path, "scontrol", 'if [ "$1" = show ]; then echo one; echo two; else echo "$@" >>"$LOG/scontrol.log"; fi'
    )
    names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    stand_in(
        tmp_path,
        "python",
        f'for name in {names}; do echo "$name=${{!name}}" >>"$LOG/python.$RANK"; done',
        'printf "%s\\n" "$@" >>"$LOG/python.$RANK"',
        'exit "$STATUS"',
    )
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(tmp_path),
        "SLURM_JOB_ID": "20017",
        "SLURM_JOB_NAME": "ds-galore",
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "3",
    }


def test_shellcheck_finds_nothing_in_the_job():
    lint("shellcheck", str(SBATCH))
    options = re.findall(r"^#SBATCH (--[a-z-]+)(?:=(.+))?$", SBATCH.read_text(), re.MULTILINE)
    assert dict(options)["--signal"].startswith("USR1@")
    assert SBATCH.read_text().index("#SBATCH") < SBATCH.read_text().index("\nset ")  # later ones are comments to Slurm


@pytest.mark.parametrize(("status", "again"), [(0, False), (75, True), (1, False), (137, False)])
def test_the_job_starts_every_rank_and_is_queued_again_after_an_interruption_alone(cluster, status, again):
    log = Path(cluster["LOG"])
    command = ["bash", str(SBATCH), "--model", "llama 1b", "--steps", "9"]
    environment = {**cluster, "STATUS": str(status)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    queued = (log / "scontrol.log").read_text() if (log / "scontrol.log").exists() else ""
    assert queued == ("requeue 20017\n" if again else "")
    for rank in (0, 1):
        told = (log / f"python.{rank}").read_text().splitlines()
        assert told[:6] == [
            *(f"RANK={rank}", f"LOCAL_RANK={rank}", "WORLD_SIZE=2"),
            *("MASTER_ADDR=one", "MASTER_PORT=20017", "OMP_NUM_THREADS=3"),
        ]
        assert told[6:] == [
            *("-u", "launch/train.py", "--config", "configs/zero3_galore.json", "--output", "runs/ds-galore"),
            *("--resume", "auto", "--save-every", "500", "--model", "llama 1b", "--steps", "9"),
        ]


# ---------------------------------------------------------------------- Kubernetes


def test_linters_find_nothing_in_the_manifest():
    lint("yamllint", "--strict", "--config-data", YAMLLINT, str(MANIFEST))
    lint("shellcheck", "--shell", "bash", "-", text=pod_script())


def test_the_volume_and_the_pods_are_of_kubernetes_schemas():
    from kubernetes_validate import ValidationError, validate

    volume, job = documents()
    validate(volume, KUBERNETES, strict=True)
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": replicas["template"]}
        validate(pod, KUBERNETES, strict=True)
        wrong = copy.deepcopy(pod)
        wrong["template"]["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(ValidationError):
            validate(wrong, KUBERNETES, strict=True)
    claims = [
        each["persistentVolumeClaim"]["claimName"]
        for each in replicas["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in each
    ]
    assert claims == [volume["metadata"]["name"]]


def test_the_job_is_what_the_operators_client_knows():
    """What it does not know would be missing when it writes down what it has read."""
    from kubeflow.training import ApiClient, models

    client, job = ApiClient(), documents()[1]

    def known(manifest: dict[str, Any]) -> Any:
        read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), models.KubeflowOrgV1PyTorchJob)
        return client.sanitize_for_serialization(read)

    assert known(job) == job
    wrong = copy.deepcopy(job)
    wrong["spec"]["pytorchReplicaSpecs"]["Master"]["restart"] = "ExitCode"
    assert known(wrong) == job
    assert {each["restartPolicy"] for each in job["spec"]["pytorchReplicaSpecs"].values()} == {"ExitCode"}
    assert job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"] == "pytorch"


@pytest.mark.parametrize(("status", "ends"), [(0, 0), (75, 143), (2, 2), (1, 1)])
def test_a_pod_ends_as_the_trainer_does_and_is_tried_again_after_an_interruption(tmp_path, status, ends):
    stand_in(tmp_path, "python", f"exit {status}")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(["bash", "-c", pod_script()], env=environment, check=False).returncode == ends


def test_a_pod_hands_the_end_on_and_waits_for_the_checkpoint(tmp_path):
    stand_in(
        tmp_path,
        "python",
        'trap "sleep 0.3; touch saved; exit 75" USR1',  # a step and a save take their time
        "touch started",
        "while true; do sleep 0.05; done",
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "-c", pod_script()], env=environment, cwd=tmp_path) as process:
        deadline = time.monotonic() + 20
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 143
    assert (tmp_path / "saved").exists()
