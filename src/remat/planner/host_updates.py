"""Optimizer state and weights that stay in the host's memory, updated chunk by chunk.

An optimizer's state, such as the moments of Adam, is read and written once in a step, so it can stay in
the host's memory if it is copied in small parts. Copies of whole arrays do not work on TPUs: XLA's scheduler
counts a host buffer like one on the device, so at its default level it fetches all state first (12 layers of
width 4096 on v5e: 3395 MiB, and 2976 with the state on the device). The scheduler cannot move copies across
the iterations of a loop: in each, one chunk is fetched, updated and written back (1526 MiB).

An argument can stay on the host if it is *state*: it is donated, read only by elementwise operations, and a
result of its type is an elementwise function of it and of values that do not depend on it. All operations
that depend on state elementwise run in the loop; updates that share values run in one loop. Values that
other operations read are written to the device, chunk by chunk.

*Weights* can stay on the host if loops read them slice by slice, as a scan over layers does: each iteration
fetches its slice, which the scheduler cannot move to another iteration. They are state in all else; that
other values depend on them through these loops does not matter, since the loops read them from the host.
Their gradients, which loops stack, stay on the host as well if only the update reads them.

In sharded programs the loop runs in a `shard_map`, in which each device updates its own shard.

Known limits: arrays of one dimension and small ones stay on the device, and so do weights that other
operations read, such as those of layers that are not in a loop; copies of updates hide only behind these.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from remat import _jax
from remat.aliases import Array, Arrays, Atom, Aval, Sharding
from remat.errors import PlanError
from remat.ir import jaxprs
from remat.ir.equations import has_effects, is_elementwise, transparent_call

_jax.exclude_from_tracebacks(__file__)

# Bytes of an array on one device. Smaller arrays stay on the device; a larger limit leaves more there.
_LEAST_BYTES = 2**20
# Bytes of a chunk of one array. Larger chunks need more memory and fewer iterations.
_CHUNK_BYTES = 8 * 2**20
OPTIMIZER, WEIGHTS = "optimizer", "weights"

# A chunk's number of rows is a multiple of this, so that it consists of whole tiles in the layouts of TPUs.
_TILE_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Update:
    """An elementwise computation of new state.

    Args:
      leaves: the inputs that are state, by their places in the program's inputs.
      results: for each of them the place of its new value in the program's results.
      eqns: the numbers of the equations, in order.
      reads: for each of the leaves, how many loops read it slice by slice.
      stacks: stacked results of loops that only these equations read, and that stay on the host as well.
    """

    leaves: tuple[int, ...]
    results: tuple[int, ...]
    eqns: tuple[int, ...]
    reads: tuple[int, ...]
    stacks: tuple[_jax.Var, ...] = ()


def chunk_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...] | None:
    """Return the shape of an array as a stack of chunks; None if it should stay whole.

    >>> chunk_shape((4096, 4096), 4), chunk_shape((32, 1024, 100), 4), chunk_shape((4096,), 4)
    ((8, 512, 4096), (2, 16384, 100), None)

    Args:
      shape: on one device.
      itemsize: bytes of an element.
    """
    n_bytes = math.prod(shape) * itemsize
    if len(shape) < 2 or n_bytes < _LEAST_BYTES:
        return None
    *leading, rows, columns = shape
    if rows % _TILE_ROWS == 0:
        n_units, rest = math.prod(leading) * rows // _TILE_ROWS, (_TILE_ROWS, columns)
    else:
        n_units, rest = math.prod(leading), (rows, columns)
    wanted = max(2, -(-n_bytes // _CHUNK_BYTES))
    n_chunks = next((n for n in range(wanted, n_units + 1) if n_units % n == 0), None)
    if n_chunks is None:
        return None
    per_chunk = n_units // n_chunks
    if rows % _TILE_ROWS == 0:
        return n_chunks, per_chunk * rest[0], columns
    return n_chunks, per_chunk, *rest


def find_updates(
    jaxpr: _jax.Jaxpr,
    donated: Collection[int],
    shardings: Mapping[int, Sharding],
    n_devices: int,
    kinds: Collection[str] = (OPTIMIZER, WEIGHTS),
) -> list[Update]:
    """Return the updates of all state in a program, in the order of their first equations.

    Args:
      jaxpr: flat, without dead equations.
      donated: the places of the inputs that are donated.
      shardings: of those that may be state.
      n_devices: the number of devices that the program runs on.
      kinds: of state to find.
    """
    return _Finder(jaxpr, donated, shardings, n_devices, kinds).updates()


def _slices(eqn: _jax.JaxprEqn) -> set[_jax.Var]:
    """Return the operands that a loop reads slice by slice only."""
    if eqn.primitive.name != "scan" or has_effects(eqn):
        return set()
    n = sum(_jax.scan_arity(eqn))
    return set(filter(_jax.is_var, eqn.invars[n:])).difference(filter(_jax.is_var, eqn.invars[:n]))


def _stacks(eqn: _jax.JaxprEqn) -> Sequence[_jax.Var]:
    """Return the results that a loop writes slice by slice."""
    if eqn.primitive.name != "scan" or has_effects(eqn):
        return ()
    return eqn.outvars[_jax.scan_arity(eqn)[1] :]


class _Finder:
    def __init__(
        self,
        jaxpr: _jax.Jaxpr,
        donated: Iterable[int],
        shardings: Mapping[int, Sharding],
        n_devices: int,
        kinds: Collection[str],
    ) -> None:
        self.jaxpr = jaxpr
        self.n_devices = n_devices
        self.readers: dict[_jax.Var, list[int]] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            for v in dict.fromkeys(filter(_jax.is_var, eqn.invars)):
                self.readers.setdefault(v, []).append(number)
        self.elementwise = [is_elementwise(eqn) for eqn in jaxpr.eqns]
        #: The loops that read a value slice by slice.
        self.loops: dict[_jax.Var, set[int]] = {}
        for number, eqn in enumerate(jaxpr.eqns):
            for v in _slices(eqn):
                self.loops.setdefault(v, set()).add(number)
        self.n_results: dict[_jax.Var, int] = {}
        for v in filter(_jax.is_var, jaxpr.outvars):
            self.n_results[v] = self.n_results.get(v, 0) + 1
        self.places = {
            v: at
            for at in donated
            for v in [jaxpr.invars[at]]
            if at in shardings
            and _local_chunks(v.aval, shardings[at], n_devices) is not None
            and not self.n_results.get(v)
            and (WEIGHTS if v in self.loops else OPTIMIZER) in kinds
        }
        self.shardings = {jaxpr.invars[at]: sharding for at, sharding in shardings.items()}
        given = [jaxpr.invars[at] for at in donated]
        self.sources = self._sources(given)
        self.in_order = self._in_order(given)

    def updates(self) -> list[Update]:
        found: dict[_jax.Var, _jax.Var] = {}
        state = [v for v in self.places if self._candidates([v])[1][v]]
        while state:
            members, candidates = self._candidates(state)
            found = self._paired(candidates)
            if len(found) == len(state):
                return self._grouped(found, members)
            state = list(found)
        return []

    def _candidates(
        self, state: Sequence[_jax.Var]
    ) -> tuple[set[int], dict[_jax.Var, list[_jax.Var]]]:
        """Return the equations that depend on state elementwise, and the results that may replace it.

        Equations that also depend on state through others, such as a norm of the update, are left out.
        """
        of: dict[_jax.Var, frozenset[_jax.Var]] = {v: frozenset([v]) for v in state}
        other: set[_jax.Var] = set()
        members: set[int] = set()
        waiting = [n for v in state for n in self._other_readers(v)]
        heapq.heapify(waiting)
        done = -1
        while waiting:
            number = heapq.heappop(waiting)
            if number == done:
                continue
            done, eqn = number, self.jaxpr.eqns[number]
            operands = list(filter(_jax.is_var, eqn.invars))
            is_member = self.elementwise[number] and other.isdisjoint(operands)
            if is_member:
                members.add(number)
                read = [of[v] for v in operands if v in of]
                of[eqn.outvars[0]] = frozenset().union(*read)
            else:
                other.update(eqn.outvars)
            for v in eqn.outvars:
                for reader in self.readers.get(v, ()):
                    heapq.heappush(waiting, reader)
        candidates: dict[_jax.Var, list[_jax.Var]] = {v: [] for v in state}
        results = [v for v in self.jaxpr.outvars if _jax.is_var(v) and self.n_results[v] == 1]
        for v in state:
            if members.issuperset(self._other_readers(v)):
                candidates[v] = [
                    r for r in results if v in of.get(r, ()) and r is not v and _is_like(r, v)
                ]
        return members, candidates

    def _other_readers(self, v: _jax.Var) -> list[int]:
        """Return the equations that read a value, without the loops that read it slice by slice."""
        return [n for n in self.readers.get(v, ()) if n not in self.loops.get(v, ())]

    def _paired(self, candidates: Mapping[_jax.Var, list[_jax.Var]]) -> dict[_jax.Var, _jax.Var]:
        """Return the new value of each state: the candidate that depends on the fewest donated arguments.

        A new moment depends on one moment, new parameters on all of them and on the old parameters. If
        several candidates are equal in this, arguments and results correspond in their order.
        """
        choices = [(v, r) for v, results in candidates.items() for r in results]
        choices.sort(
            key=lambda both: (len(self.sources[both[1]]), self.in_order[both[0]] is not both[1])
        )
        taken: dict[_jax.Var, _jax.Var] = {}
        for v, r in choices:
            if v not in taken and r not in taken.values():
                taken[v] = r
        return {v: taken[v] for v in candidates if v in taken}

    def _sources(self, given: Sequence[_jax.Var]) -> dict[_jax.Var, frozenset[_jax.Var]]:
        """Return for each value the donated arguments on which it depends through elementwise operations."""
        found = {v: frozenset([v]) for v in given}
        for number, eqn in enumerate(self.jaxpr.eqns):
            read = [found[v] for v in eqn.invars if _jax.is_var(v) and v in found]
            if self.elementwise[number] and read:
                found[eqn.outvars[0]] = frozenset().union(*read)
        return found

    def _in_order(self, given: Sequence[_jax.Var]) -> dict[_jax.Var, _jax.Var | None]:
        """Return for the k-th donated argument of each type the k-th result of that type."""
        results = list(filter(_jax.is_var, self.jaxpr.outvars))
        found: dict[_jax.Var, _jax.Var | None] = {}
        for v in given:
            at = sum(_is_like(other, v) for other in found)
            like = [r for r in results if _is_like(r, v)]
            found[v] = like[at] if at < len(like) else None
        return found

    def _grouped(self, found: Mapping[_jax.Var, _jax.Var], members: set[int]) -> list[Update]:
        """Return the updates: equations that share values, with the equations that only they read."""
        root: dict[Hashable, Hashable] = {}

        def find(x: Hashable) -> Hashable:
            root.setdefault(x, x)
            while root[x] != x:
                root[x] = root[root[x]]
                x = root[x]
            return x

        made = {v: n for n, eqn in enumerate(self.jaxpr.eqns) for v in eqn.outvars}
        for number in sorted(members):
            for v in filter(_jax.is_var, self.jaxpr.eqns[number].invars):
                if v in found or made.get(v) in members:
                    root[find(v if v in found else made[v])] = find(number)
        of_eqn = {number: find(number) for number in members}
        for number in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[number]
            if number in members or not self.elementwise[number]:
                continue
            (v,) = eqn.outvars
            groups = {of_eqn.get(reader) for reader in self.readers.get(v, ())}
            if len(groups) == 1 and None not in groups and not self.n_results.get(v):
                of_eqn[number] = groups.pop()
        places = {v: at for at, v in enumerate(self.jaxpr.outvars) if _jax.is_var(v)}
        updates = []
        for group in dict.fromkeys(find(v) for v in found):
            leaves = [v for v in found if find(v) == group]
            eqns = tuple(sorted(n for n, g in of_eqn.items() if g == group))
            numbered = sorted(
                (self.places[v], places[found[v]], len(self.loops.get(v, ()))) for v in leaves
            )
            at, of, reads = zip(*numbered)
            updates.append(Update(at, of, eqns, reads, self._stacks_for(leaves, eqns)))
        return sorted(updates, key=lambda update: update.eqns)

    def _stacks_for(self, leaves: Sequence[_jax.Var], eqns: Sequence[int]) -> tuple[_jax.Var, ...]:
        """Return the stacks of loops that only an update of weights reads, in the shape of the weights."""
        if not any(v in self.loops for v in leaves):
            return ()
        inside = set(eqns)
        like, sharding = leaves[0], self.shardings[leaves[0]]
        return tuple(
            v
            for eqn in self.jaxpr.eqns
            for v in _stacks(eqn)
            if v in self.readers
            and v.aval.shape == like.aval.shape
            and inside.issuperset(self.readers[v])
            and not self.n_results.get(v)
            and _local_chunks(v.aval, sharding, self.n_devices) is not None
        )


def _is_like(r: _jax.Var, v: _jax.Var) -> bool:
    return (r.aval.shape, r.aval.dtype) == (v.aval.shape, v.aval.dtype)


def _local_chunks(aval: Aval, sharding: Sharding, n_devices: int) -> tuple[int, ...] | None:
    """Return the shape of a device's shard of an array as a stack of chunks; None if it has none."""
    if not _jax.is_array(aval) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return None
    shape = aval.shape
    if n_devices > 1:
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size != n_devices:
            return None
        shape = sharding.shard_shape(shape)
    return chunk_shape(shape, _jax.itemsize_bytes(aval))


