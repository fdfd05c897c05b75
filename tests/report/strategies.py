"""Random valid explanations for property tests, with hostile strings among their texts."""

from __future__ import annotations

from hypothesis import strategies as st

from remat.report.explanation import Explanation
from remat.report.model import (
    ACTIONS,
    KINDS,
    PHASES,
    SEVERITIES,
    Decision,
    Finding,
    Memory,
    Option,
    ParetoPoint,
    Segment,
    Step,
    Totals,
    Value,
)

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "'\"><b>&amp; </td></table><!-- ]]>",
    "`code` | pipe | **bold** [link](javascript:alert(1)) \\ # _x_ ~~s~~",
    "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "line\nbreak\r\ttab \x1b[31mred\x1b[0m \x00 \u2028 \ud800 [red]markup[/red]",
    "$\\frac{1}{0$ 😀 日本語 {slot} %s ${x} $$",
    "<!--slot:data--> @import url(https://example.com/x.css)",
)

# Includes lone surrogates, which Python's strings from damaged file names have.
texts = st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=()), max_size=12)
numbers = st.floats(0, 1e18, allow_nan=False) | st.integers(0, 10**20)
sizes = st.integers(0, 2**40)
memories = st.builds(Memory, sizes, sizes, sizes, sizes, sizes)


@st.composite
def lifetimes(draw: st.DrawFn, n_steps: int) -> tuple[tuple[int, int], ...]:
    """Draw up to two intervals within the steps."""
    ends = draw(st.lists(st.integers(0, n_steps - 1), max_size=4, unique=True)) if n_steps else []
    ends = sorted(ends[: len(ends) // 2 * 2])
    return tuple(zip(ends[::2], ends[1::2]))


@st.composite
def explanations(draw: st.DrawFn) -> Explanation:
    """Draw an explanation that is consistent."""
    n_steps = draw(st.integers(0, 12))
    n_segments = draw(st.integers(0, 3)) if n_steps else 0
    segments = []
    for number in range(n_segments):
        first, last = sorted(draw(st.tuples(*[st.integers(0, n_steps - 1)] * 2)))
        segments.append(
            Segment(
                number,
                draw(texts),
                first,
                last,
                draw(sizes),
                draw(numbers),
                draw(st.integers(0, 2)),
            )
        )
    steps = [
        draw(
            st.builds(
                Step,
                texts,
                st.sampled_from(PHASES),
                numbers,
                texts,
                st.integers(-1, n_segments - 1),
            )
        )
        for _ in range(n_steps)
    ]
    values = [
        draw(
            st.builds(
                Value, st.just(i), st.sampled_from(KINDS), texts, sizes, lifetimes(n_steps),
                texts, texts, texts, texts, texts, numbers, numbers,
            )
        )
        for i in draw(st.lists(st.integers(0, 1000), max_size=12, unique=True))
    ]  # fmt: skip
    recomputed, rest = draw(st.floats(0, 1e15)), draw(st.floats(0, 1e15))
    totals = Totals(
        draw(memories), draw(st.none() | memories), draw(texts),
        recomputed + rest, recomputed, recomputed + rest, recomputed,
    )  # fmt: skip
    return Explanation(
        title=draw(texts),
        platform=draw(texts),
        target=draw(texts),
        versions=tuple(draw(st.dictionaries(texts, texts, max_size=3)).items()),
        values=tuple(values),
        steps=tuple(steps),
        segments=tuple(segments),
        findings=tuple(
            draw(
                st.lists(
                    st.builds(
                        Finding,
                        texts,
                        st.sampled_from(SEVERITIES),
                        texts,
                        texts,
                        st.lists(st.builds(Option, texts, texts, sizes), max_size=2).map(tuple),
                    ),
                    max_size=3,
                )
            )
        ),
        totals=totals,
        pareto=tuple(
            draw(
                st.lists(
                    st.builds(
                        ParetoPoint, sizes, numbers, numbers, texts, st.booleans(), st.booleans()
                    ),
                    max_size=4,
                )
            )
        ),
        decisions=tuple(
            draw(
                st.lists(
                    st.builds(
                        Decision,
                        st.sampled_from(ACTIONS),
                        texts,
                        texts,
                        texts,
                        sizes,
                        sizes,
                        numbers,
                    ),
                    max_size=4,
                )
            )
        ),
    )
