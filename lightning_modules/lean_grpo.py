"""LeanGRPO as a LightningModule: group-relative policy optimisation of a diffusion or flow policy, recompute-free.

One iteration = one rollout of ``B`` prompts x ``M`` generations, group by group. The parts (policy, schedule,
transition, noise grid, window, advantage) are objects handed in; this shell only puts them in order, keeps the counters
and logs. Source: LeanGRPO (arXiv 2609.03528).
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_modules.advantages import Advantages, GroupAdvantage
from lightning_modules.drawing import DrawsImages
from lightning_modules.flow.denoise import ReverseProcess
from lightning_modules.flow.noise import KeyedNoise
from lightning_modules.flow.sigmas import Sigmas
from lightning_modules.flow.transitions import Transition
from lightning_modules.flow.windows import Window
from lightning_modules.iteration import Iteration, Scored, weigh
from lightning_modules.objectives.step_weights import ConstantStepWeights, StepWeights
from lightning_modules.parallel.checkpoints import is_sharded, shard_count
from lightning_modules.parallel.drift import check_same_on_all
from lightning_modules.parallel.gradients import LocalGradients
from lightning_modules.parallel.layout import Chunk, Kind, Layout, Round
from lightning_modules.parallel.lockstep import Lockstep, peers
from lightning_modules.parallel.norms import clip_grad_norm
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.replicated import ReplicatedGradients
from lightning_modules.parallel.sharded import ShardedGradients
from lightning_modules.parallel.tensors import WholeTensors
from lightning_modules.policies.base import Policy, Reference
from lightning_modules.policies.fingerprint import fingerprint, frozen_fingerprint
from lightning_modules.schedules.base import Context, Schedule, Sync
from lightning_modules.state import ResumePoint, check_checkpoint, settle_loops, trained_part
from lightning_modules.strategies import FSDP2Strategy, check_strategy
from lightning_modules.types import Conditioning, PromptBatch, Request, Rollout, Samples, Scores

if TYPE_CHECKING:
    from lightning_modules.plan.plan import Plan


class LeanGRPO(DrawsImages):
    """The training loop.

    Args:
        policy: the generator that is trained.
        schedule: when the gradient is formed: ``Native``, ``Retain`` or ``Reweight``.
        transition: the stochastic kernel of the trained steps.
        sigmas: the noise grid.
        window: which steps are trained.
        advantage: how rewards become advantages.
        optimizer: callable from parameters to an optimizer.
        lr_scheduler: callable from an optimizer to a scheduler, stepped once per iteration; ``None`` for a constant rate.
        step_weights: weight of each denoising step in the policy loss; ``None``: all the same.
        num_steps: T, denoising steps of a rollout.
        generations_per_prompt: M, the size of a group; at least 2.
        groups_in_flight: how many groups are rolled out together before their backward.
        micro_batch: rows per policy call; ``None``: all rows in flight at once.
        beta: weight of the KL to the reference policy (the policy as training started); 0 needs none.
        clip_range: half-width of the clip around ratio 1 (only Native's ratio can leave 1).
        max_grad_norm: bound on the global gradient norm, or ``None``.
        same_initial_noise: one x_T per prompt, shared by its group (DanceGRPO).
        eval_num_steps: steps of the deterministic sampler used for evaluation; ``None``: ``num_steps``.
        verify_every: every so many iterations a lean schedule re-forwards a few trained steps and logs
            ``verify/ratio_deviation``; 0 = never.
        layout: ``shared``: all ranks work on the same prompt, each on other members of its group; ``per_rank``: each rank
            on its own prompts. The gradient is the same.
        sync: when the ranks' gradients are added up: ``per_step``, ``per_group`` or ``per_update``.
        reduce_dtype: what gradients are added up in: ``float32`` (or wider, if they are), or ``bfloat16``: half the bytes.
        rank_timeout: seconds after which a rank that does not arrive stops the run.
        check_ranks_every: every so many iterations, and at the start or a resume, the ranks compare what must be the same
            on all of them; 0 = never.
        seed: key of all noise of the run.

    Errors: ``ValueError`` naming the argument and the remedy, here or when training starts.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        schedule: Schedule,
        transition: Transition,
        sigmas: Sigmas,
        window: Window,
        advantage: GroupAdvantage,
        optimizer: OptimizerCallable,
        lr_scheduler: LRSchedulerCallable | None = None,
        step_weights: StepWeights | None = None,
        num_steps: int = 10,
        generations_per_prompt: int = 16,
        groups_in_flight: int = 1,
        micro_batch: int | None = None,
        beta: float = 0.0,
        clip_range: float = 1e-4,
        max_grad_norm: float | None = 1.0,
        same_initial_noise: bool = False,
        eval_num_steps: int | None = None,
        verify_every: int = 0,
        layout: Kind = "shared",
        sync: Sync = "per_update",
        reduce_dtype: Literal["float32", "bfloat16"] = "float32",
        rank_timeout: float = 1800.0,
        check_ranks_every: int = 50,
        seed: int = 0,
    ) -> None:
        super().__init__(policy, sigmas, num_steps if eval_num_steps is None else eval_num_steps)
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints hold the trained part alone; check_checkpoint is strict about it
        self.schedule, self.transition, self.window, self.advantage = schedule, transition, window, advantage
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.generations_per_prompt = _at_least(
            generations_per_prompt, 2, "generations_per_prompt", "a group of one has no advantage"
        )
        self.groups_in_flight = _at_least(groups_in_flight, 1, "groups_in_flight")
        self.micro_batch = None if micro_batch is None else _at_least(micro_batch, 1, "micro_batch")
        self.beta = _at_least(beta, 0, "beta", "and finite", below=math.inf)
        self.clip_range = _above_zero(clip_range, "clip_range")
        self.max_grad_norm = (
            None if max_grad_norm is None else _above_zero(max_grad_norm, "max_grad_norm", "use null for no clipping")
        )
        self.same_initial_noise = same_initial_noise
        self.verify_every = _at_least(verify_every, 0, "verify_every")
        if sync not in get_args(Sync):
            raise ValueError(f"sync={sync!r}: choose one of {', '.join(get_args(Sync))}")
        if reduce_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"reduce_dtype={reduce_dtype!r}: choose float32 or bfloat16")
        Layout(prompts=1, generations=generations_per_prompt, kind=layout)  # refuses an unknown layout now
        self.layout: Kind = layout
        self.sync: Sync = sync
        self.reduce_dtype = reduce_dtype
        self.check_ranks_every = _at_least(check_ranks_every, 0, "check_ranks_every")
        self.rank_timeout = _above_zero(rank_timeout, "rank_timeout")
        self.ranks = Ranks.alone()
        """The processes of the run."""
        self.seed = seed
        self.sigma_grid = sigmas(num_steps, policy.num_tokens)
        self.trained_steps = window.size(num_steps)
        weights = step_weights or ConstantStepWeights()
        self.step_weights = weights(transition, self.sigma_grid, window.candidates(num_steps))
        self._check_noise_in_window(num_steps)
        self.iteration = 0
        """Rollouts completed, also across resumes: what schedules of the learning rate, logs and checkpoints count."""
        self.iteration_metrics: dict[str, float] = {}
        """What the last completed iteration logged."""
        self.chunks_ahead = 0
        """Chunks of groups that are rolled out before the scores of one are waited for; a callback that scores in the
        background asks for one here."""
        self._reference: Reference | None = None
        self._resume_point = ResumePoint()
        self._saved_steppers: list[str] = []

    # the algorithm

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.policy.eval()  # no dropout, neither in the rollout nor in the update
        self._resume_point.begin()
        self._check_ranks(batch)
        iteration = Iteration(batch, layout=self.layout_of(len(batch)), device=self.device)
        try:
            self.schedule.begin(len(batch) * self.generations_per_prompt * self.trained_steps)
            for chunk in self._scored_chunks(iteration):
                if self.schedule.wants_every_round:
                    self._fold(iteration, chunk)
                elif not self._holds_iteration:
                    rollouts, prompts = iteration.ready(chunk)
                    self._form_gradient(iteration, rollouts, iteration.advantages(self.advantage, prompts))
            if self._holds_iteration:
                for part in self.schedule.updates(iteration.rollouts):
                    self._form_gradient(iteration, part, iteration.advantages(self.advantage))
                    self._update(iteration)
            else:
                self._update(iteration)
        finally:
            iteration.release()
            self.schedule.release()
        self._complete(iteration)

    def _requests(self, iteration: Iteration, chunk: Chunk) -> Iterator[tuple[Round, Request]]:
        """This rank's micro-batches of a chunk; each of its prompts is encoded once."""
        batch, layout = iteration.batch, iteration.layout
        shares = [(part, layout.rows(part.start, part.stop, self.ranks.rank)) for part in chunk.rounds]
        mine = sorted({p for _, rows in shares for p in rows.prompt.tolist()}) or [0]
        encoded = self._encode([batch.prompts[p] for p in mine])
        self._set_stand_in(encoded)
        trained = partial(self.window.trained, len(self.step_weights), seed=self.seed, iteration=batch.iteration)
        for part, rows in shares:
            noise = KeyedNoise(
                seed=self.seed,
                iteration=batch.iteration,
                rows=rows,
                latent_shape=self.policy.latent_shape,
                same_initial=self.same_initial_noise,
            )
            steps = trained(rows=rows)
            yield (
                part,
                Request(
                    rows=rows,
                    conditioning=encoded.rows(torch.searchsorted(torch.tensor(mine), rows.prompt)),
                    initial=noise.initial().to(self.device),
                    noise=noise,
                    trained=steps,
                    stochastic=self.window.stochastic(steps),
                    peers=peers(layout, part, lambda rows: trained(rows=rows), self._in_step)
                    if layout.ranks > 1
                    else None,
                ),
            )

    def _scored_chunks(self, iteration: Iteration) -> Iterator[Chunk]:
        """Roll out chunk after chunk; each is yielded once it is scored on all ranks. Where scorers work in the background,
        the next one is rolled out meanwhile, unless the schedule wants rewards early."""
        chunks = iteration.layout.chunks(self.groups_in_flight, self.micro_batch, self.schedule.wants_every_round)
        ahead = 0 if self.schedule.wants_rewards_early else min(self.chunks_ahead, len(chunks))
        waiting: deque[list[Callable[[], Scored]]] = deque()
        for position in range(len(chunks) + ahead):
            chunk = chunks[position] if position < len(chunks) else None
            work = partial(self._advance, iteration, chunk, waiting, due=position >= ahead)
            scored = self.ranks.share(work, f"iteration {self.iteration}")
            iteration.record(part for parts in scored for part in parts)
            self._tell("on_scores", iteration.totals)
            if position >= ahead:
                yield chunks[position - ahead]

    def _advance(
        self, iteration: Iteration, chunk: Chunk | None, waiting: deque[list[Callable[[], Scored]]], due: bool
    ) -> list[Scored]:
        """Roll out a chunk; then, if due, the scores of the one that has waited longest."""
        if chunk is not None:
            waiting.append(self._roll_out(iteration, chunk))
        with iteration.clock("reward"):
            return [scored() for scored in waiting.popleft()] if due else []

    def _roll_out(self, iteration: Iteration, chunk: Chunk) -> list[Callable[[], Scored]]:
        """Sample, decode and announce this rank's share of a chunk; the scores are to be asked for. Streaming Reweight is
        given each micro-batch's rewards right after its rollout; otherwise a chunk is scored at once."""
        early, samples, scored, failures = self.schedule.wants_rewards_early, [], [], []
        for part, request in self._requests(iteration, chunk):
            with iteration.clock("rollout"):
                rollout = self.schedule.rollout(request)
            iteration.rolled_out(part, rollout)
            if not len(request):
                continue
            with iteration.clock("decode"), torch.no_grad():
                samples.append(iteration.samples(request.rows, self.policy.decode(rollout.latents)))
            if early and not failures:
                try:
                    rewards = self._score(iteration, samples.pop())()
                    scored.append(partial(_given, rewards))
                    self.schedule.absorb(rollout, self.advantage.columns(rewards.rewards))
                except Exception as error:
                    if not self._in_step:
                        raise
                    failures.append(error)  # the other ranks wait for the rest of this one's policy calls
        if failures:
            raise failures[0]
        if samples:
            scored.append(self._score(iteration, Samples.joined(samples)))
        return scored

    def _score(self, iteration: Iteration, samples: Samples) -> Callable[[], Scored]:
        """Announce the samples to the trainer's callbacks, which score them; what is returned waits for the scores."""
        scores = Scores()
        with iteration.clock("reward"), torch.no_grad():
            self._tell("on_rollout_end", samples, scores)
        return partial(weigh, samples, scores)

    def _tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of this module's own on every callback that has it."""
        for callback in self.trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(callback, hook):
                getattr(callback, hook)(self.trainer, self, *arguments)

    @property
    def reward_weights(self) -> tuple[float, ...] | None:
        """Of the weighted rewards that the trainer's callbacks announce by an attribute of this name (a dict by reward);
        ``None`` if none does."""
        callbacks = [] if self._trainer is None else self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        announced = [callback.reward_weights for callback in callbacks if hasattr(callback, "reward_weights")]
        return tuple(w for weights in announced for w in weights.values() if w) if announced else None

    def _fold(self, iteration: Iteration, chunk: Chunk) -> None:
        """Form what one round adds to the gradient: of groups that it completes at once, of open ones as far as can be."""
        rollouts, closed = iteration.latest(chunk), () if self._holds_iteration else chunk.closed
        still_open = sorted(set.union(*map(iteration.layout.prompts_of, chunk.rounds)).difference(closed))
        with iteration.clock("update"):
            self.schedule.fold(rollouts, *iteration.rewards(self.advantage, still_open))
        self._form_gradient(iteration, rollouts, iteration.advantages(self.advantage, closed))

    def _form_gradient(self, iteration: Iteration, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        with iteration.clock("update"):
            self.schedule.backward(rollouts, advantages)
            self.schedule.close()
        if self._verifies(iteration, rollouts):
            with iteration.clock("verify"):
                iteration.verified = self.schedule.verify(rollouts[0])

    def _verifies(self, iteration: Iteration, rollouts: Sequence[Rollout]) -> bool:
        """Whether a lean schedule's claim is checked now, on the first of these rollouts."""
        due = self.schedule.lean and self.verify_every and self.iteration % self.verify_every == 0
        return bool(due and rollouts and not iteration.verified)

    def _update(self, iteration: Iteration) -> None:
        """Correction -> accumulation -> clipping -> optimizer step. An update to which nothing contributed is not taken:
        neither momentum nor weight decay may move the policy on no evidence."""
        with iteration.clock("update"):
            self.schedule.finish(iteration.final_scale(self.advantage))
            parameters = self._trainable()
            if any(p.grad is not None for p in parameters):
                norm = self._clip(parameters)
                iteration.record_norm(norm, min(norm, self.max_grad_norm or math.inf))
                optimizer = self.optimizers()
                assert not isinstance(optimizer, list)
                self._resume_point.move()
                optimizer.step()
                optimizer.zero_grad()
        iteration.count(self.schedule.tally())

    def _clip(self, parameters: list[torch.nn.Parameter]) -> float:
        norm = clip_grad_norm(parameters, math.inf if self.max_grad_norm is None else self.max_grad_norm)
        if not math.isfinite(norm):
            raise ValueError(
                f"gradient norm {norm} in iteration {self.iteration}: the update was not taken; resume from the last "
                "checkpoint with a lower learning rate or a higher precision"
            )
        return norm

    @property
    def _holds_iteration(self) -> bool:
        """Whether no gradient can be formed before the iteration's last reward."""
        return self.schedule.updates_per_rollout > 1 or self.advantage.needs_iteration

    def identity(self) -> dict[str, Any]:
        """What draws evaluation images, as plain values for result files: the policy, fingerprints of its frozen and its
        trained weights, whether the latter are averaged ones, and how far it is trained. A collective where weights are
        sharded."""
        parameters = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        with self.evaluation_weights():
            trained = fingerprint(WholeTensors(parameters))
        return {
            "policy": self.policy.identity(),
            "frozen_weights": self._frozen_weights,
            "trained_weights": trained,
            "averaged": self.evaluation_weights is not nullcontext,
            "iteration": self.iteration,
        }

    def export(self, folder: Path) -> Path:
        """Write what was trained, with the weights that evaluation uses, to a new folder which diffusers opens. The first
        rank writes; where the policy is sharded all of them gather it there, in the CPU's memory."""
        # peft and diffusers' loaders take seconds to import
        from lightning_modules.export.gathered import gathered_policy
        from lightning_modules.export.policy import export_policy

        with self.evaluation_weights():
            policy = self.policy if self._kind != "sharded" else gathered_policy(self.policy, self.ranks.rank == 0)
            self.ranks.share(lambda: export_policy(policy, folder) if self.ranks.rank == 0 else folder, "the export")
        return folder

    def how_to_open(self, folder: Path) -> str:
        """The line of Python that opens an export."""
        from lightning_modules.export.policy import how_to_open

        return how_to_open(self.policy, folder)

    def layout_of(self, prompts: int) -> Layout:
        """Which rank makes which generation in an iteration of so many prompts."""
        return Layout(prompts=prompts, generations=self.generations_per_prompt, ranks=self.ranks.size, kind=self.layout)

    @property
    def in_update(self) -> bool:
        """Whether the policy has moved since the last completed iteration, so that no checkpoint could be taken now."""
        return self._resume_point.moved

    def plan(
        self,
        prompts: Sequence[str],
        *,
        ranks: int = 1,
        device: torch.device | str | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Plan:
        """Sizes, memory and policy forwards of an iteration on these prompts, shared by ``ranks`` processes. Only the
        first prompt is looked at (encoded), and nothing is computed with the policy, nor communicated where it is sharded.
        ``device``: whose kernels are assumed, by default its own; ``autocast`` makes the context that training runs in."""
        # fake tensors take seconds to import
        from lightning_modules.export.gathered import on_meta
        from lightning_modules.plan.plan import plan

        shards = shard_count(self.policy)
        policy = self.policy if shards == 1 else on_meta(self.policy)
        return plan(
            policy=policy,
            schedule=self.schedule,
            process=ReverseProcess(velocity=policy, transition=self.transition, sigmas=self.sigma_grid),
            window=self.window,
            advantage=self.advantage,
            reward_weights=self.reward_weights,
            optimizer=self.optimizer,
            conditioning=self._encode(prompts[:1]),
            prompts=len(prompts),
            generations=self.generations_per_prompt,
            groups_in_flight=self.groups_in_flight,
            micro_batch=self.micro_batch,
            beta=self.beta,
            seed=self.seed,
            ranks=ranks,
            layout=self.layout,
            shards=shards,
            device=self.device if device is None and shards > 1 else device,
            autocast=autocast,
        )

    # Lightning's side

    def setup(self, stage: str) -> None:
        self._kind = check_strategy(self.trainer.strategy)
        if self._kind != "sharded" and is_sharded(self.policy):
            raise ValueError(
                "the policy is still sharded, from an earlier run of this module under fsdp2: use fsdp2 again, or make a new "
                "module and give the earlier run's checkpoint as ckpt_path"
            )
        self.ranks = Ranks.connected(self.rank_timeout) if self.trainer.world_size > 1 else Ranks.alone()
        if self.trainer.precision == "16-mixed":
            raise ValueError(
                "precision 16-mixed scales the loss, which is not proven exact here; use bf16-mixed, bf16-true or 32-true"
            )
        endless = self.trainer.max_epochs == -1 and self.trainer.max_steps == -1
        if stage == "fit" and (endless or self.trainer.max_epochs not in (1, -1)):
            raise ValueError(
                f"trainer.max_epochs={self.trainer.max_epochs}: one epoch is the whole run; set trainer.max_epochs: 1 and "
                "the length of the run by the datamodule's iterations"
            )
        _ = self._frozen_weights  # now: the trainer casts the policy to its precision after this hook
        if stage == "fit" and self.beta > 0 and self._reference is None:  # of several fits: where the first one began
            self._reference = self.policy.reference()  # before a checkpoint is loaded, and before anything is sharded

    def configure_model(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, FSDP2Strategy):
            strategy.shard(self.policy)
            if self._reference is not None:
                self._reference.shard(strategy.shard)

    def on_fit_start(self) -> None:
        self._ranks_compared = False
        if self._reference is not None:
            self._reference.like(self.policy)
        self._velocity = Lockstep(self.policy)
        reference = None if self._reference is None else Lockstep(self._reference)
        self._stand_ins = [self._velocity, *([reference] if reference else [])]
        self.schedule.bind(
            Context(
                process=ReverseProcess(velocity=self._velocity, transition=self.transition, sigmas=self.sigma_grid),
                gradients=self._local_gradients(),
                backward=self._backward,
                advantage=self.advantage,
                generations=self.generations_per_prompt,
                reward_weights=self.reward_weights,
                step_weights=self.step_weights,
                clip_range=self.clip_range,
                beta=self.beta,
                reference=reference,
                sync=self.sync if self.ranks.size > 1 else "per_update",
            )
        )

    def _local_gradients(self) -> LocalGradients:
        parameters, dtype = self._trainable(), torch.bfloat16 if self.reduce_dtype == "bfloat16" else None
        if self._kind == "sharded":
            return ShardedGradients(parameters, self.policy, self.ranks, reduce_dtype=dtype)
        if self.ranks.size > 1:
            return ReplicatedGradients(parameters, self.ranks, reduce_dtype=dtype)
        return LocalGradients(parameters)

    def _backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Lightning's backward, without synchronisation: gradients are added up over the ranks by the schedule."""
        model = self.trainer.strategy.model
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            self.manual_backward(loss, retain_graph=retain_graph)

    def _check_ranks(self, batch: PromptBatch) -> None:
        if self.check_ranks_every and (not self._ranks_compared or self.iteration % self.check_ranks_every == 0):
            self._ranks_compared = True
            facts = {
                "iteration": self.iteration,
                "the batch of prompts (trainer.use_distributed_sampler: false for a DataLoader)": (
                    batch.iteration,
                    batch.prompts,
                ),
                "seed": (self.seed, self.eval_seed),
                "the frozen weights (pretrained ones, before training)": self._frozen_weights,
                "the sigma grid": self.sigma_grid.tolist(),
                "the learning rate": [group["lr"] for group in self.optimizers().param_groups],  # type: ignore[union-attr]
            }
            check_same_on_all(self.ranks, facts, self._trainable())

    @property
    def _in_step(self) -> bool:
        """Whether every rank must make the same policy calls: where weights are sharded, or each step is reduced."""
        return self.ranks.size > 1 and (self._kind == "sharded" or self.sync == "per_step")

    def _set_stand_in(self, conditioning: Conditioning) -> None:
        latents = torch.zeros(1, *self.policy.latent_shape, device=self.device)
        for field in self._stand_ins:
            field.stand_in(latents, conditioning.rows(torch.tensor([0])))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self._trainable())
        _takes_no(optimizer.step, "closure", optimizer, "its loss again, which is a whole rollout; use AdamW")
        if self.lr_scheduler is None:
            self._check_steppers(optimizer)
            return optimizer
        scheduler = self.lr_scheduler(optimizer)
        _takes_no(scheduler.step, "metrics", scheduler, "a metric at every step; use a schedule of the iteration alone")
        self._check_steppers(optimizer, scheduler)
        return [optimizer], [scheduler]

    def _steppers(self) -> Iterator[object]:
        yield from self.trainer.optimizers
        yield from (config.scheduler for config in self.trainer.lr_scheduler_configs)

    def _check_steppers(self, *steppers: object) -> None:
        """Another class's state would be loaded as if it were this one's."""
        for saved, stepper in zip(self._saved_steppers, steppers, strict=False):
            if saved != type(stepper).__name__:
                raise ValueError(
                    f"the checkpoint holds the state of {saved}, which is not that of {type(stepper).__name__}; use the "
                    "run's own config.yaml"
                )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch  # text and ids stay where they are

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = trained_part(checkpoint["state_dict"], self.policy)
        checkpoint["lean_grpo"] = {
            "iteration": self.iteration,
            "frozen": self._frozen_weights,
            "sigmas": self.sigma_grid.tolist(),
            "reference": None if self._reference is None else self._reference.fingerprint(),
            "rng": self._resume_point.rng(),
            "steppers": [type(stepper).__name__ for stepper in self._steppers()],
        }
        settle_loops(checkpoint["loops"], self.iteration)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        path = "the checkpoint" if self._trainer is None else self._trainer.ckpt_path
        saved = check_checkpoint(checkpoint, self.policy, self._frozen_weights, path)
        self.iteration = saved["iteration"]
        if self._reference is not None and saved["reference"] not in (None, self._reference.fingerprint()):
            raise ValueError(
                "the reference policy of this checkpoint's run had other weights than this config's policy starts from; "
                "point the policy at the weights that training started from, or set beta: 0"
            )
        self._resume_point.load(saved["rng"])
        self._saved_steppers = saved.get("steppers", [])

    @cached_property
    def _frozen_weights(self) -> str:
        """Fingerprint of the weights under the trained ones, as configured: before the trainer's precision casts them."""
        return frozen_fingerprint(self.policy)

    def _trainable(self) -> list[torch.nn.Parameter]:
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError(f"{type(self.policy).__name__} has no trainable parameter")
        return parameters

    def _check_noise_in_window(self, num_steps: int) -> None:
        std = self.transition.coefficients(self.sigma_grid).std
        silent = (self.window.candidates(num_steps) & (std == 0)).nonzero().flatten().tolist()
        if silent:
            raise ValueError(
                f"{type(self.transition).__name__} adds no noise at step(s) {silent}, which {type(self.window).__name__} "
                "would train: a deterministic step has no log-probability; choose another window or transition"
            )

    def _complete(self, iteration: Iteration) -> None:
        """Step the learning rate, count the iteration and log it."""
        tallies = self.ranks.gather(iteration.tally())
        metrics = iteration.metrics(self.advantage, tallies) | {"lr": self.optimizers().param_groups[0]["lr"]}  # type: ignore[union-attr]
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()  # type: ignore[union-attr]
        self.iteration += 1
        self._resume_point.complete()
        metrics["iteration"] = float(self.iteration)
        self.iteration_metrics = metrics
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=self.iteration)
        for name in ("reward", "grad_norm"):
            self.log(name, metrics.get(name, 0.0), prog_bar=True, logger=False)
        self.trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})


def _given(scored: Scored) -> Scored:
    return scored


def _at_least(value: Any, low: int, name: str, why: str = "", below: float | None = None) -> Any:
    if not value >= low or (below is not None and not value < below):  # NaN is neither
        raise ValueError(f"{name}={value}: expected at least {low}" + (f" ({why})" if why else ""))
    return value


def _takes_no(step: Callable[..., Any], argument: str, owner: object, wants: str) -> None:
    """``ValueError`` if ``step()`` cannot be called without ``argument``."""
    parameter = inspect.signature(step).parameters.get(argument)
    if parameter is not None and parameter.default is inspect.Parameter.empty:
        raise ValueError(f"{type(owner).__name__} wants {wants}")


def _above_zero(value: float, name: str, remedy: str = "") -> float:
    if not value > 0:
        raise ValueError(f"{name}={value}: expected a positive number" + (f"; {remedy}" if remedy else ""))
    return value
