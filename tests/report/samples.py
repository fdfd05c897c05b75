"""Explanations to draw: the training step of a transformer, of any number of layers.

The lifetimes are those of a real step: the forward pass of every layer, the loss, recomputation and backward
pass of each layer from the last to the first, and the update at the end. Each layer saves its input and the
attention's output, and recomputes the rest; with `offload=True` it offloads its input.
"""

from __future__ import annotations

import dataclasses
import math

from strategies import HOSTILE

from remat.report.explanation import Explanation
from remat.report.model import (
    Decision,
    Finding,
    LoopPart,
    Option,
    ParetoPoint,
    PlannedLoop,
    PlanSummary,
    Segment,
    Step,
    Totals,
    Value,
)  # fmt: skip
from remat.report.timeline import predicted_memory

_FLOPS_PER_S = 197e12 * 0.55
_BYTES_PER_S = 819e9
_B, _S, _D, _H = 8, 1024, 1024, 16

# Name, shape, FLOPs, line, and operands within the layer; "" is the layer's input.
_LAYER = [
    ("ln_1", (_B, _S, _D), 8 * _B * _S * _D, 41, ("",)),
    ("attn/qkv", (_B, _S, 3 * _D), 6 * _B * _S * _D * _D, 22, ("ln_1",)),
    ("attn/scores", (_B, _H, _S, _S), 2 * _B * _S * _S * _D, 24, ("attn/qkv",)),
    ("attn/softmax", (_B, _H, _S, _S), 5 * _B * _H * _S * _S, 25, ("attn/scores",)),
    ("attn/context", (_B, _S, _D), 2 * _B * _S * _S * _D, 26, ("attn/softmax", "attn/qkv")),
    ("attn/out", (_B, _S, _D), 2 * _B * _S * _D * _D, 28, ("attn/context",)),
    ("add_1", (_B, _S, _D), _B * _S * _D, 42, ("", "attn/out")),
    ("ln_2", (_B, _S, _D), 8 * _B * _S * _D, 43, ("add_1",)),
    ("mlp/up", (_B, _S, 4 * _D), 8 * _B * _S * _D * _D, 33, ("ln_2",)),
    ("mlp/gelu", (_B, _S, 4 * _D), 12 * _B * _S * _D, 34, ("mlp/up",)),
    ("mlp/down", (_B, _S, _D), 8 * _B * _S * _D * _D, 35, ("mlp/gelu",)),
    ("add_2", (_B, _S, _D), _B * _S * _D, 44, ("add_1", "mlp/down")),
]
_WEIGHTS = [
    ("attn/qkv", (_D, 3 * _D)), ("attn/out", (_D, _D)),
    ("mlp/up", (_D, 4 * _D)), ("mlp/down", (4 * _D, _D)),
]  # fmt: skip
_PRIMITIVES = {
    "ln": "mul", "attn/softmax": "div", "add": "add", "mlp/gelu": "mul",
}  # fmt: skip
VALUES_PER_LAYER = 44  # approximately


@dataclasses.dataclass
class _Making:
    """A step under construction."""

    steps: list[Step] = dataclasses.field(default_factory=list)
    values: list[dict] = dataclasses.field(default_factory=list)

    def step(self, label: str, phase: str, flops: float, line: int, segment: int = -1) -> int:
        time_s = flops / _FLOPS_PER_S + 2e-6
        source = f"model.py:{line} (block)"
        self.steps.append(Step(label, phase, time_s, source, segment))
        return len(self.steps) - 1

    def value(self, kind: str, dtype: str, shape: tuple[int, ...], born: int, **more) -> dict:
        itemsize = {"bf16": 2, "f32": 4}[dtype]
        made = {
            "id": len(self.values),
            "kind": kind,
            "aval": f"{dtype}[{','.join(map(str, shape))}]",
            "n_bytes": math.prod(shape) * itemsize,
            "lives": [[born, born]],
            **more,
        }
        self.values.append(made)
        return made


def _primitive(name: str) -> str:
    return next((p for n, p in _PRIMITIVES.items() if name.startswith(n)), "dot_general")


