"""The corpus: problems as files, from real models and from random graphs. Reading them needs no torch.

`python -m benchmarks.corpus` makes all files anew, `python -m benchmarks.corpus NAME ...` some, and with
``--list`` none: the table alone. What each file is stands in problems/README.md.
"""

from __future__ import annotations

import argparse
import gzip
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tabulate import tabulate

from rematc.baselines import save_all
from rematc.problem import Problem

FOLDER = Path(__file__).parent / "problems"
HEADERS = ("name", "kind", "ops", "forward/backward", "values", "save-all MB", "s", "what")

Kind = Literal["model", "random"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One problem of the corpus: its name, its kind, and what it is.

    >>> ENTRIES["gpt2_12"].kind, ENTRIES["gpt2_12"].file.name
    ('model', 'gpt2_12.json.gz')
    """

    name: str
    kind: Kind
    what: str

    @property
    def file(self) -> Path:
        """Where the problem is."""
        return FOLDER / f"{self.name}.json.gz"


_MODELS = {
    "gpt2_2": "GPT-2 small cut to 2 layers, 8 x 1024 tokens",
    "gpt2_4": "GPT-2 small cut to 4 layers, 8 x 1024 tokens",
    "gpt2_8": "GPT-2 small cut to 8 layers, 8 x 1024 tokens",
    "gpt2_12": "GPT-2 small, 12 layers, 8 x 1024 tokens",
    "gpt2_24": "GPT-2 medium, 24 layers, 8 x 1024 tokens",
    "llama8": "the Llama of the benchmarks: 8 layers of 256, 4 x 256 tokens, on a CPU",
    "llama_8": "Llama 1B with half its layers and 32,000 tokens, 4 x 2048 tokens, bf16",
    "llama_16": "Llama 3.2 1B, 16 layers, 4 x 2048 tokens, bf16",
    "llama_32": "Llama 2 7B, 32 layers, 4 x 2048 tokens, bf16",
    "llama_80": "Llama 2 70B, 80 layers, 8 x 2048 tokens, bf16",
    "bert": "BERT-base, masked tokens, 32 x 512 tokens",
    "t5": "T5-base, encoder and decoder with cross-attention, 8 x 512 tokens each",
    "bart": "BART-base, encoder and decoder with cross-attention, 16 x 1024 tokens each",
    "moe": "Mixtral with 8 layers of 1024, 8 experts, 2 for each of 4 x 2048 tokens, bf16",
    "mamba": "Mamba-2 130M with half its layers: a state space in chunks, 8 x 1024 tokens",
    "lstm": "two layers of LSTM cells, 64 steps unrolled, 256 rows",
    "mlp": "a chain of 48 linear layers, 4096 rows of 1024",
    "vit": "ViT-base, 64 images of 224 x 224",
    "resnet50": "ResNet-50, 64 images of 224 x 224",
    "convnext": "ConvNeXt-tiny, 64 images of 224 x 224",
    "vgg16": "VGG-16 with BatchNorm, 64 images of 224 x 224",
    "densenet": "DenseNet-121, 64 images of 224 x 224",
    "unet": "U-Net of five levels with skip connections, 8 images of 512 x 512",
    "clip": "CLIP with ViT-B/32: two towers, 256 images of 224 x 224 and texts of 77 tokens",
    "dit": "DiT-B: a transformer with gates that a condition sets, 32 x 256 patches",
    "efficientnet": "EfficientNet-B0, 64 images of 224 x 224",
    "whisper": "Whisper-small, 8 spectra of 30 s to 448 tokens each",
    "gru": "two layers of GRU cells, 32 steps unrolled, 128 rows",
    "film": "eight blocks of 1-d convolutions that a condition steers, 64 x 4096",
    "fpn": "a feature pyramid on a ResNet-50, 8 images of 512 x 512",
    "denoiser": "a U-Net with attention that a time is told to, 8 latents of 64 x 64",
}
_SEEDS = {100: 5, 250: 3, 500: 2, 1000: 2}  # how many random graphs of that many nodes
_RANDOM = {f"rand{n}_{seed}": (n, seed) for n, many in _SEEDS.items() for seed in range(many)}

ENTRIES: dict[str, Entry] = {
    **{name: Entry(name, "model", what) for name, what in _MODELS.items()},
    **{
        name: Entry(name, "random", f"layered random graph of {n} nodes, seed {seed}")
        for name, (n, seed) in _RANDOM.items()
    },
}


def names(kind: Kind | None = None) -> tuple[str, ...]:
    """The names of all problems, or of those of one kind.

    >>> names("random")[:2]
    ('rand100_0', 'rand100_1')
    """
    return tuple(entry.name for entry in ENTRIES.values() if kind in (None, entry.kind))


def load(name: str) -> Problem:
    """The problem of that name, with no budget; `KeyError` if there is none.

    >>> len(load("rand100_0").graph.ops)
    100
    """
    return Problem.from_json(gzip.decompress(ENTRIES[name].file.read_bytes()).decode())


def make(name: str) -> Problem:
    """The same, made anew: a model is traced, which needs torch and transformers and takes seconds."""
    if name in _RANDOM:
        from benchmarks.corpus_random import layered

        return layered(*_RANDOM[name])
    from benchmarks.corpus_models import model_problem

    return model_problem(name)


def packed(problem: Problem) -> bytes:
    """The file of a problem: the same bytes every time, so no date and no name go in."""
    out = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(problem.to_json().encode())
    return out.getvalue()


def row(name: str, problem: Problem, seconds: float | None = None) -> tuple[object, ...]:
    """A line of the table; ``seconds`` is what making it took."""
    g, entry = problem.graph, ENTRIES[name]
    peak_mb = (save_all(problem).peak_bytes - problem.resident_bytes) / 1e6
    split = f"{len(g.forward)}/{len(g.backward)}"
    taken = "" if seconds is None else f"{seconds:.0f}"
    return (name, entry.kind, len(g.ops), split, len(g.values), f"{peak_mb:,.3f}", taken, entry.what)


def table(rows: Iterable[tuple[object, ...]]) -> str:
    """Rows as text. "save-all MB" is the peak above what is resident when nothing is recomputed."""
    right = ("left", "left", "right", "right", "right", "right", "right", "left")
    return tabulate(list(rows), headers=HEADERS, colalign=right, disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files anew, all or those named, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.corpus", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; default: all")
    parser.add_argument("--list", action="store_true", help="make nothing: read the files that are there")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in ENTRIES]:
        parser.error(f"no problem called {unknown[0]!r}; there are: {', '.join(ENTRIES)}")
    rows = []
    for name in args.names or ENTRIES:
        started = time.perf_counter()
        problem = load(name) if args.list else make(name)
        seconds = None if args.list else time.perf_counter() - started
        if not args.list:
            FOLDER.mkdir(exist_ok=True)
            ENTRIES[name].file.write_bytes(packed(problem))
        rows.append(row(name, problem, seconds))
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
