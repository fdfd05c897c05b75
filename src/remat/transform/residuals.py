"""The values that a function keeps from its forward pass for its backward pass.

The function is linearized on abstract values; the residuals are the values that the program of its forward
pass returns for the backward pass. `saved_residuals` and `print_saved_residuals` have the results and the
wording of JAX's functions of these names; `residuals` returns the same as data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from remat import _jax, units
from remat.aliases import Array, Arrays, Atom, Aval, PyTree
from remat.printing import printable
from remat.transform import marks, policies

_jax.exclude_from_tracebacks(__file__)


@dataclasses.dataclass(frozen=True, repr=False)
class Residual:
    """One value that is kept from the forward to the backward pass.

    For a result of a loop or a called function, `primitive`, `names`, `source_line` and `name_stack` are
    those of the equation inside that computes it.
    """

    shape: tuple[int, ...]
    dtype: str
    n_bytes: int  # of the whole array, as traced
    kind: str  # "argument", "constant", "literal" or "computed"
    argument: str | None  # the path of the argument: "params['w']"
    primitive: str | None  # the primitive that computes it
    names: tuple[str, ...]  # given by checkpoint_name
    source_line: str | None
    name_stack: str
    offloaded: bool
    origin: str  # where it comes from, in JAX's words
    aval: Aval

    def __repr__(self) -> str:
        return f"Residual({self})"

    def __str__(self) -> str:
        return printable(f"{self.aval.str_short(short_dtypes=True)} {self.origin}")


@dataclasses.dataclass(frozen=True, repr=False)
class Residuals:
    """All residuals of a function: literals, constants, arguments, then in program order."""

    items: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Residual:
        return self.items[index]

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all of them, arguments included."""
        return self._sum(lambda r: True)

    @property
    def saved_bytes(self) -> int:
        """Return the bytes of computed values on the device: those that could be recomputed."""
        return self._sum(lambda r: r.kind == "computed" and not r.offloaded)

    @property
    def offloaded_bytes(self) -> int:
        """Return the bytes of those that are offloaded to another memory."""
        return self._sum(lambda r: r.offloaded)

    @property
    def argument_bytes(self) -> int:
        """Return the bytes of those that are arguments, which exist as long as the caller holds them."""
        return self._sum(lambda r: r.kind == "argument")

    def _sum(self, chosen: Callable[[Residual], bool]) -> int:
        return sum(r.n_bytes for r in self.items if chosen(r))

    def __repr__(self) -> str:
        values = "value" if len(self) == 1 else "values"
        return (
            f"Residuals({len(self)} {values}: {units.format_bytes(self.saved_bytes)} computed, "
            f"{units.format_bytes(self.offloaded_bytes)} offloaded, "
            f"{units.format_bytes(self.argument_bytes)} arguments)"
        )

    def __str__(self) -> str:
        lines = [f"{units.format_bytes(r.n_bytes):>10}  {r}" for r in self.items]
        lines.append(
            f"{units.format_bytes(self.total_bytes):>10}  in all: "
            f"{units.format_bytes(self.saved_bytes)} computed and saved, "
            f"{units.format_bytes(self.offloaded_bytes)} offloaded, "
            f"{units.format_bytes(self.argument_bytes)} arguments"
        )
        return "\n".join(lines)


