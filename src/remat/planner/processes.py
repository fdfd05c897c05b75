"""One plan for all processes of a run: process 0 makes it, the others wait for it.

The searches on two hosts could find different plans, and different programs would deadlock in their
collectives. The plan is passed through the key-value store of `jax.distributed`. A collective is not
suitable: those of the CPU time out after 30 seconds, and planning may take an hour.

While process 0 plans, it publishes every second what it is doing, and the others show that. If it fails,
they fail with its message; if it no longer publishes, they stop waiting after `SILENCE_S`.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Callable

import jax

from remat import _jax, errors
from remat.errors import PlanError, RematError
from remat.planner.plan_file import Plan
from remat.planner.progress import Progress

_log = logging.getLogger("remat")

_BEAT_S = 1.0  # seconds between two heartbeats of process 0
# Seconds without a heartbeat after which process 0 counts as dead. Tracing a large program may delay
# heartbeats by a few seconds.
SILENCE_S = 20.0
_PART = 2**20  # characters of a plan in one entry of the store

# Every process asks for plans in the same order, so that equal numbers mean the same plan.
_numbers = itertools.count()


def receive_plan(
    make: Callable[[bool | Callable[[str], None]], Plan], *, progress: bool = True
) -> Plan:
    """Return the plan for all processes of a run.

    Args:
      make: makes the plan, in process 0 only. Its argument is `progress` as in `remat.plan`.
      progress: whether to show the progress on a terminal.

    Raises:
      RematError: process 0 could not make a plan; the error has its message.
      PlanError: process 0 has ended, or no longer responds.
    """
    if jax.process_count() == 1:
        return make(progress)
    if not _jax.has_store():
        raise PlanError(
            "several processes can plan together only after jax.distributed.initialize(). Or plan "
            "before the run (remat.plan) and pass plan= in every process."
        )
    prefix = f"remat/plans/{next(_numbers)}"
    with Progress(progress) as show:
        if jax.process_index() == 0:
            return _make_for_all(make, prefix, show)
        return wait_for_first(prefix, show)


def _make_for_all(
    make: Callable[[Callable[[str], None]], Plan], prefix: str, show: Callable[[str], None]
) -> Plan:
    """Make the plan and publish it, or the error."""
    doing = ["planning"]

    def tell(what: str) -> None:
        doing[0] = what
        show(what)

    done = threading.Event()

    def beat() -> None:
        for number in itertools.count():
            _jax.publish(f"{prefix}/beat", f"{number} {doing[0]}")
            if done.wait(_BEAT_S):
                return

    thread = threading.Thread(target=beat, name="remat-planning", daemon=True)
    thread.start()
    try:
        made = make(tell)
        text = made.to_json()
        n_parts = -(-len(text) // _PART)
        for i in range(n_parts):
            _jax.publish(f"{prefix}/{i}", text[i * _PART : (i + 1) * _PART])
        _jax.publish(f"{prefix}/answer", json.dumps({"parts": n_parts}))
        return made
    except BaseException as error:
        answer = {"error": type(error).__name__, "message": str(error)}
        _jax.publish(f"{prefix}/answer", json.dumps(answer))
        raise
    finally:
        done.set()
        thread.join(SILENCE_S)


def wait_for_first(prefix: str, show: Callable[[str], None]) -> Plan:
    """Wait until process 0 has published a plan."""
    beat, since = None, time.monotonic()
    try:
        while (answer := _jax.published(f"{prefix}/answer", wait_s=_BEAT_S)) is None:
            now = _jax.published(f"{prefix}/beat")
            if now != beat:
                beat, since = now, time.monotonic()
                what = str(now).partition(" ")[2]
                _log.debug("remat: process 0 is %s", what)
                show(f"waiting for process 0: {what}")
            elif beat is not None and time.monotonic() - since > SILENCE_S:
                raise PlanError(
                    f"process 0 was planning for all processes and has not responded for "
                    f"{SILENCE_S:.0f} s; the last that it did was {beat.partition(' ')[2]!r}. See its "
                    "output, and start all processes again."
                )
        found = json.loads(answer)
        if "error" in found:
            raise _same_error(found["error"], found["message"])
        parts = [_jax.published(f"{prefix}/{i}", wait_s=60.0) for i in range(found["parts"])]
    except ConnectionError as error:
        raise PlanError(
            f"process 0 was planning for all processes and has ended ({error}). See its output, and start "
            "all processes again."
        ) from error
    return Plan.from_json("".join(map(str, parts)), origin="the plan of process 0")


def _same_error(name: str, message: str) -> RematError:
    """Return an error of the same class if the class is one of the library's, else a `RematError`."""
    kind = getattr(errors, name, PlanError)
    is_ours = isinstance(kind, type) and issubclass(kind, RematError)
    text = f"process 0 could not make a plan: {name}: {message}"
    return kind(text) if is_ours else PlanError(text)
