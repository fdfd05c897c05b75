"""Run all benchmarks, or those named: `python -m benchmarks [NAME ...]`.

Options after a single name are those of that benchmark: `python -m benchmarks planner --quick`. Such a run
only prints and does not change the stored results.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pathlib
import pkgutil
import platform
import sys
import tempfile

import jax
import jaxlib

import benchmarks

RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "cores": str(os.cpu_count()),
    }


def write(name: str, measured: dict) -> pathlib.Path:
    """Write results atomically, so that an interrupted run leaves the old ones intact."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-jaxlib{jaxlib.__version__}.json"
    text = json.dumps({"environment": environment(), **measured}, indent=2) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=RESULTS, delete=False, suffix=".tmp") as file:
        file.write(text)
    os.replace(file.name, path)
    return path


def main() -> None:
    available = {
        m.name: m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name[0] != "_"
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(available))
    given = sys.argv[1:]
    n_names = next((i for i, text in enumerate(given) if text.startswith("-")), len(given))
    asked, options = (given[:n_names], given[n_names:]) if n_names else (given, [])
    names = parser.parse_args(asked).names or list(available)
    unknown = [name for name in names if name not in available]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are {', '.join(available)}")
    if options and len(names) > 1:
        parser.error("options belong to one benchmark: name only that")
    for name in names:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            if not hasattr(module, "main"):
                continue
            if options and not inspect.signature(module.main).parameters:
                parser.error(f"{name} takes no options")
            print(f"\n== {name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
            measured = module.main(options) if options else module.main()
        except ImportError as e:
            print(f"{name} skipped: {e}")
            continue
        if options:
            continue
        print(f"   -> {write(name, measured).relative_to(pathlib.Path.cwd())}")


if __name__ == "__main__":
    sys.exit(main())
