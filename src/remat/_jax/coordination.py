"""The key-value store that the processes of a distributed run share.

Collectives wait for all processes and time out (after 30 seconds on CPU). The store is a separate service, so
one process may work for an hour while others wait.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import distributed as _distributed


def has_store() -> bool:
    """Return whether this process has a store, which it has after `jax.distributed.initialize`."""
    return _distributed.global_state.client is not None


def publish(key: str, text: str) -> None:
    """Write a text under a key for all processes, replacing the previous text."""
    _client().key_value_set(key, text, allow_overwrite=True)


def published(key: str, wait_s: float = 0.0) -> str | None:
    """Return the text under a key; None if there is none after some seconds.

    Raises:
      ConnectionError: the store cannot be reached, so the process that holds it has ended.
    """
    client = _client()
    try:
        if not wait_s:
            return str(client.key_value_try_get(key))
        return str(client.blocking_key_value_get(key, int(1000 * wait_s)))
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("NOT_FOUND", "DEADLINE_EXCEEDED")):
            return None
        raise ConnectionError(str(error).splitlines()[0]) from error


def _client() -> Any:
    return _distributed.global_state.client
