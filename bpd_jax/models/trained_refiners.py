"""The Markov head, a trained refiner: a low-rank bigram (DSpark, DeepSeek 2026).

The heads of a block predict tokens independently of each other. A Markov head belongs
to a frozen model and models their dependence: it corrects the logits of a head by the
token before.

A block has positions 0 … L-1 after the text. y_0 is the certain token, the model's
choice of the next token. Level j = 1 … L-1, which is head j + 1 in the paper's
counting, predicts y_j. In shapes, n is the number of paths through the block and R a
rank.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from bpd_jax.base.settings import Validated, integer
from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.models.transformer_config import Rank, Size, Tokens


@dataclasses.dataclass(frozen=True)
class MarkovConfig(Validated):
    """logits_j(y) += U[y] · (s_j ∘ E[y_{j-1}]), where s_j may be a function of a state.

    Attributes:
      vocab_size: V, number of tokens.
      d_model: D, width of the hidden state.
      num_heads: L, length of a block.
      rank: R, width of E and U, which are shared by all levels, and of s_j.
      outputs: number of rows of U: V' for the draft vocabulary of a block drafter; None
        for V.
      level_scale: whether there is an s_j, which DSpark's Markov head does not have.
      reads_state: whether s_j = P h_j, with the state h_j that predicts y_j (the
        selector of DFlash2), for sources that provide it (`Lattice.factors`).
    """

    vocab_size: Tokens
    d_model: Size
    num_heads: Annotated[int, integer(2, 1024)]
    rank: Rank = 64
    outputs: Tokens | None = None
    level_scale: bool = True
    reads_state: bool = False

    @property
    def levels(self) -> range:
        """Positions of the block that are predicted, 1 … L-1."""
        return range(1, self.num_heads)

    def init(self, rng: Array) -> Params:
        """Initial parameters, float32. U is zero: a new head does not change logits."""
        rank = self.rank
        params = {
            "embedding": jax.random.normal(rng, (self.vocab_size, rank)),
            "output": jnp.zeros((self.outputs or self.vocab_size, rank)),
        }
        if self.level_scale:
            params["scale"] = jnp.ones((self.num_heads - 1, rank))
        if self.reads_state:
            kernel = jax.random.normal(jax.random.fold_in(rng, 1), (self.d_model, rank))
            params["project"] = self.d_model**-0.5 * kernel
        return params


def markov_factors(
    params: Params, states: Float[Array, "... D"]
) -> Float[Array, "... R"] | None:
    """s_j = P h_j; None without `MarkovConfig.reads_state`."""
    if "project" not in params:
        return None
    return states.astype(jnp.float32) @ params["project"]


def markov_queries(
    params: Params,
    previous: Int[Array, "..."],
    level: int | Int[Array, ""],
    factors: Float[Array, "... R"] | None = None,
) -> Float[Array, "... R"]:
    """The vectors whose products with `params["output"]` are the corrections of y_j.

    `previous` is y_{j-1}, `level` j; `factors` are those of `markov_factors`.
    """
    assert (factors is None) == ("project" not in params)
    embedded = params["embedding"][previous]
    if "scale" in params:
        embedded *= params["scale"][level - 1]
    return embedded if factors is None else embedded * factors


def markov_scores(
    params: Params,
    previous: Int[Array, "B n"],
    candidates: Int[Array, "B #n W"],
    level: int | Int[Array, ""],
    factors: Float[Array, "B R"] | None = None,
) -> Float[Array, "B n W"]:
    """Corrections of the logits of candidates for y_j, float32.

    `previous` is y_{j-1} of each path; W candidates are for each path, or for all.
    """
    factors = None if factors is None else factors[:, None]
    queries = markov_queries(params, previous, level, factors)
    # The rows of the candidates alone, without arrays of size V.
    return jnp.einsum("...R,...WR->...W", queries, params["output"][candidates])
