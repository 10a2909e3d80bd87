"""The README says what the code does."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_2bw.cli import main
from megatron_2bw.mcore.loop.arguments import add_arguments
from megatron_2bw.planner.flag_table.table import table

ROOT = Path(__file__).parents[1]
PAGES = [page for page in ROOT.glob("**/README.md") if not page.relative_to(ROOT).parts[0].startswith(".")]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_flags_is_the_one_in_the_code():
    (shown,) = re.findall(r"<!-- flags: .*? -->\n(.*?)\n<!-- /flags -->", README, re.DOTALL)
    assert shown == table()


def test_every_option_is_listed_with_its_default():
    (shown,) = re.findall(r"\| option \| default \| \|\n\|---.*?\n(.*?)\n\n", README, re.DOTALL)
    rows = [row.split("|")[1:3] for row in shown.splitlines()]
    options = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    assert [name for names, _ in rows for name in re.findall(r"--[\w-]+", names)] == sorted(
        (option.option_strings[0] for option in options), key=README.index
    )
    without = {"--pipeline-delayed-microbatches": "all", "--mixpipe-k": "d, 0", "--mixpipe-gamma": "d, 0"}
    without |= {"--pipeline-receives": "late on GPUs"}
    for option in options:
        (name,) = option.option_strings
        (listed,) = [default.strip().strip("`") for names, default in rows if f"`{name}" in names]
        default = without.get(name, "none") if option.default is None else option.default
        default = "off" if default is False else default
        assert listed == (f"{default:g}" if isinstance(default, float) else str(default)), name


def test_the_table_of_schedules_is_what_the_command_prints(capsys):
    (command, shown) = re.findall(
        r"<!-- schedules: .*?`megatron-2bw (.*?)`.*? -->\n(.*?)\n<!-- /schedules -->", README, re.DOTALL
    )[0]
    assert main(command.split()) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")] == shown.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_what_it_links_to_is_there(page: Path):
    for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> list[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_messages_it_explains_are_those_of_the_code():
    (shown,) = re.findall(r"<!-- messages -->\n(.*?)\n<!-- /messages -->", README, re.DOTALL)
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("megatron_2bw/**/*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("scripts/**/*.sh"))
    messages = [message for row in shown.splitlines()[2:] for message in re.findall(r"`([^`]*)`", row.split("|")[1])]
    assert len(messages) >= 10
    assert [message for message in messages if message not in sources] == []
