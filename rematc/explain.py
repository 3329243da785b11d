"""`python -m rematc.explain model.py --budget 2GB`: what a budget would cost, before anything is trained."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rematc.cards import card
from rematc.errors import BudgetError, CaptureError, OptionError, PlanError, ProblemError, RematcError

FITS, OWN_FAULT, BAD_INPUT, TOO_SMALL = 0, 1, 2, 3
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

EPILOG = """\
MODEL.py has a function build() that returns (model, inputs) or (model, inputs, loss_fn): inputs is a
tuple (positional arguments), a dict (keyword arguments) or one tensor, and loss_fn takes what the model
returns. Without loss_fn the model alone is planned for, as torch.compile(model) compiles it.

exit status: 0 the step fits the budget, 3 it does not, 2 bad input, 1 a fault of rematc's own.
"""
PATIENCE = (
    "planning: Inductor lowers plan after plan until the code of one fits, which can take minutes; "
    "--inner eager takes seconds, and tells what eager ops would take"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on ``argv`` (by default the process's own) and return its exit status.

    The report goes to stdout, every message to stderr.

    >>> main(["no_such_file.py"])
    2
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as e:  # argparse has said what is wrong, or what --help asked for
        return e.code if isinstance(e.code, int) else BAD_INPUT
    try:
        return _explain(args)
    except BudgetError as e:
        _say(f"does not fit: {e}", args)
        return TOO_SMALL
    except RematcError as e:
        if isinstance(e, PlanError | ProblemError):  # nothing that the user gave can be meant
            return _own_fault(e, args)
        _say(f"error: {e}", args)
        return BAD_INPUT
    except KeyboardInterrupt:
        _say("stopped", args)
        return INTERRUPTED
    except BrokenPipeError:  # `| head`: whoever read the report has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FITS
    except Exception as e:
        return _own_fault(e, args)


def _own_fault(error: Exception, args: argparse.Namespace) -> int:
    _say(
        f"error: rematc failed where it should not ({type(error).__name__}: {error}).\n"
        "  what to try: again with --debug, and report what it prints together with MODEL.py",
        args,
    )
    return OWN_FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rematc.explain",
        description="What is saved and what is recomputed under a memory budget, and why. No step is run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL.py", help="file with build(); MODEL.py:NAME for another name")
    parser.add_argument(
        "--budget", help='peak memory of a step: "2GB", "1.5GiB", "80%%", or bytes; default: no limit'
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the plan to FILE")
    parser.add_argument("--inner", default="inductor", help="ops as inductor (default) or eager runs them")
    parser.add_argument(
        "--device", metavar="CARD", help="plan for a card that isn't here, as h100; the model takes no memory"
    )
    parser.add_argument("--reserve", default="0", help='memory to keep free: "500MB"; default: 0')
    parser.add_argument(
        "--optimizer", metavar="NAME", help="leave room for what one of torch.optim keeps, as AdamW"
    )
    parser.add_argument(
        "--time-limit", type=float, default=30.0, metavar="S", help="seconds of work to search; default: 30"
    )
    parser.add_argument(
        "--gap", type=float, default=0.01, help="stop this close to the proven optimum; default: 0.01"
    )
    parser.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    return parser


def _explain(args: argparse.Namespace) -> int:
    from rematc.files import check_target, write_whole

    path, name = _file_and_name(args.model)
    if args.json is not None:
        check_target(args.json)
    if args.device:
        card(args.device)
    # Torch is loaded only now: what is wrong with the command line is said at once.
    from rematc.options import Options, SolveOptions
    from rematc.report import report
    from rematc.trace import plan_model, without_memory

    reserve = 0 if args.reserve == "0" else args.reserve
    solve = SolveOptions(args.time_limit, args.gap)
    optimizer = _optimizer(args.optimizer)
    options = Options(args.budget, args.inner, reserve, optimizer, solve, costs=args.device or "auto")
    with without_memory() if args.device else nullcontext():
        model, inputs, loss_fn = _loaded(path, name, args)
        if options.inner == "inductor" and args.budget is not None and sys.stderr.isatty():
            _say(PATIENCE, args)
        problem, plan = plan_model(model, inputs, loss_fn, options)
    if args.json is not None:
        write_whole(args.json, plan.to_json() + "\n")
    print(_title(path, name, model, args))
    print(report(problem, plan, _columns()))
    print(f"\n{_use(args)}", flush=True)
    return FITS


def _optimizer(name: str | None) -> Any:
    from torch import optim

    known = {n.lower(): kind for n, kind in vars(optim).items() if isinstance(kind, type)}
    for other in ("optimizer", "lbfgs", "sparseadam"):  # these two can't be tried: they want more than a step
        known.pop(other, None)
    if name is not None and name.lower() not in known:
        names = ", ".join(sorted(kind.__name__ for kind in known.values()))
        raise OptionError(f"--optimizer {name!r}: give the name of one of torch.optim: {names}")
    return known[name.lower()] if name else None


def _loaded(path: Path, name: str, args: argparse.Namespace) -> tuple[Any, Any, Any]:
    from rematc.loader import load

    try:
        built = load(path, name)
    except CaptureError as e:
        if not args.device or not isinstance(e.__cause__, Exception):
            raise
        raise CaptureError(
            f"{e}\n  With --device tensors have no memory: what reads their numbers or loads weights fails. "
            "Leave that out of build(), or leave out --device"
        ) from e
    if getattr(built[0], "training", True) is False:
        _say("warning: the model is in eval mode and planned for so; build() may call model.train()", args)
    return built


def _file_and_name(given: str) -> tuple[Path, str]:
    """ "model.py:make" -> the file and the name in it; the name is "build" if none is given."""
    if not Path(given).exists() and ":" in given:
        file, _, name = given.rpartition(":")
        return Path(file), name
    return Path(given), "build"


def _title(path: Path, name: str, model: Any, args: argparse.Namespace) -> str:
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    count = sum(p.numel() for p in parameters)
    devices = ", ".join(sorted({str(p.device) for p in parameters}))
    if args.device:
        devices = f"an {card(args.device).name} that is not here"
    mode = "train" if getattr(model, "training", True) else "eval"
    what = (
        f"{type(model).__name__}, {count:,} parameters on {devices}" if parameters else type(model).__name__
    )
    title = f"{path}:{name}  {what}, {mode} mode, {args.inner}"
    return textwrap.fill(title, _columns(), break_long_words=False, break_on_hyphens=False) + "\n"


def _use(args: argparse.Namespace) -> str:
    """The line of Python that trains under this plan."""
    given = "" if args.inner == "inductor" else f', inner="{args.inner}"'
    given += "" if args.reserve == "0" else f', reserve="{args.reserve}"'
    given += "" if args.optimizer is None else ", optimizer=optimizer"
    budget = "None" if args.budget is None else f'"{args.budget}"'
    return f"to train so: torch.compile(model, backend=rematc.backend(budget={budget}{given}))"


def _columns() -> int:
    return min(120, shutil.get_terminal_size((100, 24)).columns)


def _say(message: str, args: argparse.Namespace) -> None:
    """A message on stderr, wrapped; with --debug the traceback before it."""
    if args.debug and sys.exc_info()[0] is not None:
        traceback.print_exc()
    for line in message.splitlines():
        indent = " " * (2 + len(line) - len(line.lstrip()))
        wrapped = textwrap.wrap(
            line, _columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(wrapped), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
