"""The modules and methods that patterns and names select."""

from __future__ import annotations

import pytest

from remat.errors import MethodError, PolicyError, TargetError, UnknownNameError
from remat.selection import Selection, has_method


class Layer:
    def __call__(self, x):
        return x

    def encode(self, x):
        return x


CLASSES = {"encoder": Layer, "encoder/layers_0": Layer, "head": object}


@pytest.mark.parametrize("given", ["", "/", (), 3 * ("",), (3,)])
def test_patterns_that_are_none_are_refused(given):
    with pytest.raises(PolicyError, match="path"):
        Selection.of(given)


@pytest.mark.parametrize("methods", [(), "", (3,), 3])
def test_methods_that_are_none_are_refused(methods):
    with pytest.raises(MethodError, match="methods"):
        Selection.of("encoder", methods)


def test_a_module_is_selected_by_its_path_if_it_has_one_of_the_methods():
    selection = Selection.of("encoder/*", ("encode", "decode"))
    assert selection.selects("encoder/layers_0", Layer)
    assert not selection.selects("head", Layer)
    assert not selection.selects("encoder/layers_0", object)


def test_a_pattern_that_selects_no_module_is_refused_unless_the_selection_is_not_strict():
    with pytest.raises(UnknownNameError, match="decoder"):
        Selection.of("decoder").check(CLASSES)
    Selection.of("decoder", strict=False).check(CLASSES)
    Selection.of("encoder").check(CLASSES)


def test_a_pattern_that_selects_no_class_with_the_method_is_refused():
    with pytest.raises(TargetError, match="decode"):
        Selection.of("encoder", "decode").check(CLASSES)


def test_the_call_of_a_metaclass_is_not_a_method_of_the_class():
    assert has_method(Layer, "encode") and not has_method(object, "__call__")
