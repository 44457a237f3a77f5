"""Two hosts, made of network namespaces: a job over both is killed on one of them, and goes on exactly on both.

Needs root, iproute2, openssh-server and pdsh; each namespace has a network device, an sshd and a disk of its own.
Ranks of the pool that are each the first of its host do the same without launchers, with other storage.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_galore.checkpoint.store import CheckpointStore
from tests.launch.test_resume import arguments, losses, until
from tests.launch.test_train import ROOT, attempt
from tests.pool import RemoteError

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


def on_host(number: int, directory: Path, *command: str) -> list[str]:
    """A command on a host, to which its own disk is ``run`` in a directory: ``ip netns exec`` has mounts of its own."""
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    disk = [str(directory / f"disk-{number}"), str(directory / "run")]
    return ["ip", "netns", "exec", HOSTS[number], "sh", "-c", script, *disk, *command]


def start(number: int, directory: Path, command: list[str], **changes: str) -> subprocess.Popen[str]:
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
        on_host(number, directory, *command),
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
    own = directory / "ssh"
    own.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = [f"AuthorizedKeysFile={own / 'user.pub'}", "StrictModes=no", "PermitRootLogin=yes", "UsePAM=no"]
    options = [word for each in (*settings, "PidFile=none") for word in ("-o", each)]
    sshd = ["/usr/sbin/sshd", "-f", "/dev/null", "-h", str(own / "host"), *options]
    for number in (0, 1):
        subprocess.run(on_host(number, directory, *sshd), check=True, capture_output=True)
    known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    wrapper = own / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -i {own / "user"} {known} "$@"\n')
    wrapper.chmod(0o755)
    exported = own / "deepspeed_env"  # what DeepSpeed has the other hosts set
    given = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "dsgv0"}
    chosen = ("TORCH_EXTENSIONS_DIR", "TORCHDYNAMO_DISABLE")  # what is compiled once, or not at all
    given |= {name: os.environ[name] for name in chosen if name in os.environ}
    exported.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    return {"PATH": f"{wrapper.parent}:{BIN}:{os.environ['PATH']}", "DS_ENV_FILE": str(exported)}


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
    return dict(losses(directory / "whole"))


def assert_expected(directory: Path, expected: dict[int, float]) -> None:
    """Both parts of a run together have the losses of one that was not interrupted."""
    seen = losses(directory)
    assert {step for step, _ in seen} == set(range(1, int(STEPS) + 1))
    assert max(abs(loss - expected[step]) for step, loss in seen) < 2e-6


LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def test_a_job_over_two_hosts_loses_one_and_goes_on_exactly(pool, expected, tmp_path, hosts):
    """Each has a disk of its own; torchrun starts the job, and DeepSpeed's launcher the one that goes on."""
    pool.close()
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for path in (*disks, tmp_path / "run"):
        path.mkdir()
    given = [*arguments(tmp_path, "run", **LOCAL), "--steps", STEPS]
    jobs = [start(number, tmp_path, by_torchrun(number, [*given, "--save-every", "6"])) for number in (0, 1)]
    until(disks[0], 8, jobs[0])
    kill(HOSTS[1])
    began = time.monotonic()
    outcomes = finish(jobs)
    assert all(status != 0 for status, _ in outcomes)
    assert time.monotonic() - began < 120, "the host that is left waits for the other"
    names = [{path.name[:10] for path in disk.glob("checkpoints/step-6/rank-*")} for disk in disks]
    assert names == [{"rank-00000"}, {"rank-00001"}]
    # As if the second host had been lost before it could complete the checkpoint there.
    (disks[1] / "checkpoints" / "step-6" / "manifest.json").unlink()
    (disks[1] / "checkpoints" / "latest").unlink()

    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    again = by_hostfile([*given, "--resume", "latest"], hostfile)
    [(status, text)] = finish([start(0, tmp_path, again, **serve_ssh(tmp_path))])
    assert status == 0, text
    assert f"10.77.0.1: resumed from {tmp_path / 'run' / 'checkpoints' / 'step-6'}" in text
    assert "10.77.0.2: " in text  # pdsh tells whose line it is
    assert_expected(disks[0], expected)


def on_hosts(arguments: list[str], own: list[list[str]]) -> tuple[int, str]:
    """As each rank were the only one of its host."""
    before = os.environ["LOCAL_RANK"]
    os.environ["LOCAL_RANK"] = "0"
    try:
        return attempt(arguments, own)
    finally:
        os.environ["LOCAL_RANK"] = before


@pytest.mark.parametrize("shared", [True, False])
def test_when_the_rank_of_one_host_is_killed_both_go_on(pool, expected, tmp_path, shared):
    """On a disk that they share, with our checkpoints; each on one of its own, with DeepSpeed's."""
    given = [*arguments(tmp_path, "run", **({} if shared else {**LOCAL, "ds_galore": {}})), "--steps", STEPS]
    outputs = [tmp_path / name for name in (("run", "run") if shared else ("disk-0", "disk-1"))]
    own = [["--output", str(output)] for output in outputs]
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(pool.run, 2, on_hosts, [*given, "--save-every", "6", "--resume", "auto"], own)
        until(outputs[0], 8, running)
        os.kill(pool.pids[1], signal.SIGKILL)
        with pytest.raises(RemoteError, match="rank 1 died"):
            running.result()
    store = CheckpointStore(outputs[0] / "checkpoints")
    if not shared:
        for output, rank in zip(outputs, (0, 1), strict=True):
            names = [path.name for path in (output / "checkpoints" / "step-6").glob("*_optim_states.pt")]
            assert names == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"]
    wanted = "auto" if shared else "step-6"
    outcomes = pool.run(2, on_hosts, [*given, "--save-every", "100", "--resume", wanted], own)
    assert [status for status, _ in outcomes] == [0, 0], "\n".join(text for _, text in outcomes)
    assert f"resumed from {store.path('step-6')}" in outcomes[0][1]
    assert_expected(outputs[0], expected)
