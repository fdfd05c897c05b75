"""Values of options are checked before any work is done."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training:problem", "--policy", "dots_savable"], "did you mean"),
        (["plan", "training:problem", "-o", "absent/plan.json"], "there is no folder 'absent'"),
        (["plan", "training:problem", "-o", ""], "the path is empty"),
        (["explain", "training:problem", "--html", "."], "'--html': '.' cannot be written: it is"),
        (["explain", "training:problem", "--html", "a\0b"], "NUL"),
        (["explain", "training:problem", "--html", "\ud800"], "cannot be written"),
        (["explain", "training:problem", "--plan", "absent"], "'--plan': 'absent' cannot be read"),
        (["explain", "training:problem", "--plan", "a\0b"], "NUL"),
        (["explain", "training:problem", "--plan", ""], "the path is empty"),
        (["explain", "training:problem", "--target", "gpu:h1000"], "unknown GPU 'h1000'"),
        (["explain", "training:problem", "--target", "tpu:v5e:2"], "is not a shape of a TPU"),
        (["compare", "absent.json", "training:problem"], "'BEFORE': 'absent.json' cannot be read"),
        (["plan", "training:problem", "--budget", "8GG"], "'--budget': '8GG' is not a number"),
        (["plan", "training:problem", "--budget", "0"], "at least 1 byte"),
        (["plan", "training:problem", "--budget", "1e400"], "8 PiB"),
        (["demo", "--budget", "9" * 5000], "8 PiB"),
        (["plan", "training:problem", "--offload", "optimiser"], "did you mean 'optimizer'"),
        (["plan", "training:problem", "--offload", "all"], "activations,optimizer"),
        (["plan", "training:problem", "--offload", "optimizer", "--no-offload"], "exclude each"),
        (["report", "training:problem", "--budgets", "50%, many"], "'--budgets': 'many' is not"),
    ],
    ids=ascii,
)
def test_a_wrong_value_of_an_option_is_refused(refused, arguments, said):
    assert said in refused(*arguments)
