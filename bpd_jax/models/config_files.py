"""The file with the configuration of a model: `model.json` of run folders."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.transformer_config import TransformerConfig, from_fields
from bpd_jax.storage import files


def save_config(config: BlockwiseConfig, path: str | os.PathLike[str]) -> None:
    """Writes `config` as JSON."""
    text = json.dumps(dataclasses.asdict(config), indent=2)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def load_config(path: str | os.PathLike[str]) -> BlockwiseConfig:
    """Reads what `save_config` wrote."""
    try:
        fields: dict[str, Any] = files.read_json(path)
        trunk = from_fields(TransformerConfig, fields["trunk"])
        heads = fields["heads"] and BlockHeadsConfig(**fields["heads"])
        # Files of earlier versions do not have it.
        drafter = fields.get("drafter")
        drafter = drafter and from_fields(BlockDrafterConfig, drafter)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not describe a model: {error}.") from error
    return BlockwiseConfig(trunk, heads or None, drafter or None)
