"""File, flags, --quick and defaults: who wins, what is recorded."""

import json
from dataclasses import dataclass

import pytest
import torch

from benchmarks.cli import _plain, parse
from benchmarks.workload import SHAPES, SMALL_SHAPES, Workload

DEFAULTS = SHAPES | {"workload.reward": {"class_path": "rewards.brightness.Brightness"}}


@dataclass(frozen=True, kw_only=True)
class Toy:
    """A benchmark of two numbers."""

    workload: Workload
    size: int = 1
    repeats: int = 2


def asked(*args):
    return parse(Toy, name="toy", defaults=DEFAULTS, quick=SMALL_SHAPES | {"size": 10, "repeats": 20}, args=list(args))


def test_flag_over_file_over_quick_over_default(tmp_path):
    file = tmp_path / "toy.yaml"
    file.write_text("repeats: 30\nworkload: {prompts: 3}\n")
    ours = asked("--quick", "--config", str(file), "--workload.prompts", "4")
    assert (ours.benchmark.size, ours.benchmark.repeats, ours.benchmark.workload.prompts) == (10, 30, 4)
    assert asked("--workload.policy.weights=null", "--size=5").benchmark == Toy(workload=Anything(), size=5, repeats=2)


class Anything:
    def __eq__(self, other):
        return True


def test_settings_and_command_are_recorded_in_plain_types(tmp_path):
    ours = asked("--quick", "--output", str(tmp_path))
    assert json.loads(json.dumps(ours.settings)) == ours.settings
    assert ours.settings["workload"]["transition"]["init_args"] == {"noise_level": 0.7}
    assert ours.output == tmp_path
    assert ours.command == f"python -m benchmarks.toy --quick --output {tmp_path}"


def test_a_printed_config_gives_the_same_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        asked("--quick", "--size=7", "--print_config")
    file = tmp_path / "toy.yaml"
    file.write_text(capsys.readouterr().out)
    assert asked("--config", str(file)).settings == asked("--quick", "--size=7").settings


def test_files_of_the_repository_are_named_relative_to_it(repository):
    assert _plain({"weights": [str(repository / "a.safetensors"), "b", 1]}) == {"weights": ["a.safetensors", "b", 1]}


def test_a_random_policy_follows_the_seed():
    def weights(*args):
        return next(asked("--quick", *args).benchmark.workload.policy.parameters())

    assert torch.equal(weights(), weights())
    assert not torch.equal(weights(), weights("--workload.seed", "1"))


@pytest.mark.parametrize("flag", ["--sizes=3", "--workload.prompt=3"])
def test_unknown_flags_are_refused(flag, capsys):
    with pytest.raises(SystemExit):
        asked("--quick", flag)
    assert flag.split("=")[0].removeprefix("--") in capsys.readouterr().err


def test_more_prompts_than_the_file_holds():
    with pytest.raises(ValueError, match="prompts=9999"):
        _ = asked("--quick", "--workload.prompts", "9999").benchmark.workload.chosen_prompts


def test_prompts_are_spread_over_the_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"a photo of {k}\n" for k in range(10)))
    work = asked("--quick", "--workload.prompt_file", str(file), "--workload.prompts", "4").benchmark.workload
    assert [p.text[-1] for p in work.chosen_prompts] == ["0", "2", "5", "7"]
