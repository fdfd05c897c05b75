"""Train a small transformer on this machine's CPU three ways, and compare memory, time and loss.

The model is a decoder-only transformer of 12 unrolled layers on bytes; the text is the source code of
Python's standard library. It is trained without rematerialization, with `jax.checkpoint` on each layer, and
with `remat.checkpoint` on each layer, each in a process of its own, whose peak memory is reported. They
differ in one line, in `loss_fn`. Then `remat.fit` trains the model within budgets: shares of the compiler's
peak without rematerialization. The script also writes a page about one of these plans, `build/demo.html`.

    python examples/demo.py                the comparison
    python examples/demo.py --steps 100    a longer one
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from typing import Any

WAYS = ("without", "jax.checkpoint", "remat.checkpoint")
BUDGETS = ("100%", "75%", "50%", "35%")
BUDGET_STEPS = 8
PAGE_BUDGET, PAGE = "50%", pathlib.Path("build/demo.html")  # the plan that the page explains
LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 12, 192, 4, 192, 6
LEARNING_RATE = 1e-3
MIB = 2**20


# --------------------------------------------------------------------------------------------------
# The model and its training, in plain JAX (in the worker process)


def init_params(key: Any) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    def matrix(key: Any, rows: int, columns: int) -> Any:
        return jax.random.normal(key, (rows, columns)) * rows**-0.5

    def layer(key: Any) -> dict[str, Any]:
        k = jax.random.split(key, 4)
        return {
            "qkv": matrix(k[0], WIDTH, 3 * WIDTH),
            "out": matrix(k[1], WIDTH, WIDTH) / LAYERS**0.5,
            "up": matrix(k[2], WIDTH, 4 * WIDTH),
            "down": matrix(k[3], 4 * WIDTH, WIDTH) / LAYERS**0.5,
            "scale_1": jnp.ones(WIDTH),
            "scale_2": jnp.ones(WIDTH),
        }

    keys = jax.random.split(key, LAYERS + 2)
    return {
        "bytes": jax.random.normal(keys[0], (256, WIDTH)) * 0.02,
        "positions": jax.random.normal(keys[1], (CONTEXT, WIDTH)) * 0.02,
        "layers": [layer(k) for k in keys[2:]],
        "scale": jnp.ones(WIDTH),
    }


def block(params: dict[str, Any], x: Any) -> Any:
    """Apply attention and a feed-forward network, each to normalized input; x is [B, T, D]."""
    import jax
    import jax.numpy as jnp

    def normalize(x: Any, scale: Any) -> Any:
        return x * scale * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    b, t, d = x.shape
    qkv = normalize(x, params["scale_1"]) @ params["qkv"]
    q, k, v = (
        part.reshape(b, t, HEADS, d // HEADS).transpose(0, 2, 1, 3)
        for part in jnp.split(qkv, 3, axis=-1)
    )
    scores = q @ k.swapaxes(-1, -2) * (d // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    mixed = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(b, t, d)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normalize(x, params["scale_2"]) @ params["up"]) @ params["down"]


def loss_fn(way: str) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    import remat

    layer = {
        "without": block,
        "jax.checkpoint": jax.checkpoint(block),
        "remat.checkpoint": remat.checkpoint(block),
    }.get(way, block)

    def loss(params: dict[str, Any], text: Any) -> Any:
        inputs, targets = text[:, :-1].astype(jnp.int32), text[:, 1:].astype(jnp.int32)
        x = params["bytes"][inputs] + params["positions"]
        for layer_params in params["layers"]:
            x = layer(layer_params, x)
        logits = (x * params["scale"]) @ params["bytes"].T
        picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return loss


def train_step(way: str) -> Callable[..., Any]:
    import jax
    import jax.numpy as jnp

    loss = loss_fn(way)

    def step(params: Any, moments: Any, count: Any, text: Any) -> tuple[Any, ...]:
        value, grads = jax.value_and_grad(loss)(params, text)
        count = count + 1
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
        squares = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, moments[1], grads)
        params = jax.tree.map(
            lambda p, m, s: (
                p
                - LEARNING_RATE * (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.99**count)) + 1e-8)
            ),
            params,
            means,
            squares,
        )
        return params, (means, squares), count, value

    return step


def batches(steps: int) -> Iterator[Any]:
    """Yield windows [BATCH, CONTEXT + 1] of the standard library's source, the same in every run."""
    import numpy as np

    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(f.read_bytes() for f in files), np.uint8)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - CONTEXT - 1, BATCH)
        yield np.stack([text[s : s + CONTEXT + 1] for s in starts])


