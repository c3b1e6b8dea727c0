"""Trained refiners: small modules that condition drafts on previous draft tokens.

The heads of a block predict tokens independently of each other. A trained refiner
belongs to a frozen model and models their dependence. Two kinds correct the logits of
the heads:

- `markov`, a low-rank bigram (the Markov head of DSpark, DeepSeek 2026);
- `recurrent`, a GRU over the previous tokens of the block (Domino, arXiv 2605.29707).

The third, `hydra`, consists of heads that also read the previous tokens of the block
(Ankner et al. 2024, arXiv 2402.05109).

A block has positions 0 … L-1 after the text. y_0 is the certain token, the model's
choice of the next token. Level j = 1 … L-1, which is head j + 1 in the paper's
counting, predicts y_j. The input is h, the final hidden state of the last token of the
text. In shapes, n is the number of paths through the block, S the width of a state and
R a rank. Only `hydra_states` requires a static level.
"""

import abc
import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from bpd_jax.base.settings import Validated, integer
from bpd_jax.base.typing import Array, Float, Int, Params
from bpd_jax.models.transformer_config import Rank, Size, Tokens


@dataclasses.dataclass(frozen=True)
class RefinerConfig(Validated, abc.ABC):
    """Sizes of the model of a refiner.

    Attributes:
      vocab_size: V, number of tokens.
      d_model: D, width of the hidden state.
      num_heads: L, length of a block.
    """

    vocab_size: Tokens
    d_model: Size
    num_heads: Annotated[int, integer(2, 1024)]

    kind: ClassVar[str]

    @property
    def levels(self) -> range:
        """Positions of the block that are predicted, 1 … L-1."""
        return range(1, self.num_heads)

    @abc.abstractmethod
    def init(self, rng: Array) -> Params:
        """Initial parameters, float32.

        All outputs are zero: a new Markov or recurrent refiner does not change logits,
        and a new Hydra head is the softmax of the language model.
        """


@dataclasses.dataclass(frozen=True)
class MarkovConfig(RefinerConfig):
    """logits_j(y) += U[y] · (s_j ∘ E[y_{j-1}]), where s_j may be a function of a state.

    Attributes:
      rank: R, width of E and U, which are shared by all levels, and of s_j.
      outputs: number of rows of U: V' for the draft vocabulary of a block drafter; None
        for V.
      level_scale: whether there is an s_j, which DSpark's Markov head does not have.
      reads_state: whether s_j = P h_j, with the state h_j that predicts y_j (the
        selector of DFlash2), for sources that provide it (`Lattice.factors`).
    """

    rank: Rank = 64
    outputs: Tokens | None = None
    level_scale: bool = True
    reads_state: bool = False

    kind = "markov"

    def init(self, rng: Array) -> Params:
        rank = self.rank
        params = {
            "embedding": jax.random.normal(rng, (self.vocab_size, rank)),
            "output": jnp.zeros((self.outputs or self.vocab_size, rank)),
        }
        if self.level_scale:
            params["scale"] = jnp.ones((self.num_heads - 1, rank))
        if self.reads_state:
            params["project"] = _kernel(
                jax.random.fold_in(rng, 1), self.d_model, self.rank
            )
        return params


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(RefinerConfig):
    """logits_j(y) += U[y] · (t_j ∘ A s_j), where s_j has read y_0 … y_{j-1}.

    s_0 = tanh(W h) and s_j = GRU(s_{j-1}, E[y_{j-1}]). The embedding E is part of the
    refiner and narrower than that of the model.

    Attributes:
      rank: R, width of E and U, and of t_j.
      width: width of the state s_j.
    """

    rank: Rank = 64
    width: Size = 128

    kind = "recurrent"

    def init(self, rng: Array) -> Params:
        rank, width = self.rank, self.width
        start, embedding, token, state, project = jax.random.split(rng, 5)
        return {
            "kernel_start": _kernel(start, self.d_model, width),
            "bias_start": jnp.zeros(width),
            "embedding": jax.random.normal(embedding, (self.vocab_size, rank)),
            "kernel_token": _kernel(token, rank, 3 * width),
            "kernel_state": _kernel(state, width, 3 * width),
            "bias_token": jnp.zeros(3 * width),
            "bias_state": jnp.zeros(3 * width),
            "project": _kernel(project, width, rank),
            "scale": jnp.ones((self.num_heads - 1, rank)),
            "output": jnp.zeros((self.vocab_size, rank)),
        }


