"""The parameters of a trained model from which the training of another begins."""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.training import hosts
from bpd_jax.training.config import TrainConfig


def initial_parameters(config: TrainConfig, start: str, mesh: Mesh) -> Params:
    """The trunk of a model, and its heads or its drafter if they match the run's.

    Args:
      start: name or folder of the model, see `TrainConfig.start`.
    """
    loaded = load_model(start, mesh=mesh)
    if config.task.trained_size is not None and loaded.task != config.task:
        raise UserError(
            f"the vocabulary {config.task.vocabulary} is trained on the task's text, "
            f"but {start} has another one: give the folder {start} as the vocabulary."
        )
    loaded_config = loaded.config
    trunk = _stated(loaded_config.trunk)
    free = ["dtype", "param_dtype"]
    if loaded_config.trunk.rotary is not None:  # No parameter depends on the length.
        free.append("max_length")
    for name, value in _stated(config.model.trunk).items():
        if name not in free and value != trunk[name]:
            raise UserError(
                f"TransformerConfig.{name} is {value!r}, but {trunk[name]!r} in "
                f"{start}: give the sizes of that model."
            )
    parts = ["trunk"]
    for part, title in (("heads", "block heads"), ("drafter", "block drafter")):
        trained, existing = getattr(config.model, part), getattr(loaded_config, part)
        if trained is None:
            continue
        if trained == existing:
            parts.append(part)
            hosts.print_once(f"start: trunk and {title} of {start}")
        else:
            reason = "it has none" if existing is None else "the sizes differ"
            hosts.print_once(f"start: trunk of {start}, with new {title} ({reason})")
    if config.model.heads is None and config.model.drafter is None:
        hosts.print_once(f"start: trunk of {start}")
    return {part: loaded.params[part] for part in parts}


def _stated(trunk: TransformerConfig) -> dict[str, Any]:
    """The fields of a trunk, with the values that None stands for."""
    fields = dataclasses.asdict(trunk)
    fields |= {"num_kv_heads": trunk.kv_heads, "head_dim": trunk.head_width}
    for name in ("qkv_bias", "output_bias", "mlp_bias"):
        if fields[name] is None:
            fields[name] = trunk.use_bias
    return fields
