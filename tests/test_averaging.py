"""One sum of all gradients, in two processes on a CPU."""

import pytest
import torch
from torch import nn

from deformops_models.train.averaging import GradientAverage

#: Which processes read the parameter `sometimes`, step by step.
READERS = ((0, 1), (0,), (1,), ())


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.always = nn.Parameter(torch.randn(3, 4))
        self.sometimes = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.randint(2**40, ()))
        self.register_buffer("turned", torch.randn(2, 3).T)

    def forward(self, rows, read):
        loss = (rows @ self.always.T * self.frozen).square().sum()
        return loss + (rows * self.sometimes).sum() if read else loss


def gradients(model, rows, read):
    model.zero_grad()
    model(rows, read).backward()


def collected(model):
    return {name: p.grad for name, p in model.named_parameters()}


def work(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = Rows()
    torch.save(model.state_dict(), folder / f"first{rank}.pt")
    average = GradientAverage(model)
    rows, steps = torch.load(folder / "rows.pt")[rank], []
    for readers in READERS:
        gradients(model, rows, rank in readers)
        average()
        steps.append(collected(model))
    torch.save((model.state_dict(), steps), folder / f"last{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Rows of each process, and its weights and gradients."""
    folder = tmp_path_factory.mktemp("averaging")
    rows = torch.randn(2, 5, 4)
    torch.save(rows, folder / "rows.pt")
    torch.multiprocessing.spawn(work, (folder,), nprocs=2)
    firsts = [torch.load(folder / f"first{rank}.pt") for rank in range(2)]
    return rows, firsts, [torch.load(folder / f"last{rank}.pt") for rank in range(2)]


def test_all_begin_with_the_weights_and_buffers_of_the_first(both):
    _, firsts, lasts = both
    for name, t in firsts[0].items():
        assert not torch.equal(t, firsts[1][name])
        for weights, _ in lasts:
            assert torch.equal(weights[name], t) and weights[name].stride() == t.stride(), name


@pytest.mark.parametrize("step", range(len(READERS)))
def test_gradients_are_the_mean_of_both_and_none_where_nobody_has_one(step, both):
    rows, _, lasts = both
    model = Rows()
    model.load_state_dict(lasts[0][0])
    expected = []
    for rank in range(2):
        gradients(model, rows[rank], rank in READERS[step])
        expected.append(collected(model))
    for _, steps in lasts:
        assert steps[step]["frozen"] is None
        assert (steps[step]["sometimes"] is None) == (not READERS[step])
        for name in ("always", "sometimes")[: 1 + bool(READERS[step])]:
            mean = sum(g[name] for g in expected if g[name] is not None) / 2
            torch.testing.assert_close(steps[step][name], mean)