def work(way: str, steps: int) -> None:
    """Train in one way, and write results to standard output, one JSON object per line."""
    import jax
    import jax.numpy as jnp

    import remat

    params = init_params(jax.random.key(0))
    moments = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    state = (params, moments, jnp.zeros((), jnp.int32))
    plan = None
    if way in BUDGETS:
        step = remat.fit(train_step(way), budget=way, cache=False, donate_argnums=(0, 1, 2))
        compiled = step.lower(*state, next(batches(1))).compile()
        (plan,) = step.plans
    else:
        step = jax.jit(train_step(way), donate_argnums=(0, 1, 2))
        compiled = step.lower(*state, next(batches(1))).compile()
    analysis = compiled.memory_analysis()
    times, losses = [], []
    for text in batches(steps):
        start = time.perf_counter()
        *state, value = compiled(*state, text)
        losses.append(float(value))
        times.append(time.perf_counter() - start)
        print(json.dumps({"done": len(times), "loss": losses[-1]}), flush=True)
    real_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if way == PAGE_BUDGET:
        explained = remat.explain(step, *jax.eval_shape(lambda *x: x, *state, text))
        PAGE.parent.mkdir(exist_ok=True)
        explained.save(PAGE)
    report = {
        "temporaries": analysis.temp_size_in_bytes,
        "real_peak": real_peak,
        "step_s": sorted(times)[len(times) // 2],
        "losses": losses,
    }
    if plan is not None:
        report["budget"], report["compiled_peak"] = plan.budget_bytes, plan.peak_bytes
        report["extra_flops"] = plan.extra_flops_share
    print(json.dumps(report), flush=True)


# --------------------------------------------------------------------------------------------------
# The comparison (in the parent process, which holds no arrays)


def compare(steps: int) -> None:
    try:
        from rich.progress import MofNCompleteColumn, Progress
    except ImportError:
        sys.exit("The demo shows its progress with rich: pip install 'remat[report]'")

    params = LAYERS * 12 * WIDTH**2 + 256 * WIDTH
    print(
        f"A transformer of {LAYERS} unrolled layers, {params / 1e6:.1f} million parameters, on "
        f"{BATCH} x {CONTEXT} bytes of the standard library's source; {steps} steps each way."
    )
    reports, planned = {}, {}
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        for way in WAYS:
            task = progress.add_task(f"{way:>16}", total=steps)
            reports[way] = run_worker(
                way, steps, lambda done, task=task: progress.update(task, completed=done)
            )
        for budget in BUDGETS:
            task = progress.add_task(f"{'budget ' + budget:>16}", total=BUDGET_STEPS)
            planned[budget] = run_worker(
                budget, BUDGET_STEPS, lambda done, task=task: progress.update(task, completed=done)
            )
    agree = print_table(reports)
    good = print_budgets(planned, reports["without"]) and agree
    print(f"\nThe step within {PAGE_BUDGET}, as a page to open in a browser: {PAGE.resolve()}")
    if not good:
        sys.exit(1)


def run_worker(way: str, steps: int, on_progress: Callable[[int], Any]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", way, "--steps", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        message: dict[str, Any] = {}
        for line in process.stdout:
            message = json.loads(line)
            on_progress(message.get("done", steps))
    if process.returncode or "losses" not in message:
        sys.exit(f"training {way!r} failed with exit code {process.returncode}")
    return message


def print_budgets(planned: dict[str, dict[str, Any]], base: dict[str, Any]) -> bool:
    """Print a line for each budget; return whether all plans are within theirs and the losses agree."""
    print(
        f"\n{'remat.fit':>18}{'budget':>14}{'compiled peak':>15}{'real peak':>14}{'step time':>12}"
        f"{'extra FLOPs':>13}"
    )
    good = True
    for budget, report in planned.items():
        print(
            f"{budget:>18}"
            f"{report['budget'] / MIB:>10.0f} MiB"
            f"{report['compiled_peak'] / MIB:>11.0f} MiB"
            f"{report['real_peak'] / MIB:>10.0f} MiB"
            f"{report['step_s'] / base['step_s']:>10.2f} x"
            f"{report['extra_flops']:>12.1%}"
        )
        apart = max(abs(a - b) for a, b in zip(report["losses"], base["losses"]))
        good &= apart < 1e-3 * base["losses"][0] and report["compiled_peak"] <= report["budget"]
    print(
        "\nThe peak is what the compiler says the step needs at most, arguments and results included.\n"
        + ("Every plan is within its budget, and the losses agree." if good else "A PLAN IS WRONG.")
    )
    return good


def print_table(reports: dict[str, dict[str, Any]]) -> bool:
    """Print a line for each way to train; return whether the losses agree."""
    base = reports["without"]
    print(f"\n{'':>18}{'temporaries':>14}{'real peak':>14}{'step time':>12}{'final loss':>13}")
    for way, report in reports.items():
        print(
            f"{way:>18}"
            f"{report['temporaries'] / MIB:>10.0f} MiB"
            f"{report['real_peak'] / MIB:>10.0f} MiB"
            f"{report['step_s'] / base['step_s']:>10.2f} x"
            f"{report['losses'][-1]:>13.5f}"
        )
    apart = max(abs(a - b) for r in reports.values() for a, b in zip(r["losses"], base["losses"]))
    agree = "agree" if apart < 1e-3 * base["losses"][0] else "DO NOT AGREE"
    print(
        "\nTemporaries: the compiler's memory analysis of the training step. Real peak: the whole\n"
        "process, with Python, JAX, parameters and optimizer state. Step time: the median, against\n"
        f"training without rematerialization ({base['step_s']:.2f} s).\n"
        f"The losses {agree}: over all steps they differ by {apart:.1e} at most."
    )
    return agree == "agree"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worker", choices=WAYS + BUDGETS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.steps)
    else:
        compare(options.steps)


if __name__ == "__main__":
    main()
