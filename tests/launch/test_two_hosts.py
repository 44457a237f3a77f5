"""Two hosts, made of network namespaces: a job over both is killed on one of them, and goes on exactly on both.

Needs root, iproute2, openssh-server and pdsh; each namespace has a network device and an sshd of its own, and the hosts
share the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_galore.checkpoint.store import CheckpointStore
from tests.launch.test_resume import arguments, losses
from tests.launch.test_train import ROOT, attempt

HOSTS = ("dsga", "dsgb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BIN = Path(sys.executable).parent
STEPS = "21"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def pids(host: str) -> list[int]:
    for _ in range(20):
        with contextlib.suppress(subprocess.CalledProcessError):  # a process ended while they were listed
            return [int(each) for each in ip("netns", "pids", host).split()]
        time.sleep(0.1)
    return [int(each) for each in ip("netns", "pids", host).split()]


def kill(host: str) -> None:
    """All that runs on a host, at once."""
    while found := pids(host):
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.1)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two network namespaces, of whose names there is one pair: workers of pytest-xdist take turns."""
    with (tmp_path_factory.getbasetemp().parent / "hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from _hosts()


def _hosts() -> Iterator[None]:
    remove()
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", "dsgv0", "netns", HOSTS[0], "type", "veth", "peer", "name", "dsgv0", "netns", HOSTS[1])
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", host, "address", "add", f"{address}/24", "dev", "dsgv0")
        for device in ("lo", "dsgv0"):
            ip("-n", host, "link", "set", device, "up")
    yield
    for host in HOSTS:
        kill(host)
    remove()


def remove() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def start(number: int, command: list[str], **changes: str) -> subprocess.Popen[str]:
    """A command on a host, with some variables of its environment changed."""
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "dsgv0",
        "TORCH_GLOO_LAZY_INIT": "0",
        **changes,
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", HOSTS[number], *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def by_torchrun(number: int, given: list[str]) -> list[str]:
    meet = ["--master_addr", ADDRESSES[0], "--master_port", "29651"]
    nodes = ["--nnodes", "2", "--node_rank", str(number), "--nproc_per_node", "1"]
    return [str(BIN / "torchrun"), *nodes, *meet, "launch/train.py", *given]


def by_hostfile(given: list[str], hostfile: Path) -> list[str]:
    """On one host, for both: DeepSpeed's launcher starts the parts by pdsh over ssh."""
    meet = ["--master_addr", ADDRESSES[0], "--master_port", "29653"]
    return [str(BIN / "deepspeed"), "--hostfile", str(hostfile), *meet, "launch/train.py", *given]


def serve_ssh(directory: Path) -> dict[str, str]:
    """An sshd on each host that takes no password, and the environment in which ``ssh`` reaches them."""
    directory.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = [f"AuthorizedKeysFile={directory / 'user.pub'}", "StrictModes=no", "PermitRootLogin=yes", "UsePAM=no"]
    options = [word for each in (*settings, "PidFile=none") for word in ("-o", each)]
    sshd = ["/usr/sbin/sshd", "-f", "/dev/null", "-h", str(directory / "host"), *options]
    for host in HOSTS:
        ip("netns", "exec", host, *sshd)
    known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    wrapper = directory / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -i {directory / "user"} {known} "$@"\n')
    wrapper.chmod(0o755)
    exported = directory / "deepspeed_env"  # what DeepSpeed has the other hosts set
    given = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "dsgv0"}
    given |= {name: os.environ[name] for name in ("TORCH_EXTENSIONS_DIR",) if name in os.environ}  # compiled once
    exported.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    return {"PATH": f"{wrapper.parent}:{BIN}:{os.environ['PATH']}", "DS_ENV_FILE": str(exported)}