def transformer(
    layers: int = 16, *, save_attention: bool = True, offload: bool = False
) -> Explanation:
    """Return the explanation of a training step with Adam, in which each layer is a segment."""
    m = _Making()
    weights, moments = {}, []
    for layer in range(layers):
        for name, shape in _WEIGHTS:
            path = f"decoder/block_{layer}/{name}"
            weights[layer, name] = m.value("argument", "bf16", shape, 0, path=f"params/{path}/kernel",
                                           source="train.py:71 (init)", consumer="dot_general")  # fmt: skip
            for moment in ("mu", "nu"):
                moments.append(m.value("argument", "f32", shape, 0, path=f"opt_state/{moment}/{path}/kernel",
                                       source="train.py:74 (init)", consumer="the update"))  # fmt: skip
    live: dict[tuple[int, str], dict] = {}
    embed = m.step("embed", "forward", _B * _S * _D, 52)
    x = m.value("saved", "bf16", (_B, _S, _D), embed, path="decoder/embed", primitive="gather",
                source="model.py:52 (embed)", consumer="decoder/block_0")  # fmt: skip
    live[0, ""] = x
    spans = []
    for layer in range(layers):
        first = len(m.steps)
        for name, shape, flops, line, operands in _LAYER:
            at = m.step(name, "forward", flops, line, layer)
            last = name == "add_2"
            kept = last or (save_attention and name == "attn/out")
            live[layer, name] = m.value(
                ("offloaded" if offload and last else "saved") if kept else "recomputed",
                "bf16", shape, at,
                path=f"decoder/block_{layer}/{name}", primitive=_primitive(name),
                source=f"model.py:{line} ({name.split('/')[0]})",
                name={"attn/out": "attn_out", "add_2": "block_out"}.get(name, ""),
                consumer=f"the backward pass of block_{layer}",
                flops=float(flops), time_s=flops / _FLOPS_PER_S + 2e-6,
            )  # fmt: skip
            for operand in operands:
                live[layer, operand]["lives"][0][1] = at
        live[layer + 1, ""] = live[layer, "add_2"]
        spans.append((first, len(m.steps) - 1))
    head = m.step("logits", "forward", 2 * _B * _S * _D * 4096, 60)
    logits = m.value("temporary", "bf16", (_B, _S, 4096), head, path="decoder/head", primitive="dot_general",
                     source="model.py:60 (head)", consumer="the loss")  # fmt: skip
    loss = m.step("loss", "forward", 8 * _B * _S * 4096, 81)
    logits["lives"][0][1] = loss
    out = m.value(
        "output", "f32", (), loss, path="loss", primitive="reduce_sum", source="train.py:81 (loss)"
    )
    cotangent = m.value("gradient", "bf16", (_B, _S, _D), loss, path="decoder/head", primitive="dot_general",
                        source="model.py:60 (head)", consumer=f"decoder/block_{layers - 1}")  # fmt: skip
    gradients, segments = [], []
    for layer in reversed(range(layers)):
        recompute_flops = 0.0
        for name, _, flops, line, operands in _LAYER:
            v = live[layer, name]
            for operand in operands:
                live[layer, operand]["lives"][-1][1] = len(m.steps)
            if v["kind"] == "recomputed":
                at = m.step(name, "recompute", flops, line, layer)
                v["lives"].append([at, at])
                recompute_flops += flops
        for name, shape, flops, line, operands in reversed(_LAYER):
            at = m.step(name, "backward", 2 * flops, line, layer)
            cotangent["lives"][0][1] = at
            for used in (name, *operands):
                if used or live[layer, used]["kind"] != "recomputed":
                    live[layer, used]["lives"][-1][1] = at
            common = {
                "primitive": _primitive(name),
                "source": f"model.py:{line} ({name.split('/')[0]})",
            }
            cotangent = m.value("gradient", "bf16", shape, at, path=f"decoder/block_{layer}/{name}",
                                consumer="the backward pass", **common)  # fmt: skip
            if (layer, name) in weights:
                gradients.append(m.value("gradient", "f32", dict(_WEIGHTS)[name], at, consumer="the update",
                                         path=f"decoder/block_{layer}/{name}/kernel", **common))  # fmt: skip
        first, last = spans[layer]
        kept = [live[layer, n] for n, *_ in _LAYER if live[layer, n]["kind"] == "saved"]
        segments.append(
            Segment(
                layer,
                f"block_{layer}",
                first,
                last,
                sum(v["n_bytes"] for v in kept),
                recompute_flops,
            )
        )
    for (layer, name), weight in weights.items():
        at = m.step(f"adam {name}", "update", 12 * weight["n_bytes"] / 2, 90)
        m.value("temporary", "f32", dict(_WEIGHTS)[name], at, path=f"update/block_{layer}/{name}",
                primitive="add", source="train.py:90 (adam)", consumer="the new parameters")  # fmt: skip
    end = len(m.steps) - 1
    for v in [*weights.values(), *moments, out]:
        v["lives"][0][1] = end
    for v in gradients:
        v["lives"][0][1] = end
    if offload:
        for layer in range(layers):
            v = live[layer, "add_2"]
            born, dies = v["lives"][0]
            if dies - born > 30:
                v["lives"] = [[born, born + 13], [dies - 22, dies]]
    values = tuple(
        Value(lifetimes=tuple((a, b) for a, b in v.pop("lives")), **v) for v in map(dict, m.values)
    )
    steps = tuple(m.steps)
    flops = sum((s.time_s - 2e-6) * _FLOPS_PER_S for s in steps)
    again = [s for s in steps if s.phase == "recompute"]
    predicted = predicted_memory(values, steps)
    compiled = dataclasses.replace(
        predicted,
        peak_bytes=int(predicted.peak_bytes * 1.021),
        temp_bytes=int(predicted.temp_bytes * 1.034),
    )
    totals = Totals(
        predicted=predicted,
        compiled=compiled,
        difference="The compiler keeps scratch buffers of two fusions and pads bf16[8,16,1024,1024].",
        flops=flops,
        recompute_flops=sum((s.time_s - 2e-6) * _FLOPS_PER_S for s in again),
        time_s=sum(s.time_s for s in steps),
        recompute_time_s=sum(s.time_s for s in again),
    )
    return Explanation(
        title="train_step",
        platform="TPU v5e, ahead of time",
        target="tpu:v5e:2x2, bytes of one device",
        versions=(("jax", "0.12.0"), ("libtpu", "0.0.50.1"), ("remat", "0.1.0")),
        values=values,
        steps=steps,
        segments=tuple(sorted(segments, key=lambda s: s.number)),
        findings=FINDINGS,
        totals=totals,
        pareto=_pareto(predicted.peak_bytes, totals.time_s),
    )


