"""Graphs: the inputs that they accept, and the errors of damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from solver_cases import GRAPHS, graphs

from remat.errors import GraphError
from remat.solvers import Graph, Node, no_remat


@pytest.mark.parametrize("name", ["unet", "fcn8", "vgg16"])
def test_published_graphs_load_and_agree_with_their_headers(name: str) -> None:
    path = GRAPHS / f"{name}.json"
    header = json.loads(path.read_text())
    graph = Graph.load(path)
    usage = no_remat(graph)
    assert graph.name == name
    assert usage.peak_bytes == header["peak_bytes_no_remat"]
    assert usage.time == graph.time == header["time_no_remat"]


@given(graphs())
def test_a_saved_graph_loads_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, graph: Graph
) -> None:
    path = tmp_path_factory.mktemp("graph") / "graph.json"
    graph.save(path)
    assert Graph.load(path) == graph
    assert list(path.parent.iterdir()) == [path]


def test_equal_graphs_are_equal_and_have_equal_hashes() -> None:
    one, other = (Graph([Node(7, 1.5, 3)]) for _ in range(2))  # type: ignore[arg-type]
    assert one == other
    assert hash(one) == hash(other)


def test_results_are_the_nodes_without_users() -> None:
    graph = Graph((Node(5, 1, 1), Node(3, 1, 1, (5,)), Node(9, 1, 1, (5,))))
    assert graph.sinks == (3, 9)
    assert graph.operands() == ((), (0,), (0,))


_DAMAGED = {
    "syntax": ('{"nodes": [\n{"id": 0,, "time": 1}]}', 2, "not JSON"),
    "cut off": (
        '{"name": "x",\n"nodes": [\n{"id": 0, "time": 1, "bytes": 1, "deps": []}',
        3,
        "','",
    ),
    "no object": ("[1]", 1, "one JSON object"),
    "empty": ("", 1, "one JSON object"),
    "no nodes": ('{"name": "x"}', 1, "'nodes' is missing"),
    "nodes twice": ('{"nodes": [],\n"nodes": []}', 2, "second time"),
    "key twice": ('{"nodes": [{"id": 0, "id": 1, "time": 1, "bytes": 1, "deps": []}]}', 1, "twice"),
    "text after": ('{"nodes": []}\n\n{}', 3, "after the end"),
    "not a list": ('{"nodes": {}}', 1, "must be a list"),
    "node no object": ('{"nodes": [\n\n3]}', 3, "must be an object"),
    "no bytes": ('{"nodes": [\n{"id": 0, "time": 1, "deps": []}]}', 2, "no 'bytes'"),
    "name no text": ('{"name": 3, "nodes": []}', 1, "name must be a text"),
    "key no text": ("{nodes: []}", 1, "double quotes"),
    "deep": ('{"nodes": [\n' + "[" * 100_000, 2, "deeply"),
    "digits": ('{"nodes": [\n{"id": ' + "1" * 5000 + "}]}", 2, "digits"),
}
_NODE = '{"nodes": [\n{"id": 0, "time": 1, "bytes": 1, "deps": []},\n{"id": 1,\n%s\n}]}'
_WRONG_FIELDS = {
    "negative bytes": ('"bytes": -1, "time": 1, "deps": [0]', "bytes must be"),
    "huge bytes": ('"bytes": 1' + "0" * 40 + ', "time": 1, "deps": [0]', "bytes must be"),
    "part of a byte": ('"bytes": 1.5, "time": 1, "deps": [0]', "bytes must be"),
    "text as bytes": ('"bytes": "8GiB", "time": 1, "deps": [0]', "bytes must be"),
    "true as bytes": ('"bytes": true, "time": 1, "deps": [0]', "bytes must be"),
    "infinite time": ('"time": 1e999, "bytes": 1, "deps": [0]', "time must be"),
    "time no number": ('"time": NaN, "bytes": 1, "deps": [0]', "NaN"),
    "negative time": ('"time": -0.5, "bytes": 1, "deps": [0]', "time must be"),
    "unknown operand": ('"deps": [17], "time": 1, "bytes": 1', "operand 17"),
    "itself": ('"deps": [1], "time": 1, "bytes": 1', "not an earlier node"),
    "deps no list": ('"deps": 0, "time": 1, "bytes": 1', "deps must be"),
    "operand no id": ('"deps": [[]], "time": 1, "bytes": 1', "operand []"),
    "name no text": ('"name": [], "deps": [], "time": 1, "bytes": 1', "name must be"),
    "backward no bool": ('"backward": 1, "deps": [], "time": 1, "bytes": 1', "backward must be"),
}
_DAMAGED |= {key: (_NODE % field, 4, why) for key, (field, why) in _WRONG_FIELDS.items()}


@pytest.mark.parametrize("case", _DAMAGED)
def test_a_damaged_file_is_refused_with_its_line_and_why(tmp_path: Path, case: str) -> None:
    text, line, why = _DAMAGED[case]
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(GraphError) as refused:
        Graph.load(path)
    assert f"line {line}:" in str(refused.value)
    assert why in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_repeated_id_is_refused_at_its_own_line(tmp_path: Path) -> None:
    node = '{"id": 0, "time": 1, "bytes": 1, "deps": []}'
    path = tmp_path / "twice.json"
    path.write_text(f'{{"nodes": [\n{node},\n{node}]}}')
    with pytest.raises(GraphError, match=r"line 3: id 0 is taken"):
        Graph.load(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.json"
    path.write_bytes(b'{"name":\n"\xff\xfe"}')
    with pytest.raises(GraphError, match=r"line 2: not UTF-8"):
        Graph.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="cannot be read"):
        Graph.load(tmp_path / "none.json")
    with pytest.raises(GraphError, match="cannot be written"):
        Graph(()).save(tmp_path / "none" / "graph.json")


@pytest.mark.parametrize(
    "nodes",
    [
        (Node(0, 1, 1, (1,)), Node(1, 1, 1)),
        (Node(0, 1, 1), Node(0, 1, 1)),
        (Node(0, float("nan"), 1),),
        (Node(0, 1, -1),),
        (Node(0, 1, 2**53), Node(1, 1, 2**53)),
        (Node(0, 1e308, 1), Node(1, 1e308, 1)),
        (Node(0, 10**400, 1),),
    ],
)
def test_a_graph_made_by_hand_is_checked_too(nodes: tuple[Node, ...]) -> None:
    with pytest.raises(GraphError):
        Graph(nodes)
