"""What the benchmark of refiners reports of a method: its gains, and its vocabulary."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.methods import Method
from bpd_jax.evaluation.efficiency import block_efficiency, paired_interval
from bpd_jax.models.attachments import VOCABULARY


def names_of_files(paths: Sequence[str]) -> list[str]:
    """The names of files of prompts, under which their results are reported."""
    names = [pathlib.Path(path).stem for path in paths]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(
                f"two files of prompts are called {name}: give them different names."
            )
    return names


def share_of_tokens(vocabulary: np.ndarray, texts: Sequence[Generation]) -> float:
    """The share of decoded tokens that are in a draft vocabulary."""
    tokens = np.concatenate([text.output_ids for text in texts])
    return float(np.isin(tokens, vocabulary).mean())


def draft_vocabularies(loaded: LanguageModel, decoder: Decoder) -> dict[str, Any]:
    """The draft vocabularies of the sources that have one, `[V']` token ids."""
    drafter = decoder.assets.drafter
    sources = {
        "heads": loaded.params.get("heads", {}),
        "block": {} if drafter is None else drafter.params,
    }
    return {k: part[VOCABULARY] for k, part in sources.items() if VOCABULARY in part}


def refinement(
    method: Method, replayed: Mapping[Method, Sequence[Generation]]
) -> dict[str, list[dict[str, Any]]]:
    """The gains of a method over the same one with fewer refiners, as reported.

    They are those over the method without any refiner and, of several refiners, without
    each. Empty if none of these was replayed.
    """
    count = max(len(method.refiners) - 1, 0)
    fewer = [(), *itertools.combinations(method.refiners, count)]
    others = [dataclasses.replace(method, refiners=rest, text="") for rest in fewer]
    gains = [
        # The name under which it was replayed, which can be an alias.
        {"over": other.name, **gain_over(replayed[method], replayed[other])}
        for other in replayed
        if other in others and other != method
    ]
    return {"refinement": gains} if gains else {}


def gain_over(
    generations: Sequence[Generation], base: Sequence[Generation]
) -> dict[str, Any]:
    """The gain in tokens per call over other drafts of the same texts, as reported."""
    return {
        "gain": block_efficiency(generations) / block_efficiency(base) - 1,
        "paired_interval": list(paired_interval(generations, base)),
    }
