"""Make the patches for Megatron-LM checkouts, and check them.

    python patches/patches.py make CHECKOUT      write one patch per release
    python patches/patches.py check CHECKOUT     they are those of this script, and apply to their releases
    python patches/patches.py compare CHECKOUT   on two CPU processes: a patched script alone and the script as it is
                                                 under the launcher print the same losses

CHECKOUT is a clone of https://github.com/NVIDIA/Megatron-LM with these tags; its work tree is not touched.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
RELEASES = {
    "core_v0.18.2": "571370c829ca768fe37244f4e2e7f28d8accc4ab",
    "core_v0.19.0": "5be9626709af2722333bf54797c954c09edeada3",
}
"""Commits by tag."""
SCRIPT = "pretrain_gpt.py"
BEFORE = "import torch\n"
INSERTED = """\
import megatron_2bw

megatron_2bw.install()  # Adds --pipeline-schedule; before anything of Megatron is imported.

"""
TRAINING = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 12 "
    "--log-interval 1 --eval-iters 0 --eval-interval 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--num-workers 0 --hidden-dropout 0 --attention-dropout 0 --seed 1234"
).split()


def git(checkout: Path, *words: str, environment: dict[str, str] | None = None) -> str:
    """Output of a git command there."""
    command = ["git", "-C", str(checkout), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | (environment or {})
    ).stdout


def patch(checkout: Path, commit: str) -> str:
    """What git would say of the change.

    Raises:
        ValueError: the script of that commit has no one place for it.
    """
    original = git(checkout, "show", f"{commit}:{SCRIPT}")
    if original.count(f"\n{BEFORE}") != 1:
        raise ValueError(f"{SCRIPT} of {commit} does not have one line {BEFORE.strip()!r}")
    changed = original.replace(f"\n{BEFORE}", f"\n{INSERTED}{BEFORE}")
    lines = difflib.unified_diff(
        original.splitlines(keepends=True), changed.splitlines(keepends=True), f"a/{SCRIPT}", f"b/{SCRIPT}"
    )
    return "".join(lines)


def make(checkout: Path) -> None:
    """Write the files."""
    for release, commit in RELEASES.items():
        file = FOLDER / f"{release}.patch"
        file.write_text(patch(checkout, commit), encoding="utf-8")
        print(f"{file.relative_to(ROOT)}: for {commit}")


def check(checkout: Path) -> None:
    """Check that every patch is up to date and applies to its release.

    Raises:
        ValueError: a file is not what ``make`` would write, or a tag is another commit.
        subprocess.CalledProcessError: git does not apply it.
    """
    for release, commit in RELEASES.items():
        file = FOLDER / f"{release}.patch"
        if git(checkout, "rev-parse", f"{release}^{{commit}}").strip() != commit:
            raise ValueError(f"{release} is not {commit} in {checkout}")
        if file.read_text(encoding="utf-8") != patch(checkout, commit):
            raise ValueError(f"{file} is out of date: run `python patches/patches.py make {checkout}`")
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
            git(checkout, "read-tree", commit, environment=index)
            git(checkout, "apply", "--cached", "--check", str(file), environment=index)
        print(f"{file.name} applies to {release}")


def compare(checkout: Path) -> None:
    """Train with the launcher on the plain release and without it on the patched one.

    Raises:
        ValueError: the two print other losses.
    """
    release = list(RELEASES)[-1]
    with tempfile.TemporaryDirectory() as folder:
        git(checkout, "archive", "--format=tar", f"--output={folder}/source.tar", RELEASES[release])
        for name in ("plain", "patched"):
            (Path(folder) / name).mkdir()
            subprocess.run(["tar", "xf", f"{folder}/source.tar", "-C", f"{folder}/{name}"], check=True)
            shutil.rmtree(f"{folder}/{name}/megatron")  # The installed one has its helpers compiled.
        command = ["git", "apply", str(FOLDER / f"{release}.patch")]
        subprocess.run(command, cwd=f"{folder}/patched", check=True)
        for schedule in ("megatron", "1f1b-flush", "2bw"):
            plain = losses(Path(folder) / "plain", ["-m", "megatron_2bw"], schedule)
            patched = losses(Path(folder) / "patched", [], schedule)
            if plain != patched or len(plain) != 12:
                raise ValueError(f"{schedule}: {plain} under the launcher, {patched} with the patch")
            print(f"{schedule}: 12 losses, the same to the last digit, from {plain[0]} to {plain[-1]}")


def losses(folder: Path, launcher: list[str], schedule: str) -> list[str]:
    """What the checkout's script prints on two processes."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *launcher, SCRIPT),
        *TRAINING,
        *("--pipeline-schedule", schedule),
    ]
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return re.findall(r"lm loss: (\S+)", done.stdout + done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "check", "compare"))
    parser.add_argument("checkout", type=Path)
    args = parser.parse_args()
    try:
        {"make": make, "check": check, "compare": compare}[args.what](args.checkout)
    except ValueError as error:
        sys.exit(f"patches: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"patches: {' '.join(error.cmd)}: {error.stderr}")


if __name__ == "__main__":
    main()
