"""The child process that loads base models named on stdin, tokenises and decodes with them."""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Literal

import numpy as np

from tests.fuzz.worker import serve

TEXT = "Hello wörld, it's <s> 1234\n\n  the\tend <|im_end|> \U0001f600"


def check_base(path: Path) -> str:
    """All of a model's life in one call: "ok …" with what came out."""
    from loragraph import Context, Model
    from loragraph.errors import LoragraphError

    choice = zlib.crc32(path.read_bytes()[:4096])
    attention: Literal["flash", "plain"] = "plain" if choice & 1 else "flash"
    try:
        with Model.load(path, n_threads=1, repack=bool(choice & 2)) as model:
            ids = model.vocab.tokenize(TEXT)
            model.vocab.detokenize(ids)
            model.vocab.detokenize(range(0, model.vocab.n_tokens, 17))
            with Context(model, n_ctx=256, attention=attention, kv_type="f16") as ctx:
                logits = ctx.decode([*ids, 0, 0, 0][:3])
                ctx.generate(TEXT, max_tokens=2, temperature=0.8, seed=1)
                ctx.generate("Hi", chat=True, max_tokens=1)
    except LoragraphError as error:
        return f"ok {type(error).__name__}"
    if logits.shape != (3, model.hparams.n_vocab):
        return f"BUG: logits {logits.shape}"
    return "ok decoded" if np.isfinite(logits).all() else "ok decoded, not finite"


if __name__ == "__main__":
    warnings.simplefilter("error")
    serve(check_base)
