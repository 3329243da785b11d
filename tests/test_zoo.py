"""The zoo's models build, give the same bits twice, and compile into one graph."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import GPT, GPTConfig, batch
from rematc.measure import measure
from tests.zoo import ZOO, step


def bits(name: str) -> list[torch.Tensor]:
    case = ZOO[name]()
    assert case.name == name
    assert case.model.training
    torch.manual_seed(1)
    return [step(case), *(p.grad for p in case.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ZOO)
def test_built_twice_it_gives_the_same_bits(name: str) -> None:
    once, again = bits(name), bits(name)
    assert once[0].isfinite()
    assert len(once) == len(again) > 1
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("name", ["mlp", "unet"])
def test_it_compiles_into_one_graph(name: str) -> None:
    torch._dynamo.reset()
    case = ZOO[name]()
    compiled = torch.compile(case.model, backend="aot_eager", fullgraph=True)
    torch.manual_seed(1)
    assert step(case, compiled).isfinite()


TINY = GPTConfig(layers=4, width=32, heads=2, length=32)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_checkpointed_gpt_has_the_same_gradients_and_a_lower_peak(every: int) -> None:
    def run(checkpoint_every: int) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        model, data = GPT(TINY, checkpoint_every), batch(8, length=32)
        peak = measure(lambda: model(*data).backward(), device="cpu").peak_bytes
        return peak, [p.grad for p in model.parameters() if p.grad is not None]

    plain, less = run(0), run(every)
    assert less[0] < plain[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], less[1], strict=True))


def test_the_text_can_be_learned() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=32, heads=2, length=32, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i in range(60):
        optimizer.zero_grad()
        loss = model(*batch(16, length=32, seed=i))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.0 > 1.7 > losses[-1]