# --------------------------------------------------------------------------------------------------
# Rewriting


def with_state_on_host(
    jaxpr: _jax.Jaxpr,
    updates: Sequence[Update],
    donated: Iterable[int],
    shardings: Mapping[int, Sharding],
) -> _jax.Jaxpr:
    """Return the program, rewritten to take and return state in the host's memory.

    Args:
      jaxpr: flat, without dead equations.
      updates: as `find_updates` returns them.
      donated: the places of the inputs that are donated; they may be written in place.
      shardings: of these inputs.
    """
    return _Writer(jaxpr, updates, donated, shardings).written()


class _Writer:
    def __init__(
        self,
        jaxpr: _jax.Jaxpr,
        updates: Sequence[Update],
        donated: Iterable[int],
        shardings: Mapping[int, Sharding],
    ) -> None:
        self.jaxpr = jaxpr
        self.updates = updates
        self.shardings = shardings
        self.made = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.of_eqn = {n: k for k, update in enumerate(updates) for n in update.eqns}
        self.donated = {jaxpr.invars[at] for at in donated}
        #: The variables of the new program for inputs and results in the host's memory.
        self.on_host: dict[_jax.Var, _jax.Var] = {}
        for update in updates:
            for v in (*(jaxpr.invars[at] for at in update.leaves), *update.stacks):
                self.on_host[v] = _jax.new_var(v.aval.update(memory_space=jax.memory.Space.Host))

    def written(self) -> _jax.Jaxpr:
        eqns: list[_jax.JaxprEqn] = []
        results: dict[int, _jax.Var] = {}
        for node in self._order():
            if node >= 0:
                eqns.append(self._with_slices_on_host(self.jaxpr.eqns[node]))
            else:
                eqns += self._loop(self.updates[-1 - node], results)
        outvars = [results.get(at, v) for at, v in enumerate(self.jaxpr.outvars)]
        invars = [self.on_host.get(v, v) for v in self.jaxpr.invars]
        return _jax.jaxpr_of(invars, outvars, eqns, self.jaxpr)

    def _with_slices_on_host(self, eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
        """Return an equation; loops read slices of weights from the host and write their gradients there."""
        read = [k for k, v in enumerate(eqn.invars) if _jax.is_var(v) and v in self.on_host]
        written = [k for k, v in enumerate(eqn.outvars) if v in self.on_host]
        if not read and not written:
            return eqn
        n_consts, n_carry = _jax.scan_arity(eqn)
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        invars, outvars = list(body.invars), list(body.outvars)
        eqns = list(body.eqns)
        for k in read:
            host = _jax.host_copy(invars[k], eqn)
            invars[k] = host.var
            eqns.insert(0, host.fetch)
        for k in written:
            host = _jax.host_copy(outvars[k], eqn)
            outvars[k] = host.var
            eqns.append(host.store)
        return jaxprs.scan_of_step(
            eqn,
            _jax.jaxpr_of(invars, outvars, eqns, body),
            [self.on_host[v] if k in read else v for k, v in enumerate(eqn.invars)],
            [self.on_host.get(v, v) for v in eqn.outvars],
            n_consts,
            n_carry,
        )

    def _order(self) -> list[int]:
        """Return a possible order of the remaining equations (by number) and the updates (k as -1 - k).

        Each is as early as its operands allow, but not before its place in the program. The place of an
        update is that of its first equation.
        """

        def node(number: int) -> int:
            return -1 - self.of_eqn[number] if number in self.of_eqn else number

        place: dict[int, int] = {}
        needs: dict[int, set[int]] = {}
        for number, eqn in enumerate(self.jaxpr.eqns):
            here = node(number)
            place.setdefault(here, number)
            operands = (self.made[v] for v in eqn.invars if _jax.is_var(v) and v in self.made)
            needs.setdefault(here, set()).update(node(n) for n in operands)
        users: dict[int, list[int]] = {}
        for here, nodes in needs.items():
            nodes.discard(here)
            for other in nodes:
                users.setdefault(other, []).append(here)
        missing = {here: len(nodes) for here, nodes in needs.items()}
        ready = [(place[here], here) for here, n in missing.items() if not n]
        heapq.heapify(ready)
        order = []
        while ready:
            _, here = heapq.heappop(ready)
            order.append(here)
            for user in users.get(here, ()):
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (place[user], user))
        assert len(order) == len(needs), "updates depend on one another"
        return order

    def _loop(self, update: Update, results: dict[int, _jax.Var]) -> list[_jax.JaxprEqn]:
        """Return the equations of the loop, and record the variables of its results in host memory."""
        eqns = [self.jaxpr.eqns[n] for n in update.eqns]
        inside = set(update.eqns)
        state = [self.jaxpr.invars[at] for at in update.leaves]
        read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if _jax.is_var(v))
        shape = state[0].aval.shape
        given = [v for v in read if v not in state and self.made.get(v) not in inside]
        spread = {v: number for v in given if (number := self._spread_number(v)) is not None}
        arrays = [v for v in given if v.aval.shape == shape and v not in spread]
        numbers = [v for v in given if v.aval.shape != shape or v in spread]
        new_state = [self.jaxpr.outvars[at] for at in update.results]
        needed = self._needed_outside(update)
        in_place, others = self._in_place(arrays, needed)
        arrays = [v for v in arrays if v not in in_place]
        arrays.sort(key=lambda v: v not in self.on_host)  # those on the host first
        body = _jax.jaxpr_of(
            [*state, *in_place, *arrays, *numbers],
            [*new_state, *in_place.values(), *others],
            eqns,
            self.jaxpr,
        )
        run = _Loop(
            body,
            len(state),
            len(in_place),
            sum(v in self.on_host for v in arrays),
            len(arrays),
            self.shardings.get(update.leaves[0]),
        )
        numbers = [spread.get(v, v) for v in numbers]
        arrays = [self.on_host.get(v, v) for v in arrays]
        operands = [*map(self.on_host.__getitem__, state), *in_place, *arrays, *numbers]
        traced, consts, _ = _jax.trace_call(run, *(v.aval for v in operands))
        assert not consts
        traced = jaxprs.inline_calls(traced, transparent_call)
        new, outs = jaxprs.inlined(traced, operands, eqns[-1])
        results.update(zip(update.results, outs))
        called = dict(zip(outs[len(state) :], (*in_place.values(), *others)))
        renamed = [
            eqn.replace(outvars=[called.get(v, v) for v in eqn.outvars])
            for eqn in map(_jax.fixed, new)
        ]
        assert len(called) == len(in_place) + len(others)
        return renamed

    def _spread_number(self, v: _jax.Var) -> Atom:
        """Return the scalar of which an array is a broadcast; None if it is not one."""
        made = self.made.get(v)
        eqn = None if made is None else self.jaxpr.eqns[made]
        if eqn is None or eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) != 1:
            return None
        (number,) = eqn.invars
        return number if _jax.is_var(number) and number.aval.shape == () else None

    def _needed_outside(self, update: Update) -> list[_jax.Var]:
        """Return the values of an update that other equations read, or that are results on the device."""
        inside = set(update.eqns)
        values = [v for n in update.eqns for v in self.jaxpr.eqns[n].outvars]
        used = {
            v
            for n, eqn in enumerate(self.jaxpr.eqns)
            if n not in inside
            for v in eqn.invars
            if _jax.is_var(v)
        }
        used.update(
            v
            for at, v in enumerate(self.jaxpr.outvars)
            if _jax.is_var(v) and not any(at in other.results for other in self.updates)
        )
        return [v for v in values if v in used]

    def _in_place(
        self, arrays: Sequence[_jax.Var], needed: Sequence[_jax.Var]
    ) -> tuple[dict[_jax.Var, _jax.Var], list[_jax.Var]]:
        """Return the values that are written into donated arguments, and the other ones."""
        results = set(filter(_jax.is_var, self.jaxpr.outvars))
        taken: dict[_jax.Var, _jax.Var] = {}
        others = []
        for v in needed:
            free = [a for a in arrays if a in self.donated and a not in taken and _is_like(a, v)]
            if v in results and free:
                taken[free[0]] = v
            else:
                others.append(v)
        return taken, others


