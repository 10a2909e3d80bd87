"""Packaging of megatron_2bw."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def pinned(name: str) -> list[str]:
    """The versions listed in one of the requirements files."""
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("-r")]


setup(
    name="megatron-2bw",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "megatron_2bw/__init__.py").read_text(encoding="utf-8"))[1],
    description="PipeDream-2BW pipeline schedules on unmodified Megatron-Core",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_2bw", "megatron_2bw.*"]),
    python_requires=">=3.12",
    extras_require={"train": pinned("requirements.txt"), "test": pinned("requirements-test.txt")},
    entry_points={"console_scripts": ["megatron-2bw = megatron_2bw.cli:main"]},
)
