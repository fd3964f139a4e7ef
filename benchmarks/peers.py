"""Engines that the project does not depend on: a virtual environment of their own, with the project's build of torch.

python benchmarks/peers.py     # make it now; step_time.py does so when it is needed
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

FOLDER = Path(__file__).parent / ".peers"
PACKAGES = ("deepspeed==0.19.8", "megatron-fsdp==0.6.1")
_CONSTRAINTS = Path(__file__).parents[1] / "constraints" / "cpu.txt"
_STAMP = FOLDER / "installed.txt"


def python() -> str:
    """The interpreter of the peers' environment.

    Raises:
        RuntimeError: It cannot be made here (no network, for example); the text is one line.
    """
    interpreter = FOLDER / "bin" / "python"
    if _STAMP.exists() and _STAMP.read_text() == _wanted():
        return str(interpreter)
    print(f"installing {', '.join(PACKAGES)} into {FOLDER} ...", flush=True)
    try:
        venv.create(FOLDER, with_pip=True, clear=True)
        # Its operators are compiled when they are used, not when it is installed: none is used here.
        environment = {**os.environ, "DS_BUILD_OPS": "0", "PYTHONPATH": ""}
        command = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["-c", str(_CONSTRAINTS), *os.environ.get("PIP_OPTIONS", "").split()]
        subprocess.run(
            [*command, _torch(), "numpy", "psutil", *PACKAGES], check=True, capture_output=True, env=environment
        )
    except (subprocess.CalledProcessError, OSError) as error:
        output = getattr(error, "stderr", None) or b""
        lines = [line for line in output.decode(errors="replace").splitlines() if line.startswith("ERROR")]
        raise RuntimeError(f"not installable here: {lines[-1] if lines else error}") from error
    _STAMP.write_text(_wanted())
    return str(interpreter)


def _torch() -> str:
    """The very build that the project runs: without its local label ("+cpu") an index may give another."""
    import torch

    return f"torch=={torch.__version__}"


def _wanted() -> str:
    return "\n".join([sys.version, _torch(), *PACKAGES, ""])


if __name__ == "__main__":
    print(python())