def residuals(f: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> Residuals:
    """Return the values that `f` keeps for its backward pass at these arguments, without running it.

    >>> import jax.numpy as jnp, remat
    >>> def f(x):
    ...     return jnp.sin(remat.checkpoint_name(jnp.sin(x), "inner")).sum()
    >>> x = jnp.zeros(1000)
    >>> remat.residuals(f, x).saved_bytes
    8000
    >>> remat.residuals(remat.checkpoint(f), x).saved_bytes
    0
    >>> saved = remat.residuals(remat.checkpoint(f, policy=remat.policies.save("inner")), x)
    >>> [(r.names, r.shape, r.n_bytes) for r in saved if r.kind == "computed"]
    [(('inner',), (1000,), 4000)]

    Args:
      f: a differentiable function.
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in their place.

    Returns:
      One `Residual` for each array, with sizes in bytes.

    Raises:
      TypeError: as `jax.vjp` does, for arguments or results that cannot be differentiated.
    """
    leaves, in_tree = jax.tree.flatten((args, kwargs))

    def forward(*leaves: Array) -> Arrays:
        def call(*inner: Array) -> PyTree:
            call_args, call_kwargs = jax.tree.unflatten(in_tree, inner)
            return f(*call_args, **call_kwargs)

        return jax.vjp(call, *leaves)

    closed, (_, kept) = jax.make_jaxpr(forward, return_shape=True)(*leaves)
    jaxpr = _jax.open_jaxpr(closed)
    n_kept = len(jax.tree.leaves(kept))
    names = _jax.argument_names(f, args, kwargs, len(leaves))
    return Residuals(tuple(describe(jaxpr, n_kept, names)))


def saved_residuals(
    f: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
) -> list[tuple[Aval, str]]:
    """Return the residuals of `f` as pairs of an abstract value and where it comes from.

    >>> import jax.numpy as jnp, remat
    >>> remat.saved_residuals(remat.checkpoint(jnp.sin), 1.0)
    [(ShapedArray(float32[], weak_type=True), 'from the argument x')]

    See `residuals` for the same with sizes, and for the arguments.
    """
    return [(r.aval, r.origin) for r in residuals(f, *args, **kwargs)]


def print_saved_residuals(f: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree) -> None:
    """Print the residuals of `f`, one per line.

    >>> import jax.numpy as jnp, remat
    >>> remat.print_saved_residuals(remat.checkpoint(jnp.sin), jnp.ones((2, 3)))
    f32[2,3] from the argument x
    """
    for residual in residuals(f, *args, **kwargs):
        print(residual)


# --------------------------------------------------------------------------------------------------

# Operations after which a residual is still the same value.
_LOOK_THROUGH = ("reduce_precision", "remat_mark", "device_put")


def describe(
    jaxpr: _jax.Jaxpr, n_residuals: int, argument_names: Sequence[str]
) -> Iterator[Residual]:
    """Yield descriptions of the residuals, which are the last results of a forward pass's jaxpr."""
    made = _Made(jaxpr)
    kept: dict[Atom, Atom] = {}  # the value behind each residual -> the residual itself
    for v in jaxpr.outvars[len(jaxpr.outvars) - n_residuals :]:
        if isinstance(v, _jax.Literal):
            yield _residual(v.aval, "literal", "from a literal")
        else:
            kept.setdefault(made.source(v), v)
    for v in jaxpr.constvars:
        if v in kept:
            yield _residual(kept[v].aval, "constant", "from a constant")
    for v, name in zip(jaxpr.invars, argument_names):
        if v in kept:
            origin = f"from the argument {name}"
            yield _residual(kept[v].aval, "argument", origin, argument=name)
    for eqn in jaxpr.eqns:
        for v in eqn.outvars:
            if v in kept:
                yield _computed(made, kept[v].aval, v, eqn)


def _computed(made: _Made, aval: Aval, v: Atom, eqn: _jax.JaxprEqn) -> Residual:
    names, at = made.names(v)
    line = _jax.source_line_of(at)
    if names:
        origin = f"named '{names[0]}' from {line}"
    elif eqn.primitive.name == "jit":
        origin = f"output of jitted function '{eqn.params['name']}' from {line}"
    else:
        origin = f"output of {eqn.primitive.name} from {line}"
    path = _jax.name_stack_of(eqn)
    while (inner := _inside(eqn, v)) is not None and not names:
        body, v = inner
        made = _Made(body)
        v = made.source(v)
        if v not in made.producer:  # an input of the body
            break
        eqn = made.producer[v]
        names, at = made.names(v)
        path = marks.join(path, _jax.name_stack_of(eqn))
    return _residual(
        aval,
        "computed",
        origin,
        primitive=eqn.primitive.name,
        names=names,
        source_line=_jax.source_line_of(at),
        name_stack=path,
    )


class _Made:
    """The equations that compute the values of a jaxpr, and the names of these values."""

    def __init__(self, jaxpr: _jax.Jaxpr):
        self.producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._named = policies.names_of_values(jaxpr)
        self._marked: dict[Atom, _jax.JaxprEqn] = {}

    def source(self, v: Atom) -> Atom:
        """Return the value of which `v` is a rounded, marked or moved copy."""
        while (eqn := self.producer.get(v)) is not None and eqn.primitive.name in _LOOK_THROUGH:
            inner = eqn.invars[eqn.outvars.index(v)]
            if isinstance(inner, _jax.Literal):
                break
            if eqn.primitive is marks.mark_p:
                self._marked.setdefault(inner, eqn)
            elif v in self._marked:
                self._marked.setdefault(inner, self._marked[v])
            v = inner
        return v

    def names(self, v: Atom) -> tuple[tuple[str, ...], _jax.JaxprEqn]:
        """Return the names of a value, and the equation that gave them; without names, its producer."""
        eqn = self.producer[v]
        given = _jax.checkpoint_name_of(eqn)
        if given is not None:
            return (given,), eqn
        if v in self._marked and self._marked[v].params["names"]:
            return self._marked[v].params["names"], self._marked[v]
        if v in self._named:
            return tuple(sorted(self._named[v].names)), self._named[v].eqn
        return (), eqn


def _inside(eqn: _jax.JaxprEqn, v: Atom) -> tuple[_jax.Jaxpr, Atom] | None:
    """Return the body of a loop or called function, and the value in it that becomes `v` outside."""
    bodies = [_jax.open_jaxpr(body) for body in _jax.jaxprs_of(eqn)]
    if len(bodies) != 1 or len(bodies[0].outvars) != len(eqn.outvars):
        return None
    inner = bodies[0].outvars[eqn.outvars.index(v)]
    return None if isinstance(inner, _jax.Literal) else (bodies[0], inner)


def _residual(
    aval: Aval,
    kind: str,
    origin: str,
    *,
    argument: str | None = None,
    primitive: str | None = None,
    names: tuple[str, ...] = (),
    source_line: str | None = None,
    name_stack: str = "",
) -> Residual:
    return Residual(
        shape=tuple(aval.shape),
        dtype=str(aval.dtype),
        n_bytes=aval.size * _jax.itemsize_bytes(aval),
        kind=kind,
        argument=argument,
        primitive=primitive,
        names=names,
        source_line=source_line,
        name_stack=name_stack,
        offloaded=_jax.is_on_host(aval),
        origin=origin,
        aval=aval,
    )
