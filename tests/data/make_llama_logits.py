"""Made llama-logits.json: what transformers computes with the folder that `fullshard ckpt export --to hf` writes.

transformers is no dependency, so what it said is kept here (version 5.24.0, torch 2.13.0 on the CPU): the logits of its
LlamaForCausalLM, loaded by `from_pretrained` from the exported folders, and a digest of what was in these.

    python tests/data/make_llama_logits.py tests/data/llama-logits.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "single")]
from test_ckpt_tools import SOME, TOKENS, digest_of, exported_llama  # noqa: E402


def main(out: Path) -> None:
    import transformers

    found = {"transformers": transformers.__version__}
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            path = exported_llama(Path(folder), tied)
            model, told = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not any(told.values()), told
            with torch.no_grad():
                logits = model(TOKENS).logits[SOME]
            found["tied" if tied else "untied"] = {"digest": digest_of(path), "logits": logits.tolist()}
    out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
