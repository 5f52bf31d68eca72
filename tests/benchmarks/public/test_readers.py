"""Check that readers give the graph that a file means, and run no code of a stranger's file."""

from __future__ import annotations

import collections
import json
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from benchmarks.public import instances
from benchmarks.public.readers import checkmate_files, dtr_logs, safe_pickle
from benchmarks.public.readers.safe_pickle import UnsafePickle
from benchmarks.public.step_graph import StepGraph, StepOp, StepValue

COLUMNS = {
    "name": "tiny",
    "edges": [[0, 1], [1, 2], [0, 3], [2, 3]],
    "mem_kib": [10, 20, 5, 0],
    "fixed_kib": [90, 90, 95, 100],
    "cost_centi_ms": [100, 200, 300, 400],
    "op": ["aten::_convolution", "aten::relu_", "loss::loss", "aten::_convolution_ip_grad"],
    "loss": 2,
}


class Hostile:
    def __reduce__(self):
        return (Path.touch, (Path(self.target),))


@pytest.mark.parametrize("protocol", [0, 2, 3, 4, 5])
def test_a_hostile_pickle_is_refused_before_it_runs_anything(tmp_path, protocol):
    hostile = Hostile()
    hostile.target = str(tmp_path / "touched")
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps([1, hostile], protocol))
    with pytest.raises(UnsafePickle):
        safe_pickle.read(tmp_path / "bad.pkl")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "call",
    [
        b"cos\nsystem\n(S'false'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(cbuiltins\nlist\nS'__subclasses__'\ntR(tR.",  # a Record, which takes no call
        b"cnumpy\nload\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfromfile\n(S'x'\ntR.",
        b"c__main__\nAnything\n(tR.",
        b"cmonet.graph\nNode\n(S'x'\ntR.",  # a Record takes no arguments
    ],
)
def test_calls_in_a_pickle_are_refused(tmp_path, call):
    (tmp_path / "bad.pkl").write_bytes(call)
    try:
        found = safe_pickle.read(tmp_path / "bad.pkl")
    except (pickle.UnpicklingError, TypeError):
        return
    assert type(found) is safe_pickle.Record
    assert not hasattr(found, "fields")


def test_plain_data_and_numpy_arrays_are_read_as_they_are(tmp_path):
    lists = collections.defaultdict(list, {1: [2]})
    data = {
        "a": [1, 2.5, "text"],
        "s": {1, 2},
        "m": np.arange(4).reshape(2, 2),
        "x": np.float32(1.5),
        "d": lists,
    }
    (tmp_path / "good.pkl").write_bytes(pickle.dumps(data))
    found = safe_pickle.read(tmp_path / "good.pkl")
    assert found.pop("m").tolist() == [[0, 1], [2, 3]]
    assert found == {key: value for key, value in data.items() if key != "m"}


def test_columns_of_checkmate_become_a_graph():
    graph = checkmate_files.from_columns(COLUMNS)
    assert [op.reads for op in graph.ops] == [(), (0,), (1,), (0, 2)]
    assert [op.us for op in graph.ops] == [1000, 2000, 3000, 4000]
    assert [value.nbytes for value in graph.values] == [10 * 1024, 20 * 1024, 5 * 1024, 0]
    assert (graph.forward_ops, graph.static_bytes, graph.rule) == (3, 100 * 1024, "checkmate")
    assert StepGraph.from_json(json.loads(json.dumps(graph.to_json()))) == graph


class FwdNode:
    def __init__(self, **fields):
        self.__dict__ |= fields


def test_a_published_pickle_gives_graph_budget_and_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(FwdNode, "__module__", "monet.solver_info")
    for module in ("monet", "monet.solver_info"):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(FwdNode=FwdNode))
    nodes = {
        i: FwdNode(
            mem=np.int64(COLUMNS["mem_kib"][i] * 1024 + 3),
            fixed_mem=COLUMNS["fixed_kib"][i] * 1024,
            workspace_compute=[np.float32(COLUMNS["cost_centi_ms"][i] / 100)],
            op=COLUMNS["op"][i],
        )
        for i in range(4)
    }
    info = FwdNode(nodes=nodes, edge_list=[(a, b, 0) for a, b in COLUMNS["edges"]], loss=2)
    runs, kept = np.eye(4, dtype=int), np.zeros((4, 4), int)
    runs[3, 0] = kept[1, 0] = kept[2, 1] = kept[3, 2] = 1
    solution = FwdNode(r=runs, s=kept)
    path = tmp_path / "checkmate_solution_tiny_normal_5.00.pkl"
    path.write_bytes(pickle.dumps([info, solution]))
    graph, budget, stages = checkmate_files.from_pickle(path)
    assert graph == checkmate_files.from_columns(COLUMNS)
    assert budget == 5 * 2**30
    assert stages == [({0}, set()), ({1}, {0}), ({2}, {1}), ({0, 3}, {2})]
    [(_, make)] = instances.given([tmp_path])
    [instance] = make()
    assert instance.budgets == (budget,)
    assert instance.solutions == {("tiny", budget): stages}


