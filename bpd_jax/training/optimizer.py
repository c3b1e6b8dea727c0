"""The optimizer that an `OptimizerConfig` describes."""

import jax
import optax

from bpd_jax.base.typing import PyTree
from bpd_jax.training.config import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate by step, counted from 0, for a run of `steps` steps."""
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    warmup_steps = config.warmup_steps
    if warmup_steps < 1:
        warmup_steps *= steps
    warmup_steps = round(warmup_steps)
    decay_steps = max(steps - warmup_steps, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(
            peak, decay_steps, alpha=config.final_fraction
        ),
        "linear": optax.linear_schedule(peak, final, decay_steps),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup_steps:
        return decay
    # The warmup begins above 0, because a step with a rate of 0 would be wasted.
    warmup = optax.linear_schedule(peak / warmup_steps, peak, max(warmup_steps - 1, 1))
    return optax.join_schedules([warmup, decay], [warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Builds the optimizer for a run of `steps` steps."""
    parts = [
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decays,
        )
    ]
    if config.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.trunk_learning_rate is not None:
        # The whole update of AdamW is proportional to the learning rate.
        share = config.trunk_learning_rate / config.learning_rate

        def slow_trunk(updates: PyTree, params: PyTree) -> PyTree:
            del params
            trunk = jax.tree.map(lambda x: share * x, updates["trunk"])
            return {**updates, "trunk": trunk}

        parts.append(optax.stateless(slow_trunk))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


def decays(params: PyTree) -> PyTree:
    """A mask of the parameters with weight decay: all but biases and norm scales.

    They are recognised by name, because a stacked bias has two axes like a kernel.
    """

    def is_weight(path: tuple, _: object) -> bool:
        names = [
            entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)
        ]
        return not names[-1].startswith(("bias", "scale"))

    return jax.tree_util.tree_map_with_path(is_weight, params)
