"""Ten models, and the decoder of FACTS.md, each in one file with `model(size) -> Model`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo import decoder, gpt, llama, lstm, unet
from benchmarks.zoo.model import Model

ZOO: dict[str, Callable[[str], Model]] = {
    "decoder": decoder.model,
    "gpt": gpt.model,
    "llama": llama.model,
    "lstm": lstm.model,
    "unet": unet.model,
}
