"""The shell scripts: their syntax, and how they look for a Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RUN = (
    *("scripts/quickstart.sh", "scripts/pretrain_gpt.sh", "scripts/pretrain_bert.sh", "scripts/pretrain.slurm"),
    *("scripts/test.sh", "scripts/test_versions.sh", ".ci/run"),
)
SOURCED = ("scripts/lib/python.sh", "scripts/lib/training.sh", "scripts/lib/pretrain.sh")


@pytest.mark.parametrize("script", [*RUN, *SOURCED])
def test_syntax(root, script):
    subprocess.run(["bash", "-n", root / script], check=True)


@pytest.mark.parametrize("script", RUN)
def test_executable(root, script):
    assert os.access(root / script, os.X_OK)


def find_python(root: Path, path: Path, pyenv_root: Path) -> subprocess.CompletedProcess[str]:
    command = f'ROOT="{root}"; source "{root}/scripts/lib/python.sh"; find_python'
    environment = {"PATH": f"{path}:/bin:/usr/bin", "PYENV_ROOT": str(pyenv_root), "HOME": "/nonexistent"}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)


def fake_python(path: Path, version: str, *, works: bool = True) -> None:
    """A command that answers as a Python of that version would, or fails as a pyenv shim does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check = f"""
import sys
import time
code = sys.argv[2].replace("import ensurepip, sys, venv", "import sys").replace("sys.version_info[:2]", "({version})")
exec(code.replace("sys.executable", "{str(path)!r}"))
"""
    body = f"exec {sys.executable} - \"$@\" <<'CODE'\n{check}\nCODE" if works else "echo not installed >&2; exit 127"
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def places(tmp_path):
    """Hides the machine's own Pythons behind old ones."""
    on_path = tmp_path / "bin"
    for name in ("python3.12", "python3.13", "python3.14", "python3", "python"):
        fake_python(on_path / name, "3, 11")
    return on_path, tmp_path / "pyenv"


def test_takes_the_path_first(root, places):
    on_path, pyenv = places
    fake_python(on_path / "python3", "3, 12")
    fake_python(pyenv / "versions/3.12.1/bin/python", "3, 12")
    assert find_python(root, on_path, pyenv).stdout.strip() == str(on_path / "python3")


def test_passes_over_a_shim_that_does_not_run(root, places):
    on_path, pyenv = places
    fake_python(on_path / "python3.12", "3, 12", works=False)
    fake_python(pyenv / "versions/3.11.9/bin/python", "3, 11")
    fake_python(pyenv / "versions/3.13.0/bin/python", "3, 13")
    assert find_python(root, on_path, pyenv).stdout.strip() == str(pyenv / "versions/3.13.0/bin/python")


def test_prefers_a_version_with_wheels(root, places):
    on_path, pyenv = places
    fake_python(on_path / "python3", "3, 14")
    assert find_python(root, on_path, pyenv).stdout.strip() == str(on_path / "python3")
    fake_python(pyenv / "versions/3.12.1/bin/python", "3, 12")
    assert find_python(root, on_path, pyenv).stdout.strip() == str(pyenv / "versions/3.12.1/bin/python")


def test_says_what_to_do_where_there_is_none(root, places):
    result = find_python(root, *places)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "no Python >= 3.12" in result.stderr
    assert "pyenv install 3.12" in result.stderr