@dataclasses.dataclass(frozen=True, repr=False)
class _Loop:
    """The loop over the chunks of an update, as a function of whole arrays and scalars.

    Args:
      body: the update; it takes state, arrays that are written in place, other arrays and scalars.
      n_state, n_in_place, n_arrays: the numbers of these.
      n_fetched: the number of other arrays that are on the host; they come first.
      sharding: of the arrays.
    """

    body: _jax.Jaxpr
    n_state: int
    n_in_place: int
    n_fetched: int
    n_arrays: int
    sharding: Sharding

    def __call__(self, *operands: Array) -> Sequence[Array]:
        sharding = self.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return self._local(*operands)
        n = self.n_state + self.n_in_place + self.n_arrays
        numbers = [jax.sharding.PartitionSpec()] * (len(operands) - n)
        return jax.shard_map(
            self._local,
            mesh=sharding.mesh,
            in_specs=(*[sharding.spec] * n, *numbers),
            out_specs=(sharding.spec,) * len(self.body.outvars),
            check_vma=False,
        )(*operands)

    def _local(self, *operands: Array) -> tuple[Array, ...]:
        shape = operands[0].shape
        stacked = chunk_shape(shape, _jax.itemsize_bytes(self.body.invars[0].aval))
        assert stacked is not None
        n = self.n_state + self.n_in_place + self.n_arrays
        views, numbers = [x.reshape(stacked) for x in operands[:n]], operands[n:]
        kept, arrays = (
            views[: self.n_state + self.n_in_place],
            views[self.n_state + self.n_in_place :],
        )

        def one(kept: Sequence[Array], at: tuple[Array, ...]) -> tuple[Arrays, Arrays]:
            i, *rows = at
            old = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in kept]
            old[: self.n_state] = jax.device_put(old[: self.n_state], jax.memory.Space.Device)
            rows[: self.n_fetched] = jax.device_put(rows[: self.n_fetched], jax.memory.Space.Device)
            filled = [
                jnp.broadcast_to(x, old[0].shape) if v.aval.shape else x
                for x, v in zip(numbers, self.body.invars[n:])
            ]
            new = _jax.eval_jaxpr(self.body, (), *old, *rows, *filled)
            written = [x[None] for x in new[: len(kept)]]
            written[: self.n_state] = jax.device_put(written[: self.n_state], jax.memory.Space.Host)
            changed = [
                lax.dynamic_update_slice_in_dim(x, row, i, 0) for x, row in zip(kept, written)
            ]
            return changed, new[len(kept) :]

        kept, rest = lax.scan(one, kept, (jnp.arange(stacked[0]), *arrays))
        return tuple(x.reshape(shape) for x in (*kept, *rest))


def copied_bytes(
    jaxpr: _jax.Jaxpr, updates: Iterable[Update], shardings: Mapping[int, Sharding]
) -> int:
    """Return the bytes that one device copies to its host and back in one step.

    State is fetched and stored once, and weights are fetched by every loop that reads them. Gradients on the
    host are stored by one loop, and fetched by the update.
    """
    total = 0
    for update in updates:
        sharding = shardings.get(update.leaves[0])
        given = [(jaxpr.invars[at].aval, 2 + n) for at, n in zip(update.leaves, update.reads)]
        for aval, times in (*given, *((v.aval, 2) for v in update.stacks)):
            shape = aval.shape if sharding is None else sharding.shard_shape(aval.shape)
            total += times * math.prod(shape) * _jax.itemsize_bytes(aval)
    return total


def check_updates(found: Collection[int], wanted: Iterable[int]) -> None:
    """Raise if arguments that are to stay on the host are not state.

    Raises:
      PlanError: the message names the arguments that are not.
    """
    wrong = sorted(set(wanted).difference(found))
    if wrong:
        raise PlanError(
            f"argument leaves {wrong[:8]} cannot stay in the host's memory, as the plan has it: the step "
            "does not donate them, or does not only update them elementwise. Plan again."
        )
