"""The acceptance rules: which draft of a tree the model accepts, and its next token.

Exact acceptance takes the longest path that the model agrees with. Speculative
sampling keeps the distribution of the texts. Medusa's typical acceptance is LOSSY: it
changes the distribution.
"""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Bool, Float, Int, Num
from bpd_jax.decoding.options import SPECULATIVE, TYPICAL, StepOptions
from bpd_jax.decoding.sampling import ACCEPTANCE, choose, filtered, stream_keys
from bpd_jax.drafting.draft_tree import DraftTree, take
from bpd_jax.models.candidates import entropy
from bpd_jax.models.decoded_model import DecodedModel


@flax.struct.dataclass
class Accepted:
    """The accepted draft of every row.

    Attributes:
      path: its nodes from the root to a leaf, including rejected ones, padded with -1.
      count: number of accepted nodes, at least 1.
      rank: its rank among the drafts.
      following: the model's choice after each of its nodes; the one after the last
        accepted node is the certain token of the next call.
    """

    path: Int[Array, "B L"]
    count: Int[Array, " B"]
    rank: Int[Array, " B"]
    following: Int[Array, "B L"]


def path_through(
    tree: DraftTree,
    deepest: Int[Array, " B"],
    choices: Int[Array, "B M"],
    max_depth: int,
) -> Accepted:
    """The path from the root through `deepest` to a leaf.

    Args:
      deepest: the last accepted node of every row.
      choices: the model's next token after every node.
      max_depth: number of nodes on the longest path.
    """

    def at(values: Array, node: Array) -> Array:
        return jnp.take_along_axis(values, node[:, None], axis=1)[:, 0]

    def put(path: Array, node: Array) -> Array:
        here = jnp.arange(max_depth) == at(tree.depths, node)[:, None]
        return jnp.where(here & (node >= 0)[:, None], node[:, None], path)

    # First up to the root, then down along first children: the history also shows what
    # the best draft proposed after the last accepted token.
    count = at(tree.depths, deepest) + 1
    path = jnp.full((tree.tokens.shape[0], max_depth), -1, jnp.int32)
    node = deepest
    for _ in range(max_depth):
        path = put(path, node)
        node = jnp.where(node < 0, -1, at(tree.parents, jnp.maximum(node, 0)))
    node = deepest
    for _ in range(max_depth - 1):
        children = (tree.parents == node[:, None]) & tree.valid & (node >= 0)[:, None]
        node = jnp.where(children.any(1), jnp.argmax(children, axis=1), -1)
        path = put(path, node)
    following = jnp.take_along_axis(choices, jnp.maximum(path, 0), axis=1)
    return Accepted(path, count, at(tree.ranks, deepest), following)


def longest_match(
    tree: DraftTree,
    choices: Int[Array, "B M"],
    next_token: Int[Array, " B"],
    max_depth: int,
) -> Accepted:
    """Accepts the longest path whose tokens are the model's choices.

    Worked example: the text continues with `a b c e`, and the drafts are `a b x` and `a
    b c`. The model's choice after `a` is `b`, and after `b` it is `c`: both `b` are
    accepted and `x` is rejected. The second draft is accepted with 3 tokens, and the
    model's choice after `c`, `e`, is the certain token of the next call.

    Args:
      choices: the model's next token after every node.
      next_token: the certain token, which an accepted root must equal.
    """
    expected = jnp.where(
        tree.parents < 0, next_token[:, None], take(choices, tree.parents)
    )
    accepted = accepted_nodes(tree, tree.tokens == expected, max_depth)
    # Of several deepest nodes, argmax takes the first one, which is the best ranked.
    deepest = jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)
    return path_through(tree, deepest, choices, max_depth)


