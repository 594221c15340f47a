"""A cost model of LeanGRPO's (arXiv 2609.03528) Table 1: what the times of one row say about the other four.

Calibrated on the Native row and on Figure 4 alone (FLUX.1-dev, f = 1, 8 ranks), per update in seconds:

    forward    F = 402.45 (full) and 411.46 (LoRA): Native's recomputation of the trained steps
    backward   B = 535.15 - 30.33: Reweight's training without its synchronisation, full
    late       C = 30.33 in 24 reductions, one per group: a reduction on its own, full
    early      E = 989.44 - B in 24 x 5 reductions, one per trained step: what Native pays to reduce during its backwards, full
    rollout    R = total of the Native row - recomputation - training

LoRA has no split of its training in Figure 4: its rollout is taken to cost what the full one costs (the same forwards), and
its reductions are scaled by the trainable bytes (179,306,496 of 11,901,408,320 elements). Then

    Native + Shared              R + F + B + E          the layout alone moves nothing
    Native + Shared + Coalesced  R + F + B + C
    Retain (not coalesced)       R +     B + E
    Reweight                     R +     B + C

The model is wrong where it leaves out what it does not know: correcting and holding gradients, graphs that are kept,
forwards with gradients that cost more than those without.

**Ranks.** With R ranks and a fixed iteration a rank makes ``waves`` generations (:mod:`lightning_modules.parallel.layout`), so
that compute scales with them; a ring's reduce-scatter moves ``(R - 1) / R`` of the bytes per reduction. Links that get
slower between nodes are not modelled: no figure to calibrate them on was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_modules.parallel.layout import Layout

GROUPS, GENERATIONS, STEPS, RANKS = 24, 8, 5, 8
"""The paper's setting: prompt groups, their members, trained steps, ranks."""
ROWS = ("Native", "Native + Shared", "Native + Shared + Coalesced", "Retain", "Reweight")
PAPER = {
    "full": (1850.06, 1851.75, 1387.56, 1438.53, 1022.64),
    "LoRA": (1277.30, 1279.21, 1263.35, 901.99, 880.68),
}
"""Table 1, seconds per step."""
TRAINABLE_SHARE = 179_306_496 / 11_901_408_320


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of one update on 8 ranks, by what they are spent on."""

    rollout: float
    forward: float
    backward: float
    early: float
    """reductions during the backward, one per trained step and round."""
    late: float
    """reductions on their own, one per group."""

    def total(self, row: str) -> float:
        """Seconds of a row of Table 1."""
        recomputed = self.forward if row.startswith("Native") else 0.0
        reduced = self.late if row in ("Native + Shared + Coalesced", "Reweight") else self.early
        return self.rollout + recomputed + self.backward + reduced

    def on(self, ranks: int, layout: Layout) -> Costs:
        """The same iteration on another number of ranks."""
        waves = layout.waves / Layout(prompts=GROUPS, generations=GENERATIONS, ranks=RANKS).waves
        ring = (1 - 1 / ranks) / (1 - 1 / RANKS)
        reductions = len(layout.chunks()) / GROUPS
        return Costs(
            rollout=self.rollout * waves,
            forward=self.forward * waves,
            backward=self.backward * waves,
            early=self.early * waves * ring,
            late=self.late * reductions * ring,
        )


def calibrate() -> dict[str, Costs]:
    """``full`` and ``LoRA`` from the Native row and Figure 4."""
    backward, late = 535.15 - 30.33, 30.33
    full = Costs(
        rollout=PAPER["full"][0] - 402.45 - 989.44,
        forward=402.45,
        backward=backward,
        early=989.44 - backward,
        late=late,
    )
    training = PAPER["LoRA"][0] - full.rollout - 411.46
    early = full.early * TRAINABLE_SHARE
    lora = Costs(
        rollout=full.rollout,
        forward=411.46,
        backward=training - early,
        early=early,
        late=late * TRAINABLE_SHARE,
    )
    return {"full": full, "LoRA": lora}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One cell of Table 1."""

    training: str
    row: str
    predicted: float
    paper: float

    @property
    def error(self) -> float:
        """Relative, positive where the model says too much."""
        return self.predicted / self.paper - 1


def table_1() -> list[Prediction]:
    """Every row, the calibrated one included: its error is 0 by construction."""
    return [
        Prediction(training=training, row=row, predicted=costs.total(row), paper=paper)
        for training, costs in calibrate().items()
        for row, paper in zip(ROWS, PAPER[training], strict=True)
    ]


def curves(ranks: Sequence[int] = (4, 8, 16, 32)) -> dict[str, dict[int, dict[str, float]]]:
    """training -> ranks -> schedule -> predicted speed-up over Native on as many ranks (Figure 3, j and k)."""
    layouts = {r: Layout(prompts=GROUPS, generations=GENERATIONS, ranks=r) for r in ranks}
    return {
        training: {
            r: {row: here.total("Native") / here.total(row) for row in ("Retain", "Reweight")}
            for r in ranks
            for here in (costs.on(r, layouts[r]),)
        }
        for training, costs in calibrate().items()
    }
