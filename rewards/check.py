"""Is this reward fit to train on? Probes of a reward's behaviour on images drawn by code, before a run depends on it.

``python -m rewards.check --reward.class_path rewards.ocr.OCR``, or ``--config`` with a YAML file that names rewards
anywhere in it (a file of ``configs/reward``, a whole run's config). Exit code 1 if a reward is refused.

Which probes apply follows from what a reward reads, its class attribute ``reads``:

===========  ==========================================  =============================================================
``reads``    the score depends on                        known-good pairs
===========  ==========================================  =============================================================
``image``    the image alone (brightness, file size)     figures and a word; shuffled prompts must change nothing
``prompt``   the image and the prompt (the default)      figures and a word, each with its description
``text``     text in the image that the prompt quotes    rendered words
``shapes``   GenEval metadata, the embedded world        shapes of that world
``objects``  GenEval metadata, photographs of objects    none can be drawn: the ordering is tried on pairs handed in only
===========  ==========================================  =============================================================

A reward that needs another range, forgets which prompt belongs to which image, depends on its batch, or likes a blank
image best teaches a model nonsense without any error; each probe refuses one of these faults.
"""

from __future__ import annotations

import pydoc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rewards import known_pairs
from rewards.base import Reward
from rewards.known_pairs import Pair
from rewards.probes import PROBES, Bench, Refused
from rewards.video import FrameReward

Reads = Literal["image", "prompt", "text", "shapes", "objects"]

