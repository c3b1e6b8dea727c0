"""Adjustments of the model's logits that depend on the text: penalties and bans.

They are functions of a position, its text and its logits, as the logits processors of
transformers. The drafts of a tree are texts too: every node is judged by the text of
its own path. Exact acceptance therefore stays exact under every drafting method.
"""

import jax
import jax.numpy as jnp

from bpd_jax.base.typing import Array, Float, Int
from bpd_jax.decoding.options import StepOptions
from bpd_jax.drafting.draft_tree import DraftTree, take


def texts_of_nodes(
    tokens: Int[Array, "B S"], lengths: Int[Array, " B"], tree: DraftTree, depth: int
) -> tuple[Int[Array, "B M S"], Int[Array, "B M"]]:
    """The text up to and including each node of a tree, and its length.

    Args:
      tokens: the texts before the drafts, with room for `depth` more tokens.
      tree: the drafts, merged by prefix.
      depth: number of nodes on the longest path.
    """
    batch, size = tree.tokens.shape
    texts = jnp.broadcast_to(tokens[:, None], (batch, size, tokens.shape[1]))
    rows, nodes = jnp.arange(batch)[:, None], jnp.arange(size)
    node = jnp.broadcast_to(nodes, (batch, size))
    for _ in range(depth):
        known = jnp.maximum(node, 0)
        place = lengths[:, None] + take(tree.depths, known)
        # Beyond the root, the write is dropped.
        place = jnp.where(node < 0, tokens.shape[1], place)
        texts = texts.at[rows, nodes, place].set(take(tree.tokens, known), mode="drop")
        node = jnp.where(node < 0, -1, take(tree.parents, known))
    return texts, lengths[:, None] + tree.depths + 1


def adjusted(
    logits: Float[Array, "B M V"],
    texts: Int[Array, "B M S"],
    lengths: Int[Array, "B M"],
    starts: Int[Array, " B"],
    options: StepOptions,
) -> Float[Array, "B M V"]:
    """The logits of the next token after each text, adjusted.

    Args:
      texts: prompt and text so far; the values after them are arbitrary.
      options: options of which some `adjusts` the logits.
    """
    adjust = jax.vmap(_adjusted, (0, 0, 0, None, None))
    return jax.vmap(adjust, (0, 0, 0, 0, None))(logits, texts, lengths, starts, options)


def _adjusted(
    logits: Float[Array, " V"],
    text: Int[Array, " S"],
    length: Int[Array, ""],
    start: Int[Array, ""],
    options: StepOptions,
) -> Float[Array, " V"]:
    vocab_size, slots = logits.shape[0], text.shape[0]
    index = jnp.arange(slots)
    nowhere = jnp.full_like(text, vocab_size)
    if options.penalty != 1:
        seen = jnp.where(index < length, text, nowhere)
        seen = jnp.zeros(vocab_size, bool).at[seen].set(True, mode="drop")
        penalty = options.penalty
        lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
        logits = jnp.where(seen, lower, logits)

    def ban(logits: Array, tokens: Array, when: Array | bool = True) -> Array:
        tokens = jnp.where(when, tokens, vocab_size)
        return logits.at[tokens].set(-jnp.inf, mode="drop")

    if (size := options.no_repeat_ngram_size or 0) > 0:
        # The n-grams of the text whose first n - 1 tokens are its last n - 1 tokens.
        repeats = index + size <= length
        for offset in range(size - 1):
            at = jnp.clip(length - (size - 1) + offset, 0, slots - 1)
            repeats &= jnp.roll(text, -offset) == text[at]
        logits = ban(logits, jnp.roll(text, -(size - 1)), repeats)
    for word in options.bad_words_ids or ():
        *before, last = word
        if not before and last in options.end_tokens:
            continue  # As in transformers: the end of the text is no bad word.
        matches = length >= len(word) - (len(word) == 1)
        for offset, token in enumerate(before):
            at = jnp.clip(length - len(before) + offset, 0, slots - 1)
            matches &= text[at] == token
        logits = ban(logits, jnp.array([last]), matches)
    ends = jnp.array(options.end_tokens or [vocab_size])
    if options.min_length:
        logits = ban(logits, ends, length < options.min_length)
    if options.min_new_tokens:
        logits = ban(logits, ends, length - start < options.min_new_tokens)
    if options.suppress_tokens:
        logits = ban(logits, jnp.array(options.suppress_tokens))
    if options.begin_suppress_tokens:
        at_begin = length == start
        logits = ban(logits, jnp.array(options.begin_suppress_tokens), at_begin)
    return logits