def pretrain(root: Path, folder: Path, flags: str, **environment: str) -> list[str]:
    """The command that ``scripts/lib/pretrain.sh`` would run, in words, with everything that takes time replaced."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for name in ("gpt_document.idx", "gpt.model"):
        (data / name).touch()
    command = f"""
        ROOT="{root}" VENV="{sys.prefix}"
        source "{root}/scripts/lib/training.sh"
        source "{root}/scripts/lib/pretrain.sh"
        count_gpus() {{ echo "$GPUS"; }}
        train() {{ printf '%s\\n' "$@"; env | grep -E '^(CUDA|PYTORCH)_' || true; }}
        pretrain gpt {flags}
    """
    known = {"PATH": "/bin:/usr/bin", "DATA": str(data), "OUTPUT": str(folder / "out"), "GPUS": "0"} | environment
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], env=known, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def values(words: list[str]) -> dict[str, str]:
    """What follows each flag, the last time."""
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


def test_what_a_user_gives_wins_over_the_defaults(root, tmp_path):
    """And nothing else changes."""
    words = pretrain(
        root, tmp_path, "--lr 3e-4 --global-batch-size 64 --lr-warmup-iters=7 --num-layers 8 --seq-length 256"
    )
    last = values(words)
    assert (last["--lr"], last["--global-batch-size"], last["--num-layers"]) == ("3e-4", "64", "8")
    assert (last["--hidden-size"], last["--max-position-embeddings"], last["--micro-batch-size"]) == ("128", "256", "4")
    assert (last["--pipeline-schedule"], last["--pipeline-model-parallel-size"]) == ("2bw", "2")
    assert "--lr-warmup-fraction" not in words
    assert last["--save"] == last["--load"] == str(tmp_path / "out/checkpoint")


def test_a_whole_layout_without_a_schedule_has_megatrons(root, tmp_path):
    """As the planner prints it; part of one does not."""
    part = "--micro-batch-size 2 --pipeline-model-parallel-size 4"
    last = values(pretrain(root, tmp_path, part))
    assert (last["--pipeline-schedule"], last["--global-batch-size"]) == ("2bw", "8")
    words = pretrain(root, tmp_path, f"{part} --global-batch-size 16 --tensor-model-parallel-size 1")
    assert "--pipeline-schedule" not in words
    assert "by --pipeline-schedule megatron with --pipeline-model-parallel-size 4; " in words[0]


def test_one_gpu_is_used_by_one_stage(root, tmp_path):
    """As the warning says: with Megatron's schedule, as 2BW needs two."""
    words = pretrain(root, tmp_path, "--pipeline-model-parallel-size 1", GPUS="1")
    assert "--pipeline-schedule" not in words
    assert (values(words)["--nproc-per-node"], values(words)["--global-batch-size"]) == ("1", "4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size 2", "error: 2 processes are no multiple of 2 stages x 2 tensor x 1 context"),
        (
            "--pipeline-model-parallel-size 1 --global-batch-size 4",
            "error: --global-batch-size 4 is no multiple of 2 replicas x microbatches of 4; change these, or if the "
            "flags are for fewer than 2 processes, set RANKS, the processes on each node",
        ),
        ("--micro-batch-size", "error: --micro-batch-size has no value: give a whole number of at least 1"),
        ("--pipeline-model-parallel-size=auto", "error: --pipeline-model-parallel-size auto: give a whole number"),
    ],
)
def test_what_does_not_fit_is_said(root, tmp_path, flags, message):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        pretrain(root, tmp_path, flags, GPUS="2")
    assert message in failed.value.stderr


