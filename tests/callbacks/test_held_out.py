import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from callbacks.held_out import held_out_batches, undisturbed, validation_batches
from tests.callbacks.miniature import make_module


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def test_random_states_and_modes_come_back_also_after_an_error():
    module = make_module()
    module.policy.train()
    module.policy.inner.eval()  # a mixed mode, which train() and eval() of the parent cannot express
    modes = [m.training for m in module.modules()]
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])
    with pytest.raises(RuntimeError), undisturbed(module):
        draws()
        module.policy.eval()
        assert not torch.is_grad_enabled()
        raise RuntimeError
    assert torch.is_grad_enabled()
    assert draws() == expected
    assert [m.training for m in module.modules()] == modes


def test_what_is_missing_is_named(make_data, tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")
    with pytest.raises(ValueError, match="needs a datamodule"):
        held_out_batches(trainer)
    trainer.datamodule = make_data(val=None, test=None)
    with pytest.raises(ValueError, match=r"data\.init_args\.val"):
        validation_batches(trainer)
    with pytest.raises(ValueError, match=r"data\.init_args\.test"):
        held_out_batches(trainer)