def test_only_graphs_are_read_from_a_folder(tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(COLUMNS))
    (tmp_path / "step.json").write_text(json.dumps(checkmate_files.from_columns(COLUMNS).to_json()))
    (tmp_path / "config.json").write_text('{"name": "a configuration"}')
    (tmp_path / "data.json").write_text("[1, 2]")
    assert [name for name, _ in instances.given([tmp_path])] == ["graph.json", "step.json"]
    [(_, make)] = instances.given([tmp_path / "config.json"])  # named by the user, so not left out in silence
    with pytest.raises(KeyError):
        make()


LOG = """
{"INSTRUCTION":"CONSTANT","NAME":"before"}
{"INSTRUCTION":"MEMORY","NAME":"before","MEMORY":"1"}
{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}
{"INSTRUCTION":"CONSTANT","NAME":"w"}
{"INSTRUCTION":"MEMORY","NAME":"w","MEMORY":"100"}
{"INSTRUCTION":"CALL","NAME":"mm","ARGS":["w"],"RESULT":["x"],"TIME":"2000"}
{"INSTRUCTION":"MEMORY","NAME":"x","MEMORY":"8"}
{"INSTRUCTION":"ALIAS","NAME":"x","ALIAS":"-1"}
{"INSTRUCTION":"CALL","NAME":"view","ARGS":["x"],"RESULT":["v"],"TIME":"7"}
{"INSTRUCTION":"MEMORY","NAME":"v","MEMORY":"8"}
{"INSTRUCTION":"ALIAS","NAME":"v","ALIAS":"0"}
{"INSTRUCTION":"MUTATE","NAME":"relu_","ARGS":["v"],"MUTATE":["0"],"TIME":"1000"}
{"INSTRUCTION":"COPY","DST":"y","SRC":"x"}
{"INSTRUCTION":"RELEASE","NAME":"x"}
{"INSTRUCTION":"CALL","NAME":"max_pool2d_backward","ARGS":["y"],"RESULT":["p"],"TIME":"3000"}
{"INSTRUCTION":"MEMORY","NAME":"p","MEMORY":"2"}
{"INSTRUCTION":"ALIAS","NAME":"p","ALIAS":"-1"}
{"INSTRUCTION":"RELEASE","NAME":"p"}
{"INSTRUCTION":"ANNOTATE","ANNOTATION":"BACKWARD"}
{"INSTRUCTION":"CALL","NAME":"mm_backward","ARGS":["y","w"],"RESULT":["g"],"TIME":"4000"}
{"INSTRUCTION":"MEMORY","NAME":"g","MEMORY":"16"}
{"INSTRUCTION":"ALIAS","NAME":"g","ALIAS":"-1"}
{"INSTRUCTION":"RELEASE","NAME":"y"}
{"INSTRUCTION":"RELEASE","NAME":"v"}
"""


def test_a_log_of_dtr_becomes_a_graph(tmp_path):
    (tmp_path / "tiny-1.log").write_text(LOG.strip())
    graph = dtr_logs.read(tmp_path / "tiny-1.log")
    assert graph.static_bytes == 100
    assert graph.ops == (
        StepOp("/aten.mm.default#0", 2.0, ()),
        StepOp("/aten.relu_.default#1", 1.0, (0,)),
        StepOp("/aten.max_pool2d_backward.default#2", 3.0, (1,)),
        StepOp("/aten.mm_backward.default#3", 4.0, (1,)),
    )
    assert graph.values == (StepValue(0, 8), StepValue(1, 8, 0), StepValue(2, 2), StepValue(3, 16))
    assert (graph.forward_ops, graph.keep) == (3, (3,))  # the pooling is of forward, whatever its name


def test_a_constant_of_dtr_that_is_written_in_place_is_a_value(tmp_path):
    update = '{"INSTRUCTION":"MUTATE","NAME":"addcdiv_","ARGS":["w","g"],"MUTATE":["0"],"TIME":"1000"}'
    (tmp_path / "tiny-1.log").write_text(f"{LOG.strip()}\n{update}")
    graph = dtr_logs.read(tmp_path / "tiny-1.log")
    assert graph.static_bytes == 0
    assert graph.ops[0] == StepOp("/aten.constant.default#0", 0.0, (), repeatable=False)
    assert [op.reads for op in graph.ops] == [(), (0,), (1,), (2,), (0, 2), (0, 4)]
    assert graph.values[5] == StepValue(5, 100, 0)
    assert graph.keep == (4, 5)


def test_a_graph_that_breaks_an_invariant_is_refused():
    with pytest.raises(ValueError, match="earlier ops"):
        StepGraph("", "", (StepOp("a", 1, (0,)),), (StepValue(0, 1),), 1).checked()
    with pytest.raises(ValueError, match="order"):
        StepGraph("", "", (StepOp("a", 1, ()),), (StepValue(3, 1),), 1).checked()
    with pytest.raises(ValueError, match="format"):
        StepGraph.from_json({"format": "other"})
