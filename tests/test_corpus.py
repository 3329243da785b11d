"""The corpus is what its table says, reads back without torch, and comes out the same when made anew."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import corpus
from benchmarks.corpus_random import layered
from rematc import versions
from rematc.simulate import simulate
from rematc.solve import solve

ROOT = Path(__file__).parents[1]
MOST_BYTES = 6_000_000
MODELS, RANDOM = corpus.names("model"), corpus.names("random")


def test_every_entry_has_a_file_and_every_file_an_entry() -> None:
    files = {path.name.removesuffix(".json.gz") for path in corpus.FOLDER.glob("*.gz")}
    assert files == set(corpus.names()) == {*MODELS, *RANDOM}
    assert sum(path.stat().st_size for path in corpus.FOLDER.iterdir()) < MOST_BYTES


def test_the_readme_tells_of_every_model() -> None:
    text = (corpus.FOLDER / "README.md").read_text()
    assert not [name for name in MODELS if f"| `{name}` |" not in text]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_a_whole_training_step(name: str) -> None:
    problem = corpus.load(name)
    g = problem.graph
    assert problem.budget_bytes is None
    assert problem.resident_bytes > 0
    assert g.forward and g.backward and g.gradients
    assert len(g.outputs) >= 1 and len(g.tangents) == 1  # the loss, and its gradient
    assert all(c.workspace_bytes == 0 for c in problem.costs)
    assert sum(c.runtime_ns for c in problem.costs) > 0


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_graph_is_a_general_dag_with_one_sink(name: str) -> None:
    problem = corpus.load(name)
    g = problem.graph
    read = {v for op in g.ops for v in op.inputs}
    assert not (g.backward or g.inputs or g.tangents or g.outputs or g.held)
    assert set(range(len(g.values))) - read == set(g.gradients)
    assert [op.outputs for op in g.ops] == [(i,) for i in range(len(g.ops))]
    assert [v.storage for v in g.values] == list(range(len(g.ops)))
    assert len([op for op in g.ops if not op.inputs]) == 1
    assert len({op.name for op in g.ops}) == len(g.ops) == int(name.removeprefix("rand").split("_")[0])
    assert all(c.runtime_ns > 0 for c in problem.costs) and min(g.storage_bytes) > 0


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_graph_comes_out_the_same(name: str) -> None:
    assert corpus.make(name) == corpus.load(name)


def test_random_graphs_have_the_edges_that_they_should() -> None:
    for nodes, edges in ((100, 236), (250, 944), (500, 2461), (1000, 5857)):  # those of Moccasin's graphs
        many = [sum(len(op.inputs) for op in layered(nodes, seed).graph.ops) for seed in range(20)]
        assert 0.9 * edges < sum(many) / len(many) < 1.1 * edges


@pytest.mark.skipif(
    versions.torch_version() not in versions.TESTED,
    reason="the file was captured with a tested torch, and another one traces other ops",
)
def test_a_model_comes_out_the_same(fresh_dynamo: None) -> None:
    from benchmarks.corpus_models import MODELS as MAKERS  # transformers takes seconds to load

    assert set(MAKERS) == set(MODELS)
    assert corpus.make("vgg16") == corpus.load("vgg16")


def test_a_model_is_captured_under_any_torch(fresh_dynamo: None) -> None:
    """Perhaps not the file's graph, but a whole one: as many gradients, as much to keep, and a plan."""
    made, filed = corpus.make("vgg16"), corpus.load("vgg16")
    assert len(made.graph.gradients) == len(filed.graph.gradients)
    peak = simulate(made, corpus.save_all(made)).peak_bytes
    assert peak == pytest.approx(simulate(filed, corpus.save_all(filed)).peak_bytes, rel=0.05)
    plan = solve(made, budget_bytes=made.resident_bytes + int(0.9 * (peak - made.resident_bytes)))
    assert simulate(made, plan).peak_bytes == plan.peak_bytes < peak


def test_a_file_is_its_problem_and_nothing_else() -> None:
    problem = corpus.load("rand100_0")
    data = corpus.ENTRIES["rand100_0"].file.read_bytes()
    assert gzip.decompress(data).decode() == problem.to_json()
    assert data[3:8] == bytes(5)  # no flags (so no name), and no date
    assert corpus.packed(problem) == corpus.packed(problem)


def test_reading_needs_no_torch() -> None:
    code = (
        "from benchmarks import corpus; corpus.load('unet'); corpus.make('rand100_0'); "
        "import sys; print('torch' in sys.modules, 'ortools' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_the_table_is_printed_and_strangers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert corpus.main(["--list", "rand100_0", "unet"]) == 0
    shown = capsys.readouterr().out
    assert "rand100_0" in shown and "14,587.890" in shown
    with pytest.raises(SystemExit):
        corpus.main(["nonesuch"])
    assert "there are: gpt2_2" in capsys.readouterr().err


def test_the_save_all_column_is_what_the_simulation_says() -> None:
    problem = corpus.load("unet")
    profile = simulate(problem, corpus.save_all(problem))
    assert f"{(profile.peak_bytes - problem.resident_bytes) / 1e6:,.3f}" == corpus.row("unet", problem)[5]
