"""`python -m rematc.explain` as a user meets it: what it prints, its exit status, its files, its refusals."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rematc.baselines import greedy
from rematc.explain import main
from rematc.options import SolveOptions
from rematc.plan import Plan
from rematc.problem import Problem
from rematc.simulate import validate
from rematc.solve import refusal
from rematc.trace import pose_model
from tests.zoo import ZOO

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 1))
    return model, torch.ones(512, 64), lambda y: y.sum()

def alone():
    return build()[:2]

answer = 42
"""


def quick(problem: Problem, options: SolveOptions, known: Plan | None = None) -> Plan:
    """A baseline in the solver's place, which refuses as the solver does."""
    plan, budget = greedy(problem, options), problem.budget_bytes
    if budget is not None and plan.peak_bytes > budget:
        raise refusal(problem, plan, bound_bytes=0)
    return replace(plan, strategy="rematc", status="feasible")


def solve_by(solver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Put ``solver`` in the solver's place, wherever it is called from."""
    for room in ("rematc.partition", "rematc.fit"):
        monkeypatch.setattr(sys.modules[room], "solve", solver)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with build(), and a solver that takes no time."""

    solve_by(quick, monkeypatch)
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return file


def refused(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 2) -> str:
    """The one message that ``argv`` is answered with."""
    assert main([str(a) for a in argv]) == status
    out, err = capsys.readouterr()
    assert not out
    assert "Traceback" not in err
    return " ".join(err.split())


def test_a_budget_that_fits(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--budget", "1300kB", "--inner", "eager"]) == 0
    out, err = capsys.readouterr()
    assert not err
    for words in ("resident", "1.30 MB", "peak, all saved", "peak, this plan", "recomputation", "gap"):
        assert words in out
    assert "recomputed (" in out and "*.1 x4" in out
    assert 'backend=rematc.backend(budget="1300kB", inner="eager")' in out
    assert max(len(line) for line in out.splitlines() if str(model) not in line) <= 100


def test_a_budget_that_does_not_fit(model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    message = refused(capsys, model, "--budget", "100kB", "--json", plan, status=3)
    assert "does not fit" in message and "the smallest that there is a plan for is" in message
    assert "largest alive there" in message and "what to try" in message
    assert not plan.exists()


def test_who_looks_on_is_told_what_takes_so_long(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal came after 80 s of nothing on the screen."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([str(model), "--budget", "100kB"]) == 3
    first, *others = capsys.readouterr().err.split("does not fit")
    assert "can take minutes" in first and others
    assert main([str(model), "--inner", "eager", "--budget", "1300kB"]) == 0
    assert not capsys.readouterr().err


def test_without_a_budget_everything_is_saved(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{model}:alone", "--inner", "eager"]) == 0
    assert "saved: nothing is short" in capsys.readouterr().out


def test_the_plan_is_written_and_is_one_for_the_problem(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert main([str(model), "--budget", "1300kB", "--inner", "eager", "--json", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()
    from rematc.loader import load
    from rematc.options import Options

    problem, _ = pose_model(*load(model), Options("1300kB", "eager"))
    plan = Plan.from_json(file.read_text())
    assert plan.digest == problem.digest
    assert validate(problem, plan).recompute_ns > 0


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_old_plan_stays_whole_if_writing_fails(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    message = refused(capsys, model, "--json", plan)
    assert "No space left on device" in message and "elsewhere" in message
    assert plan.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix == ".json" or p.name[0] == ".") == [
        "plan.json"
    ]


def test_an_old_plan_is_replaced_whole_through_a_link(model: Path, tmp_path: Path) -> None:
    plan, link = tmp_path / "plan.json", tmp_path / "latest.json"
    plan.write_text("old" * 10_000)
    plan.chmod(0o640)
    link.symlink_to(plan)
    assert main([str(model), "--budget", "1GB", "--json", str(link)]) == 0
    assert link.is_symlink()
    assert Plan.from_json(plan.read_text()).strategy == "rematc"
    assert stat.S_IMODE(plan.stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (".", "is a folder"),
        ("no/such/plan.json", "there is no folder"),
        (os.devnull, "is a device or a pipe"),
    ],
)
def test_a_plan_that_cannot_be_written_is_said_before_the_work(
    target: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The model is not there either: that is not reached.
    assert words in refused(capsys, "nowhere.py", "--json", tmp_path / target)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'build' is not there"),
        ("build = 3", "'build' is no function"),
        ("def built():\n    pass", "model.py:built"),
        ("def build(:\n    pass", "model.py:1: syntax error"),
        ("import no_such_module", "the file raises ModuleNotFoundError: No module named 'no_such_module'"),
        ("def build():\n    return missing", "build() raises NameError: name 'missing' is not defined"),
        ("def build():\n    import sys\n    sys.exit(4)", "build() raises SystemExit: 4"),
        ("def build(size):\n    return size", "build() raises TypeError"),
        ("def build():\n    pass", "build() returns a NoneType"),
        ("def build():\n    return 1, 2, 3, 4", "build() returns 4 things"),
        ("def build():\n    return 1, 2", "a model of type int, which can't be called"),
        ("def build():\n    return abs, (1,), 'mse'", "a loss function of type str"),
        ("def build():\n    return abs, 1", "the inputs are of type int"),
        ("\0", "can't be read as Python"),
    ],
)
def test_a_file_that_gives_no_model(
    text: str, words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model.write_text(text)
    message = refused(capsys, model)
    assert message.startswith("error: ") and words in message


def test_an_error_in_the_file_is_shown_with_its_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text("import torch\ndef build():\n    return torch.ones(2) @ torch.ones(3), 1\n")
    assert f"{model}:3, in build: return torch.ones(2) @ torch.ones(3), 1" in refused(capsys, model)


def test_a_model_that_cannot_be_trained(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2).requires_grad_(False), torch.ones(2)"
    )
    assert "nothing to differentiate" in refused(capsys, model)


@pytest.mark.parametrize("name", ["nowhere.py", "nowhere.py:make", "."])
def test_no_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "give a Python file with def build()" in refused(capsys, name)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bugdet", "2GB"], "unrecognized arguments: --bugdet"),
        (["--budget", "2 potatoes"], "unknown unit 'potatoes'"),
        (["--budget", "lots"], "can't read the budget 'lots'"),
        (["--budget", "-5"], "can't read the budget '-5'"),
        (["--budget", "0"], "must be above zero"),
        (["--budget", "80%"], "the model is on the CPU"),
        (["--reserve", "much"], "reserve='much': give"),
        (["--time-limit", "0"], "give seconds above zero"),
        (["--time-limit", "soon"], "invalid float value"),
        (["--gap", "-1"], "a fraction of at least zero"),
        (["--inner", "jit"], 'give "inductor" or "eager"'),
        (["--optimizer", "adm"], "give the name of one of torch.optim: ASGD, Ada"),
        (["--optimizer", "Muon"], 'give reserve="2GB" with the bytes of its state instead'),
    ],
)
def test_options_that_cannot_be_read(
    argv: list[str], words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, model, *argv)


def test_room_for_what_an_optimizer_keeps(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU all parameters are stepped at once, so that its step takes more than one by one."""
    parameters, found = 4 * (4 * 64 * 65 + 65), {}
    model.write_text(MODEL.replace("512, 64", "2, 64"))
    for device in ((), ("--device", "h100")):
        argv = [str(model), "--budget", "290kB", "--inner", "eager", "--optimizer", "adamw", *device]
        assert main(argv) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert device or f"resident {(3 * parameters + 2 * 64 * 4 + 10 * 4) / 1e3:.2f} kB" in out
        assert 'backend(budget="290kB", inner="eager", optimizer=optimizer)' in out
        found[device] = float(re.findall(r"it makes ([\d.]+) kB for a while", out)[0])
    one_by_one, at_once = found.values()
    assert one_by_one < at_once == pytest.approx(parameters / 1e3, abs=0.01)


def test_no_arguments_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODEL.py" in refused(capsys)
    assert main(["--help"]) == 0
    assert "exit status: 0 the step fits" in capsys.readouterr().out


def test_a_model_in_eval_mode_is_warned_of(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text(f"{MODEL}\ndef resting():\n    model, *rest = build()\n    return model.eval(), *rest\n")
    assert main([f"{model}:resting"]) == 0
    out, err = capsys.readouterr()
    assert "warning: the model is in eval mode" in err
    assert "eval mode" in out


def test_a_fault_of_ours_shows_no_traceback_unless_asked(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("deep")

    solve_by(broken, monkeypatch)
    message = refused(capsys, model, "--budget", "1GB", status=1)
    assert "KeyError: 'deep'" in message and "--debug" in message
    assert main([str(model), "--budget", "1GB", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_what_stands_beside_the_file_is_found(model: Path) -> None:
    (model.parent / "helper_of_the_model.py").write_text("WIDTH = 64\n")
    model.write_text(f"import helper_of_the_model\n{MODEL}")
    before = list(sys.path)
    assert main([str(model)]) == 0
    assert sys.path == before


@pytest.mark.parametrize("name", ["gpt2", "unet", "mlp"])
def test_the_zoo(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ZOO[name]
    model.write_text(
        "from tests.zoo import ZOO\ndef build():\n"
        f"    case = ZOO[{name!r}]()\n    return case.model, case.inputs, case.loss\n"
    )
    assert main([str(model), "--inner", "eager", "--budget", "19MB"]) == 0
    assert f"{model}:build" in capsys.readouterr().out


def test_as_a_command_stdout_has_the_report_and_stderr_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    command = [sys.executable, "-m", "rematc.explain", str(file), "--budget", "1TB", "--inner", "eager"]
    root = Path(__file__).parents[1]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env={**os.environ, "COLUMNS": "80"}
    )
    assert run.returncode == 0, run.stderr
    assert "saved: it fits the budget" in run.stdout
    assert not run.stderr