FINDINGS = (
    Finding(
        "policy_matched_nothing",
        "error",
        "The policy saves the name 'atn_out', which no value of the region has: nothing is saved by it.",
        "Write 'attn_out' (model.py:28), or drop the name from save_only_these_names.",
    ),
    Finding(
        "inner_policy_overridden",
        "warning",
        "The region around the scan drops what the policy inside it saves in 16 layers.",
        "Give the outer region the policy, or remove the outer checkpoint.",
    ),
    Finding(
        "peak_in_update",
        "info",
        "The optimizer's state is 38 % of the peak; rematerialization cannot make it smaller.",
        "Shard the optimizer's state over the data axis (FSDP), or keep its moments in bfloat16.",
    ),
)


def _pareto(peak_bytes: int, time_s: float) -> tuple[ParetoPoint, ...]:
    plans = [
        ("save everything", 4.1, 0.0, True), ("dots", 2.15, 0.012, True), ("8.0 GiB", 1.4, 0.041, False),
        ("dots, no batch dims", 1.18, 0.062, True), ("this plan", 1.0, 0.128, True),
        ("5.0 GiB", 0.86, 0.171, False), ("recompute everything", 0.74, 0.243, True),
        ("nested", 0.69, 0.42, False),
    ]  # fmt: skip
    return tuple(
        ParetoPoint(
            int(peak_bytes * p), extra, time_s * extra, label, verified, label == "this plan"
        )
        for label, p, extra, verified in plans
    )


def of_size(n_values: int) -> Explanation:
    """Return the explanation of a transformer with about that many values."""
    return transformer(max(1, round(n_values / VALUES_PER_LAYER)))


def hostile() -> Explanation:
    """Return a small explanation in which every text from a user attacks the renderings."""
    step, *_ = HOSTILE
    pick = [HOSTILE[i % len(HOSTILE)] for i in range(40)]
    values = tuple(
        Value(i, "saved", pick[i], 2**20 * (i + 1), ((i % 4, 4),), pick[i + 1], pick[i + 2], pick[i + 3],
              pick[i], pick[i + 5], 1e9, 1e-3)
        for i in range(16)
    )  # fmt: skip
    steps = tuple(Step(pick[i], "forward", 1e-3, pick[i + 1], i % 3 - 1) for i in range(8))
    return Explanation(
        title=step,
        platform=pick[3],
        target=pick[4],
        versions=tuple((text, text) for text in HOSTILE),
        values=values,
        steps=steps,
        segments=(Segment(0, pick[1], 0, 3, 5, 1.0, 0), Segment(1, pick[5], 2, 3, 5, 1.0, 1)),
        findings=tuple(
            Finding("code", "warning", text, text, (Option(text, text, 2**20),)) for text in HOSTILE
        ),
        description=step,
        plan=PlanSummary(
            2**20, 2**20, 2**21, (PlannedLoop(step, step, 3, (LoopPart(1, 3, 0, (step,), 8),)),)
        ),
        totals=Totals(predicted_memory(values, steps), None, step, 10.0, 1.0, 1.0, 0.1),
        pareto=tuple(
            ParetoPoint(2**20 * i, i / 10, i * 0.1, text) for i, text in enumerate(HOSTILE)
        ),
        decisions=tuple(Decision("keep", text, text, text, 2, 2**20) for text in HOSTILE),
    )


def untimed(explanation: Explanation) -> Explanation:
    """Return an explanation without predicted times, as for an unknown device."""
    return dataclasses.replace(
        explanation,
        values=tuple(dataclasses.replace(value, time_s=0.0) for value in explanation.values),
        steps=tuple(dataclasses.replace(step, time_s=0.0) for step in explanation.steps),
        totals=dataclasses.replace(explanation.totals, time_s=0.0, recompute_time_s=0.0),
    )