@dataclasses.dataclass(frozen=True)
class HydraConfig(RefinerConfig):
    """state_j = h + MLP_j(h, e_0, …, e_{j-1}), the input of the model's frozen softmax.

    e_i is the model's frozen embedding of y_i.

    Attributes:
      width: width of the hidden layer of the MLP of each level.
    """

    width: Size = 256

    kind = "hydra"

    def init(self, rng: Array) -> Params:
        width, d_model = self.width, self.d_model

        def init_level(level: int) -> Params:
            inputs = 1 + level
            kernel = _kernel(jax.random.fold_in(rng, level), inputs * d_model, width)
            return {
                "kernel_in": kernel.reshape(inputs, d_model, width),
                "bias_in": jnp.zeros(width),
                "kernel_out": jnp.zeros((width, d_model)),
                "bias_out": jnp.zeros(d_model),
            }

        return {f"level_{level}": init_level(level) for level in self.levels}


REFINER_KINDS: dict[str, type[RefinerConfig]] = {
    config.kind: config for config in (MarkovConfig, RecurrentConfig, HydraConfig)
}


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
    return _scores(params, queries, candidates)


def recurrent_start(
    params: Params, hidden: Float[Array, "... D"]
) -> Float[Array, "... S"]:
    """s_0, the state before the first token of the block."""
    hidden = unit_rms(hidden.astype(jnp.float32))
    return jnp.tanh(hidden @ params["kernel_start"] + params["bias_start"])


def recurrent_step(
    params: Params, state: Float[Array, "... S"], tokens: Int[Array, "..."]
) -> Float[Array, "... S"]:
    """s_j of s_{j-1} and y_{j-1}: one step of a gated recurrent unit."""
    token = params["embedding"][tokens] @ params["kernel_token"] + params["bias_token"]
    old = state @ params["kernel_state"] + params["bias_state"]
    token_reset, token_keep, token_new = jnp.split(token, 3, axis=-1)
    old_reset, old_keep, old_new = jnp.split(old, 3, axis=-1)
    reset = jax.nn.sigmoid(token_reset + old_reset)
    keep = jax.nn.sigmoid(token_keep + old_keep)
    new = jnp.tanh(token_new + reset * old_new)
    return keep * state + (1 - keep) * new


def recurrent_queries(
    params: Params, state: Float[Array, "... S"], level: int | Int[Array, ""]
) -> Float[Array, "... R"]:
    """As `markov_queries`, from the state s_j."""
    return (state @ params["project"]) * params["scale"][level - 1]


def recurrent_scores(
    params: Params,
    state: Float[Array, "B n S"],
    candidates: Int[Array, "B #n W"],
    level: int | Int[Array, ""],
) -> Float[Array, "B n W"]:
    """As `markov_scores`, from the state s_j of each path."""
    return _scores(params, recurrent_queries(params, state, level), candidates)


def hydra_states(
    config: HydraConfig,
    params: Params,
    hidden: Float[Array, "B D"],
    embedded: Float[Array, "B n level D"],
    level: int,
) -> Float[Array, "B n D"]:
    """The states of level j, inputs of the model's softmax.

    `hidden` is h, and `embedded` the model's embeddings of y_0 … y_{j-1} of each path.
    The level j is static, because the shapes of the weights depend on it.
    """
    assert level in config.levels
    assert embedded.shape[2] == level
    weights = params[f"level_{level}"]
    w = {name: value.astype(hidden.dtype) for name, value in weights.items()}
    inner = (unit_rms(hidden) @ w["kernel_in"][0] + w["bias_in"])[:, None]
    inner += jnp.einsum("BnlD,lDF->BnF", unit_rms(embedded), w["kernel_in"][1:])
    return hidden[:, None] + jax.nn.silu(inner) @ w["kernel_out"] + w["bias_out"]


def _scores(
    params: Params, queries: Float[Array, "B n R"], candidates: Int[Array, "B #n W"]
) -> Float[Array, "B n W"]:
    """Products with the rows of the candidates, without arrays of size V."""
    return jnp.einsum("...R,...WR->...W", queries, params["output"][candidates])


def _kernel(rng: Array, inputs: int, outputs: int) -> Float[Array, "inputs outputs"]:
    return inputs**-0.5 * jax.random.normal(rng, (inputs, outputs))


def unit_rms(vectors: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Vectors scaled to a root mean square of 1.

    Embeddings that are tied to the softmax are much smaller than hidden states.
    """
    wide = vectors.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), -1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-12)).astype(vectors.dtype)