_DRAWN: dict[str, Callable[[], list[Pair]]] = {
    "image": known_pairs.scenes,
    "prompt": known_pairs.scenes,
    "text": known_pairs.words,
    "shapes": known_pairs.shapes,
    "objects": known_pairs.objects,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one probe found."""

    probe: str
    passed: bool | None
    """None: the probe does not apply."""
    detail: str
    """What was seen; of a refusal, the reason."""


def check_reward(
    reward: Reward,
    *,
    reads: Reads | None = None,
    pairs: Sequence[Pair] | None = None,
    tolerance: float = 1e-5,
    device: str = "cpu",
) -> list[Finding]:
    """Every finding of :func:`probe_reward`, same arguments. Errors: ``ValueError`` with the reasons if one refuses."""
    findings = list(probe_reward(reward, reads=reads, pairs=pairs, tolerance=tolerance, device=device))
    refusals = [f"{finding.probe}: {finding.detail}" for finding in findings if finding.passed is False]
    if refusals:
        raise ValueError(f"reward {type(reward).__name__} is refused: " + "; ".join(refusals))
    return findings


def probe_reward(
    reward: Reward,
    *,
    reads: Reads | None = None,
    pairs: Sequence[Pair] | None = None,
    tolerance: float = 1e-5,
    device: str = "cpu",
) -> Iterator[Finding]:
    """Try a reward out, probe by probe.

    Args:
        reward: loaded first; what loading raises passes through.
        reads: in place of what the class declares, for a reward that stands for another one (a remote server).
        pairs: at least two images with prompts that fit them, in place of the drawn ones.
        tolerance: largest difference, relative to 1 or the score, of two scores that should be equal: 1e-5 for float32,
            about 1e-2 for bfloat16.
        device: where the images are.

    Errors: ``ValueError`` on an unknown ``reads`` or fewer than two pairs.
    """
    reads_ = reads or declared(reward)
    if reads_ not in get_args(Reads):
        raise ValueError(f"{type(reward).__name__} declares reads = {reads_!r}: choose one of {get_args(Reads)}")
    if pairs is not None and len(pairs) < 2:
        raise ValueError(f"{len(pairs)} pairs: give at least two, so that prompts can be exchanged")
    reward.load()
    bench = Bench(
        reward=reward,
        reads=reads_,
        pairs=pairs or _DRAWN[reads_](),
        good=pairs is not None or reads_ != "objects",
        tolerance=tolerance,
        device=device,
    )
    for name, probe in PROBES.items():
        finding = _try(name, probe, bench)
        yield finding
        if name == "finite" and not finding.passed:
            return  # no scores to compare


def _try(name: str, probe: Callable[[Bench], str | None], bench: Bench) -> Finding:
    try:
        detail = probe(bench)
    except Refused as reason:
        return Finding(probe=name, passed=False, detail=str(reason))
    except Exception as error:  # a reward may fail in any way
        return Finding(probe=name, passed=False, detail=f"the reward fails with {type(error).__name__}: {error}")
    return Finding(probe=name, passed=None if detail is None else True, detail=detail or "does not apply")


def declared(reward: Reward) -> str:
    """What a reward says that it reads; of a wrapper, what the wrapped one says; ``prompt`` without a word."""
    while isinstance(reward, FrameReward):
        reward = reward.reward
    return getattr(reward, "reads", "prompt")


def main(args: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 if a reward is refused or cannot be made."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="python -m rewards.check", description="Is a reward fit to train on?")
    parser.add_argument("--reward", type=Reward, help="a reward class and its arguments")
    parser.add_argument("--config", type=Path, help="YAML file; every reward that it names is checked")
    parser.add_argument("--reads", type=Reads | None, help="what the reward reads, if not what its class declares")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="for scores that should be equal")
    parser.add_argument("--device", type=str, default="cpu", help="where the images are")
    options = parser.parse_args(args)
    if (options.reward is None) == (options.config is None):
        parser.error("give either --reward or --config")
    settings = {"reads": options.reads, "tolerance": options.tolerance, "device": options.device}
    try:
        nodes = {"reward": options.reward} if options.config is None else named_rewards(options.config)
    except ValueError as error:
        parser.error(str(error))
    return max(_report(name, node, settings) for name, node in nodes.items())


def named_rewards(config: Path) -> dict[str, dict[str, Any]]:
    """Place in a YAML file -> ``class_path`` and ``init_args`` of every reward there, equal ones once. A reward inside
    another is part of it.

    Errors: ``ValueError`` if the file is unreadable, names none, or names a class that cannot be imported.
    """
    import yaml

    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {config} ({error}): give a YAML file that names a reward") from error
    found: dict[str, dict[str, Any]] = {}
    for where, node in _rewards_in(content, ""):
        if node not in found.values():
            found[where] = node
    if not found:
        raise ValueError(f"{config} names no reward: expected a class_path of a subclass of rewards.base.Reward")
    return found


def _rewards_in(node: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if _is_reward(node.get("class_path")):
            yield where or "reward", node
            return
        for key, child in node.items():
            yield from _rewards_in(child, f"{where}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _rewards_in(child, f"{where}[{index}]")


def _is_reward(class_path: Any) -> bool:
    """Errors: ``ValueError`` on a class that cannot be imported: it might be a reward, and go unchecked."""
    if not isinstance(class_path, str):
        return False
    try:
        kind = pydoc.locate(class_path)
    except pydoc.ErrorDuringImport as error:
        raise ValueError(f"cannot import {class_path}: {error.value}") from error
    if kind is None:
        raise ValueError(f"there is no {class_path}: correct the class_path")
    return isinstance(kind, type) and issubclass(kind, Reward)


def _report(name: str, node: Any, settings: dict[str, Any]) -> int:
    """Make one reward, print its findings as they come; 1 if it is refused."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--reward", type=Reward)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    findings: list[Finding] = []
    try:
        reward = instantiate(parser.parse_object({"reward": node}))["reward"]
        print(
            f"{name}: {type(reward).__module__}.{type(reward).__name__}, reads {settings['reads'] or declared(reward)}"
        )
        for finding in probe_reward(reward, **settings):
            findings.append(finding)
            mark = {True: "ok", False: "REFUSED", None: "-"}[finding.passed]
            print(f"  {mark:8}{finding.probe:15}{finding.detail}", flush=True)
    except Exception as error:  # it cannot be made or loaded
        print(f"{name} is refused: {error}", flush=True)
        return 1
    refused = any(finding.passed is False for finding in findings)
    print(f"  {'refused' if refused else 'fit to train on'}", flush=True)
    return int(refused)


if __name__ == "__main__":
    sys.exit(main())
