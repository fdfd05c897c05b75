"""Ten models, and a decoder with known results, each in one file that defines `model(size) -> Model`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo import decoder, dit, gpt, llama, lstm, moe, pde, resnet, spiking, unet, vit
from benchmarks.zoo.model import Model

ZOO: dict[str, Callable[[str], Model]] = {
    "decoder": decoder.model,
    "gpt": gpt.model,
    "llama": llama.model,
    "vit": vit.model,
    "resnet": resnet.model,
    "unet": unet.model,
    "moe": moe.model,
    "lstm": lstm.model,
    "dit": dit.model,
    "spiking": spiking.model,
    "pde": pde.model,
}
