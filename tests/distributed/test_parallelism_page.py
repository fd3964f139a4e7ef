"""The code in docs/parallelism.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parallelism.md"
BLOCKS = re.findall(r"^## (.+?)$|```python\n(.*?)```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def run_code(rank: int, code: str) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    names.clear()  # a class of the page keeps what is beside it, and sharding keeps classes: so its model would stay


@pytest.mark.parametrize(
    "code", [code for _, code in BLOCKS if code], ids=["tensor", "full mesh", "expert", "pipeline"]
)
def test_code_on_the_page_runs(cluster: Cluster, code: str) -> None:
    cluster.run(run_code, code, world_size=4)