def accepted_nodes(
    tree: DraftTree, matches: Bool[Array, "B M"], max_depth: int
) -> Bool[Array, "B M"]:
    """The valid nodes that match together with all their ancestors."""
    matches &= tree.valid
    accepted = matches & (tree.parents < 0)
    # All nodes at once: each round accepts one more level.
    for _ in range(max_depth - 1):
        accepted |= matches & take(accepted, tree.parents) & (tree.parents >= 0)
    return accepted


def typical_match(
    tree: DraftTree,
    logits: Float[Array, "B M V"],
    next_token: Int[Array, " B"],
    keys: Array,
    options: StepOptions,
    max_depth: int,
) -> Accepted:
    """Accepts the longest path of typical tokens.

    A token is typical if p(token) > min(ε, δ · exp(-H(p))), where p is the model's
    distribution after its parent (Cai et al. 2024, section 2.3.1): the higher the
    entropy, the lower the threshold. The token after the path is sampled from the
    model.

    Args:
      logits: logits of the model after every node, divided by the temperature and
        filtered.
      next_token: the certain token, which an accepted root must equal.
    """
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    threshold = jnp.minimum(
        jnp.log(options.typical_epsilon),
        jnp.log(options.typical_delta) - entropy(log_probs),
    )
    before = take(log_probs, tree.parents)
    score = jnp.take_along_axis(before, tree.tokens[..., None], axis=2)[..., 0]
    typical = score > take(threshold, tree.parents)
    certain = tree.tokens == next_token[:, None]
    matches = jnp.where(tree.parents < 0, certain, typical)
    accepted = accepted_nodes(tree, matches, max_depth)
    deepest = jnp.argmax(jnp.where(accepted, tree.depths, -1), axis=1)
    after = take(logits, deepest[:, None])[:, 0]
    drawn = jax.vmap(jax.random.categorical)(keys, after).astype(jnp.int32)
    # Only the token after the last accepted node is used.
    choices = jnp.broadcast_to(drawn[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)


class _Walk(NamedTuple):
    """The state of the walk of one row.

    Attributes:
      node: the last accepted node.
      tried: the last of its children that was tried, or `node` if none was.
      probs: residual of the model's distribution after `node`; sums to 1.
      source: unnormalised log-probabilities of the distribution from which its
        remaining children were drawn.
      attempts: number of children tried so far, for the random numbers.
    """

    node: Int[Array, ""]
    tried: Int[Array, ""]
    probs: Float[Array, " V"]
    source: Float[Array, " W"]
    attempts: Int[Array, ""]


def speculative_sampling(
    tree: DraftTree,
    log_probs: Float[Array, "B M V"],
    keys: Array,
    max_depth: int,
) -> Accepted:
    """Accepts a path of the tree and draws the next token.

    Args:
      tree: the drafts, with one root: the certain token, which is accepted.
      log_probs: log-probabilities of the model after every node, with temperature and
        filters.
      keys: `[B]`, a random key for each row and serial call.
    """
    drawn = tree.sources is not None
    if tree.sources is None:
        # The children were chosen deterministically.
        candidates = tree.tokens[..., None]
        source_log_probs = jnp.zeros(candidates.shape, jnp.float32)
    else:
        candidates, source_log_probs = tree.sources.tokens, tree.sources.log_probs

    def walk_row(
        tokens: Int[Array, " M"],
        parents: Int[Array, " M"],
        valid: Array,
        model: Float[Array, "M V"],
        candidates: Int[Array, "M W"],
        source_log_probs: Float[Array, "M W"],
        key: Array,
    ) -> tuple[Array, Array]:
        index = jnp.arange(tokens.shape[0])

        def waiting(walk: _Walk) -> Array:
            return (parents == walk.node) & valid & (index > walk.tried)

        def at(node: Array, attempts: Array) -> _Walk:
            source = source_log_probs[node]
            return _Walk(node, node, jnp.exp(model[node]), source, attempts)

        def attempt(walk: _Walk) -> _Walk:
            child = jnp.argmax(waiting(walk))
            token, attempts = tokens[child], walk.attempts + 1
            tokens_of_source = candidates[walk.node if drawn else child]
            is_token = tokens_of_source == token
            source = jax.nn.softmax(walk.source)
            probability = jnp.where(is_token, source, 0.0).sum()
            threshold = jax.random.uniform(jax.random.fold_in(key, walk.attempts))
            # With probability min(1, p / q); the product needs no q above 0.
            accepted = threshold * probability < walk.probs[token]
            # What q offered more often than p is never drawn again, so that accepted
            # and redrawn tokens together are distributed as p (Leviathan et al. 2023).
            rest = jnp.maximum(walk.probs.at[tokens_of_source].add(-source), 0.0)
            # The residual of equal distributions is 0; then only rounding can reject.
            rest = jnp.where(rest.sum() > 0, rest, walk.probs)
            rejected = _Walk(
                node=walk.node,
                tried=child,
                probs=rest / rest.sum(),
                # Siblings are drawn without replacement.
                source=jnp.where(is_token & drawn, -jnp.inf, walk.source),
                attempts=attempts,
            )
            return jax.tree.map(
                lambda a, b: jnp.where(accepted, a, b), at(child, attempts), rejected
            )

        walk = jax.lax.while_loop(
            lambda walk: waiting(walk).any(), attempt, at(jnp.int32(0), jnp.int32(0))
        )
        noise = jax.random.fold_in(key, walk.attempts)
        following = jax.random.categorical(noise, jnp.log(walk.probs))
        return walk.node, following.astype(jnp.int32)

    deepest, following = jax.vmap(walk_row)(
        tree.tokens,
        tree.parents,
        tree.valid,
        log_probs,
        candidates,
        source_log_probs,
        keys,
    )
    # Only the token after the last accepted node is used.
    choices = jnp.broadcast_to(following[:, None], tree.tokens.shape)
    return path_through(tree, deepest, choices, max_depth)


# Logits to adjusted logits; the identity if options do not adjust them.
Adjust = Callable[[Float[Array, "B M V"]], Float[Array, "B M V"]]


def unchanged(logits: Array) -> Array:
    """The adjustment that changes nothing."""
    return logits


def next_tokens(
    model: DecodedModel,
    hidden: Num[Array, "B M D"],
    positions: Int[Array, "B M"],
    keys: Array,
    options: StepOptions,
    adjust: Adjust = unchanged,
) -> Int[Array, "B M"]:
    """The model's choice after every node; see `choose`."""
    if options.temperature == 0 and not options.adjusts:
        return model.greedy_tokens(hidden)
    logits = adjust(model.next_token_logits(hidden))
    if options.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return choose(logits, positions, keys, options)


def accept(
    model: DecodedModel,
    tree: DraftTree,
    hidden: Num[Array, "B M D"],
    positions: Int[Array, "B M"],
    next_token: Int[Array, " B"],
    keys: Array,
    options: StepOptions,
    max_depth: int,
    adjust: Adjust = unchanged,
) -> tuple[Accepted, Int[Array, "B M"]]:
    """Accepts a path of the tree by the rule of the options.

    Args:
      positions: index in the text of the token that follows each node.
      next_token: the certain token, which an accepted root must equal.

    Returns:
      The accepted path, and the model's choice after every node.
    """
    if options.acceptance not in (SPECULATIVE, TYPICAL):
        choices = next_tokens(model, hidden, positions, keys, options, adjust)
        return longest_match(tree, choices, next_token, max_depth), choices
    logits = filtered(adjust(model.next_token_logits(hidden)), options)
    choices = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Position 0 is that of the first root, at the end of the text.
    acceptance_keys = stream_keys(keys, positions[:, 0], ACCEPTANCE)
    if options.acceptance == SPECULATIVE:
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        accepted = speculative_sampling(tree, log_probs, acceptance_keys, max_depth)
        return accepted, choices
    accepted = typical_match(
        tree, logits, next_token, acceptance_keys, options, max_depth
    )
    return accepted, choices