@pytest.mark.parametrize(
    ("flags", "environment", "launcher"),
    [
        ("", {}, "--nproc-per-node 2 --standalone"),
        ("--pipeline-model-parallel-size 4 --tensor-model-parallel-size=2 --global-batch-size 8", {}, "8 --standalone"),
        ("", {"RANKS": "4"}, "--nproc-per-node 4 --standalone"),
        ("", {"GPUS": "8"}, "--nproc-per-node 8 --standalone"),
        ("", {"GPUS": "1"}, "--nproc-per-node 2 --standalone"),
        (
            "",
            {"GPUS": "8", "NUM_NODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "node0"},
            "--nproc-per-node 8 --nnodes 3 --node-rank 1 --master-addr node0 --master-port 6000 --",
        ),
    ],
)
def test_how_many_processes(root, tmp_path, flags, environment, launcher):
    words = pretrain(root, tmp_path, flags, **environment)
    assert launcher in " ".join(words)
    last = values(words)
    if not flags and "RANKS" not in environment:
        replicas = int(last["--nproc-per-node"]) * int(environment.get("NUM_NODES", 1)) // 2
        assert int(last["--global-batch-size"]) == 2 * 4 * replicas


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ("", {}, {"CUDA_VISIBLE_DEVICES="}),
        ("", {"GPUS": "2"}, {"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}),
        ("", {"GPUS": "2", "PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF=backend:native"}),
        (
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
            {"GPUS": "4"},
            {"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS=1"},
        ),
        (
            "--pipeline-model-parallel-size 2 --context-parallel-size 2",
            {"GPUS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
            {"PYTORCH_CUDA_ALLOC_CONF=backend:native", "CUDA_DEVICE_MAX_CONNECTIONS=8"},
        ),
    ],
)
def test_what_megatron_and_we_ask_for_on_gpus_is_set(root, tmp_path, flags, environment, expected):
    words = pretrain(root, tmp_path, flags, **environment)
    assert {word for word in words if word.startswith(("CUDA_", "PYTORCH_"))} == expected


@pytest.mark.parametrize(
    ("torch", "counted"),
    [
        ("class cuda:\n    is_available = lambda: True\n    device_count = lambda: 8", "8\n"),
        ("class cuda:\n    is_available = lambda: False\n    device_count = lambda: 8", "0\n"),
        ("raise ImportError('no such library')", ""),
    ],
)
def test_only_gpus_that_torch_can_use_count(root, tmp_path, torch, counted):
    """Not those behind a driver that is too old; and where torch does not start at all, it is heard."""
    (tmp_path / "torch.py").write_text(torch)
    command = f'VENV="{sys.prefix}"; source "{root}/scripts/lib/training.sh"; gpus=$(count_gpus); echo "$gpus"'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env={"PATH": "/bin:/usr/bin", "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == counted
    assert ("no such library" in done.stderr) == (done.returncode != 0) == (not counted)


@pytest.mark.parametrize(
    ("missing", "flags"),
    [
        (set(), []),
        ({"fused_weight_gradient_mlp_cuda"}, ["--no-gradient-accumulation-fusion"]),
        (
            {"transformer_engine", "fused_weight_gradient_mlp_cuda"},
            "--transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion "
            "--no-gradient-accumulation-fusion".split(),
        ),
    ],
)
def test_what_has_no_kernels_is_left_out(load, monkeypatch, missing, flags):
    """Beside Transformer Engine without Apex, too: Megatron's output layer fuses by Apex alone."""
    kernels = load("scripts/kernels.py")
    monkeypatch.setattr(kernels, "find_spec", lambda module: None if module in missing else object())
    assert kernels.flags_without_kernels() == flags


def test_checkpoints_of_another_vocabulary_are_not_gone_on_with(root, tmp_path):
    pretrain(root, tmp_path, "")
    (tmp_path / "data/gpt.model").write_text("another")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        pretrain(root, tmp_path, "")
    assert "belongs to another vocabulary" in failed.value.stderr


def test_nodes_that_begin_at_once_agree_about_the_vocabulary(root, tmp_path):
    """None sees the file of another one before it is written; and one that a full disk left empty is none."""
    (tmp_path / "vocabulary.cksum").touch()
    (tmp_path / "gpt.model").write_text("a vocabulary")
    command = f"""
        source "{root}/scripts/lib/pretrain.sh"
        for round in $(seq 40); do
            nodes=()
            for node in 1 2 3 4 5 6 7 8; do keep_vocabulary "{tmp_path}/gpt.model" "{tmp_path}" & nodes+=($!); done
            for node in "${{nodes[@]}}"; do wait "$node"; done
            rm "{tmp_path}/vocabulary.cksum"
        done
    """
    done = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.model"]


def made_environment(root: Path, repository: Path, place: Path) -> list[str]:
    """What ``ensure_venv`` says in a repository whose Python answers to everything."""
    command = f"""
        ROOT="{place}"
        source "{root}/scripts/lib/python.sh"
        find_python() {{ echo "{repository}/python"; }}
        ensure_venv requirements.txt
    """
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_an_environment_is_made_again_where_it_no_longer_works(root, tmp_path):
    """After its Python is gone, and where it has the package of another place."""
    for name in ("requirements.txt", "setup.py"):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/bash
        if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "{python}" "$3/bin/python"; fi
    """)
    python.chmod(0o755)
    assert len(made_environment(root, tmp_path, tmp_path)) == 2
    assert made_environment(root, tmp_path, tmp_path) == []
    (tmp_path / ".venv/bin/python").unlink()
    (tmp_path / ".venv/bin/python").symlink_to("/nonexistent/python")
    assert made_environment(root, tmp_path, tmp_path)[0].startswith("making .venv")
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    tmp_path.rename(moved)
    for script in (moved / "python", moved / ".venv/bin/python"):
        script.write_text(script.read_text().replace(str(tmp_path), str(moved)))
    assert made_environment(root, moved, moved)[0].startswith("installing")
    assert made_environment(root, moved, moved) == []
    moved.rename(tmp_path)
    for script in (tmp_path / "python", tmp_path / ".venv/bin/python"):
        script.write_text(script.read_text().replace(str(moved), str(tmp_path)))
    assert made_environment(root, tmp_path, tmp_path)[0].startswith("installing")


def test_an_environment_of_somebody_elses_is_not_cleared(root, tmp_path):
    """uv makes them under the same name, without pip."""
    theirs = tmp_path / ".venv/lib/theirs.py"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    for name in ("requirements.txt", "setup.py"):
        (tmp_path / name).touch()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        made_environment(root, tmp_path, tmp_path)
    assert f"{tmp_path}/.venv has no working Python >= 3.12 with pip, and these scripts did not make it" in str(
        failed.value.stderr
    )
    assert theirs.exists()


def test_a_loop_around_a_training_ends_with_it(root, tmp_path):
    """Ctrl-C reaches all processes: the training has its time to save, and the loop does not begin the next one."""
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(
        f"""#!/bin/bash
        if [ "$2" = "torch.distributed.run" ]; then
            trap 'echo saved; exit 1' INT
            touch "{tmp_path}/begun"
            for _ in $(seq 100); do sleep 0.1; done
        else
            trap "" INT
            cat
        fi
        """
    )
    python.chmod(0o755)
    script = tmp_path / "train.sh"
    script.write_text(f"""
        VENV="{tmp_path}" ROOT="{root}"
        source "{root}/scripts/lib/training.sh"
        set -euo pipefail
        train log -- script
    """)
    loop = f"for round in 1 2 3; do echo round $round; bash '{script}'; done"
    command = ["env", "--default-signal=INT", "bash", "-c", loop]  # In the background, shells ignore it.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as looping:
        deadline_s = time.monotonic() + 20
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        time.sleep(0.2)
        os.killpg(looping.pid, signal.SIGINT)
        output, _ = looping.communicate(timeout=20)
    assert output.split() == ["round", "1", "saved"]
    assert looping.returncode == -signal.SIGINT