def until(directory: Path, step: int, jobs: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and all(job.poll() is None for job in jobs):
        if (directory / "metrics.jsonl").exists() and any(number >= step for number, _ in losses(directory)):
            return
        time.sleep(0.02)
    for host in HOSTS:
        kill(host)
    raise AssertionError("\n".join(job.communicate()[0] for job in jobs))


def finish(jobs: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    found = []
    for job in jobs:
        output, _ = job.communicate(timeout=300)
        found.append((job.returncode, output))
    return found


@pytest.fixture(scope="module")
def expected(pool, tmp_path_factory) -> dict[int, float]:
    """By step, the losses of two ranks on one host, without an interruption."""
    directory = tmp_path_factory.mktemp("expected")
    status, output = pool.run(2, attempt, [*arguments(directory, "whole"), "--steps", STEPS])[0]
    assert status == 0, output
    pool.close()
    return dict(losses(directory / "whole"))


def test_a_job_over_two_hosts_loses_one_and_goes_on_exactly(expected, tmp_path, hosts):
    given = [*arguments(tmp_path, "run"), "--steps", STEPS, "--save-every", "3", "--resume", "auto"]
    jobs = [start(number, by_torchrun(number, given)) for number in (0, 1)]
    until(tmp_path / "run", 8, jobs)
    kill(HOSTS[1])
    began = time.monotonic()
    outcomes = finish(jobs)
    assert all(status != 0 for status, _ in outcomes)
    assert time.monotonic() - began < 120, "the host that is left waits for the other"
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    first = store.newest_intact()
    assert first is not None
    assert first != f"step-{STEPS}"

    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    [(status, text)] = finish([start(0, by_hostfile(given, hostfile), **serve_ssh(tmp_path / "ssh"))])
    assert status == 0, text
    assert f"10.77.0.1: resumed from {store.path(first)}" in text
    assert "10.77.0.2: " in text  # pdsh tells whose line it is
    seen = losses(tmp_path / "run")
    assert {step for step, _ in seen} == set(range(1, int(STEPS) + 1))
    assert max(abs(loss - expected[step]) for step, loss in seen) < 2e-6
    assert store.newest_intact() == f"step-{STEPS}"


@pytest.mark.parametrize("ours", [True, False])
def test_on_storage_of_their_own_the_hosts_go_on(expected, tmp_path, hosts, ours):
    """With our checkpoints, and with DeepSpeed's."""
    local = {"checkpoint": {"use_node_local_storage": True}}
    given = arguments(tmp_path, "run", **local, **({} if ours else {"ds_galore": {}}))
    outputs = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for output in outputs:
        output.mkdir()
    own = [
        [str(output) if each == str(tmp_path / "run") else each for each in [*given, "--steps", STEPS]]
        for output in outputs
    ]
    jobs = [start(number, by_torchrun(number, [*own[number], "--save-every", "6"])) for number in (0, 1)]
    until(outputs[0], 8, jobs)
    kill(HOSTS[1])
    assert all(status != 0 for status, _ in finish(jobs))
    if ours:
        names = [{path.name[:10] for path in output.glob("checkpoints/step-6/rank-*")} for output in outputs]
        assert names == [{"rank-00000"}, {"rank-00001"}]
        # As if the second host had been lost before it could complete the checkpoint there.
        (outputs[1] / "checkpoints" / "step-6" / "manifest.json").unlink()
        (outputs[1] / "checkpoints" / "latest").unlink()
    wanted = "latest" if ours else "step-6"
    jobs = [start(number, by_torchrun(number, [*own[number], "--resume", wanted])) for number in (0, 1)]
    outcomes = finish(jobs)
    assert [status for status, _ in outcomes] == [0, 0], "\n".join(text for _, text in outcomes)
    for output, rank in zip(outputs if not ours else (), (0, 1), strict=False):
        names = [path.name for path in (output / "checkpoints" / "step-6").glob("*_optim_states.pt")]
        assert names == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]
    seen = losses(outputs[0])
    assert max(abs(loss - expected[step]) for step, loss in seen) < 2e-6
    assert {step for step, _ in seen} == set(range(1, int(STEPS) + 1))
