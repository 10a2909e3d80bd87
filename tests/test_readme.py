"""The README says what the code does."""

import re
from pathlib import Path

from megatron_2bw.mcore.support import table

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_flags_is_the_one_in_the_code():
    (shown,) = re.findall(r"<!-- flags: .*? -->\n(.*?)\n<!-- /flags -->", README, re.DOTALL)
    assert shown == table()
