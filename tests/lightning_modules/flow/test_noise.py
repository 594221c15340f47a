"""Noise depends on its key and on nothing else."""

import pytest
import torch

from lightning_modules.flow.noise import KeyedNoise, keyed_generator
from lightning_modules.types import Rows

SHAPE = (3, 8, 8)


def group(prompts: int = 2, generations: int = 3) -> Rows:
    ids = torch.cartesian_prod(torch.arange(prompts), torch.arange(generations))
    return Rows(prompt=ids[:, 0], generation=ids[:, 1])


def noise(rows: Rows, *, seed: int = 0, iteration: int = 5, same_initial: bool = False) -> KeyedNoise:
    return KeyedNoise(seed=seed, iteration=iteration, rows=rows, latent_shape=SHAPE, same_initial=same_initial)


def distinct(draws: list[torch.Tensor]) -> bool:
    return len({tuple(d.flatten().tolist()) for d in draws}) == len(draws)


@pytest.mark.parametrize("same_initial", [False, True])
@pytest.mark.parametrize("index", [[4], [5, 0, 3], [2, 2]])
def test_a_row_does_not_see_its_batch(index, same_initial):
    rows, index = group(), torch.tensor(index)
    whole, part = noise(rows, same_initial=same_initial), noise(rows[index], same_initial=same_initial)
    assert torch.equal(part.initial(), whole.initial()[index])
    assert torch.equal(part(7), whole(7)[index])


def test_repeated_and_reordered_calls_do_not_matter():
    first, second = noise(group()), noise(group())
    forwards = [first.initial(), *(first(t) for t in range(4))]
    backwards = [second(t) for t in reversed(range(4))][::-1]
    assert torch.equal(second.initial(), forwards[0])
    assert all(torch.equal(a, b) for a, b in zip(forwards[1:], backwards, strict=True))
    assert torch.equal(first(2), forwards[3])


def test_every_coordinate_of_the_key_matters():
    everything = []
    for seed, iteration in [(0, 0), (1, 0), (0, 1), (12, 3), (1, 23)]:
        draws = noise(group(), seed=seed, iteration=iteration)
        everything += [*draws.initial(), *draws(0), *draws(1)]
    assert distinct(everything)


def test_same_initial_shares_only_the_start():
    rows = group()
    shared, separate = noise(rows, same_initial=True), noise(rows)
    x = shared.initial()
    assert torch.equal(x[:3], x[:1].expand(3, *SHAPE)) and not torch.equal(x[0], x[3])
    assert distinct(list(shared(0))) and torch.equal(shared(0), separate(0))
    assert distinct(list(separate.initial()))


def test_standard_normal_float32_on_the_cpu():
    rows = group(8, 16)
    x = torch.cat([noise(rows).initial(), noise(rows)(0)])
    assert x.shape == (256, *SHAPE) and x.dtype == torch.float32 and x.device.type == "cpu"
    n = x.numel()  # 49,152 draws: five standard errors
    assert abs(float(x.mean())) < 5 / n**0.5 and abs(float(x.var()) - 1) < 5 * (2 / n) ** 0.5
    neighbours = torch.corrcoef(torch.stack([x[:-1].flatten(), x[1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 5 / n**0.5


def test_the_seed_of_a_key_never_changes():
    """Recorded once: neither the process, the machine nor a new version may move a run's noise."""
    assert keyed_generator("window", 7, -2).initial_seed() == 7199383341058330788


def test_keys_do_not_run_into_each_other():
    keys = [(1, 23), (12, 3), (123,), ("1", 23), ("1, 23",), (1, 2, 3)]
    assert distinct([torch.randn(8, generator=keyed_generator(*key)) for key in keys])


def test_a_key_of_another_type_is_refused():
    with pytest.raises(TypeError):
        keyed_generator(0.5)  # pyright: ignore[reportArgumentType]
