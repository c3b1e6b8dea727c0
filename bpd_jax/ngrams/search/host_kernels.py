"""Compiled search for the best paths of a lattice under an n-gram model.

The paths of a lattice and the back-off of a model form a small graph. Its nodes at a
position are the histories of the model that end there: the empty one, one for each
candidate token, one for each pair of neighbouring candidates that is a history, and so
on up to N-1 tokens. The row of a node contains, for every candidate w of the next
position, log P(w | history) and the next node:

    row(a b)[w] = log P(w | a b)                 if `a b w` is an n-gram
                  log alpha(a b) + row(b)[w]     otherwise

Two facts keep the graph small. Every suffix of an n-gram is an n-gram, so `a b w` is
looked up only if `b w` exists. And a node that has no n-gram with any candidate does
not need a row: its row is that of its suffix plus one weight.

A model is far larger than a processor's cache, so that sequential memory accesses would
take most of the time. Therefore the histories of one length at all positions are
processed together, in loops with independent loads.

This module needs numba; import it where it is used.
"""

from typing import Any

import numpy as np

from bpd_jax.ngrams.numba_kernels import njit
from bpd_jax.ngrams.search.table_kernels import FEW, mark_of, slot_of, walk

# Fields of a node: its position, the index of its n-gram, begin and end of the
# extensions of that n-gram, the row that it uses, and the node of its longest suffix.
POSITION, INDEX, BEGIN, END, ROW, SUFFIX = range(6)
NODE_FIELDS = 6
# Fields of a query: its node, its candidate, the key (-1 once it is resolved), the
# index of the n-gram, and begin and end of the extensions of that n-gram.
SOURCE, CANDIDATE, KEY, NGRAM, CHILD_BEGIN, CHILD_END = range(6)
QUERY_FIELDS = 6
# Fields of `row_ngrams`: the node for which the row was made, the number of candidates
# with which that node has an n-gram, and the list of these candidates by symbol.
OWNER, NUMBER, LISTED = range(3)


@njit()
def _collect_queries(
    keys: np.ndarray,
    width: int,
    symbols: np.ndarray,
    first: int,
    end: int,
    nodes: np.ndarray,
    row_ngrams: np.ndarray,
    queries: np.ndarray,
) -> int:
    """Collects the queries of the nodes `first ... end - 1`; returns their number.

    A suffix without a row has no n-gram with any candidate, and neither has a longer
    history. The queries of nodes with few extensions are resolved immediately.
    """
    for node in range(first, end):
        # Prefetches the memory.
        if nodes[BEGIN, node] < nodes[END, node]:
            queries[KEY, node - first] = keys[nodes[BEGIN, node]]
    number = 0
    for node in range(first, end):
        row = nodes[ROW, node]
        ngram, ngrams_end = nodes[BEGIN, node], nodes[END, node]
        if ngram == ngrams_end or row_ngrams[row, OWNER] != nodes[SUFFIX, node]:
            continue
        start = nodes[INDEX, node] * width
        next_symbols = symbols[nodes[POSITION, node]]
        listed, listed_end = LISTED, LISTED + row_ngrams[row, NUMBER]
        if ngrams_end - ngram > FEW:
            while listed < listed_end:
                w = row_ngrams[row, listed]
                queries[SOURCE, number], queries[CANDIDATE, number] = node, w
                queries[KEY, number] = start + next_symbols[w]
                listed += 1
                number += 1
            continue
        # Both lists are sorted by symbol.
        while ngram < ngrams_end and listed < listed_end:
            w = row_ngrams[row, listed]
            key = start + next_symbols[w]
            if keys[ngram] < key:
                ngram += 1
                continue
            if keys[ngram] == key:
                queries[SOURCE, number], queries[CANDIDATE, number] = node, w
                queries[KEY, number], queries[NGRAM, number] = -1, ngram
                number += 1
            listed += 1
    return number


@njit()
def _resolve(
    table: np.ndarray,
    bits: int,
    shift: int,
    keys: np.ndarray,
    queries: np.ndarray,
    number: int,
) -> int:
    """Resolves the remaining queries; returns the number of n-grams that exist.

    Their queries are moved to the front, in order.
    """
    low = (1 << shift) - 1
    for query in range(number):
        if queries[KEY, query] >= 0:
            queries[NGRAM, query] = table[slot_of(queries[KEY, query], bits)]
    resolved = 0
    for query in range(number):
        key, ngram = queries[KEY, query], queries[NGRAM, query]
        if key >= 0 and ngram >= 0:
            if ngram & ~low == mark_of(key, bits, shift):
                ngram &= low
            else:
                ngram = walk(table, bits, shift, keys, key, 1)
        if ngram >= 0:
            for field in range(NGRAM):
                queries[field, resolved] = queries[field, query]
            queries[NGRAM, resolved] = ngram
            resolved += 1
    number, resolved = resolved, 0
    for query in range(number):
        key, ngram = queries[KEY, query], queries[NGRAM, query]
        # Equal marks do not imply equal keys.
        if key >= 0 and keys[ngram] != key:
            ngram = walk(table, bits, shift, keys, key, 1)
        if ngram >= 0:
            for field in range(NGRAM):
                queries[field, resolved] = queries[field, query]
            queries[NGRAM, resolved] = ngram
            resolved += 1
    return resolved


@njit()
def _text_ngram(model: tuple[Any, ...], history: np.ndarray, length: int) -> int:
    """Returns the index of the n-gram of the text's last `length` symbols, or -1."""
    keys, _, _, offsets, unigrams, tables, bits, shift, width = model
    if length > len(history):
        return -1
    tail = history[len(history) - length :]
    ngram = unigrams[tail[0]]
    for order in range(1, length):
        if ngram < 0:
            return -1
        key = ngram * width + tail[order]
        first, end = offsets[order - 1][ngram], offsets[order - 1][ngram + 1]
        level = keys[order]
        if end - first > FEW:
            ngram = walk(tables[order - 1], bits[order - 1], shift, level, key, 0)
            continue
        while first < end and level[first] < key:
            first += 1
        ngram = first if first < end and level[first] == key else -1
    return ngram


@njit()
def _expand(
    model: tuple[Any, ...],
    history: np.ndarray,
    predicted: np.ndarray,
    followed: np.ndarray,
    graph: tuple[Any, ...],
    queries: np.ndarray,
    answers: np.ndarray,
    begins: np.ndarray,
) -> int:
    """Builds all nodes and rows.

    `begins[n, j]` receives the first node of the histories of length n at position j,
    and `begins[n, J + 1]` the end of that length.

    Returns:
      The node of the text before the lattice, or -1 if there are too many nodes.
    """
    keys, log_probs, log_backoffs, offsets, unigrams, tables, bits, shift, width = model
    nodes, weights, values, following, row_ngrams, _ = graph
    positions, candidates = predicted.shape
    room = nodes.shape[1]
    highest = len(keys)
    if room < positions * (candidates + 1) + highest + 1:
        return -1
    # The empty histories, one per position, and their rows: the unigrams.
    count = positions + 1
    begins[:] = 0
    for position in range(count):
        nodes[:, position] = 0
        nodes[POSITION, position] = nodes[ROW, position] = position
        nodes[SUFFIX, position] = begins[0, position] = position
        weights[position] = 0.0
    begins[0, positions + 1] = count
    state = 0
    rows = positions
    for position in range(positions):
        by_symbol = np.argsort(predicted[position])
        number = 0
        for rank in range(candidates):
            w = by_symbol[rank]
            unigram = unigrams[predicted[position, w]]
            following[position, w] = position + 1
            values[position, w] = -np.inf
            if unigram >= 0:
                values[position, w] = log_probs[0][unigram]
                row_ngrams[position, LISTED + number] = w
                number += 1
        row_ngrams[position, NUMBER], row_ngrams[position, OWNER] = number, position

    for length in range(1, highest):
        # The histories of this length: the end of the text, then those among the
        # n-grams found by the queries of the previous length.
        if count >= room:
            return -1
        first = count
        starts, level_weights = offsets[length - 1], log_backoffs[length - 1]
        ngram = _text_ngram(model, history, length)
        if ngram >= 0 and (
            starts[ngram] < starts[ngram + 1] or level_weights[ngram] != 0
        ):
            nodes[POSITION, count], nodes[SUFFIX, count] = 0, state
            nodes[INDEX, count], weights[count] = ngram, level_weights[ngram]
            nodes[BEGIN, count], nodes[END, count] = starts[ngram], starts[ngram + 1]
            state = count
            count += 1
        if length == 1:
            num_hits = 0
            for position in range(positions):
                for w in range(candidates):
                    unigram = unigrams[followed[position, w]]
                    if unigram >= 0:
                        queries[SOURCE, num_hits] = position
                        queries[CANDIDATE, num_hits] = w
                        queries[NGRAM, num_hits] = unigram
                        num_hits += 1
        if count + num_hits > room:
            return -1
        for query in range(num_hits):
            ngram = queries[NGRAM, query]
            queries[CHILD_BEGIN, query] = starts[ngram]
            queries[CHILD_END, query] = starts[ngram + 1]
            answers[query] = level_weights[ngram]
        for query in range(num_hits):
            source, w = queries[SOURCE, query], queries[CANDIDATE, query]
            position, row = nodes[POSITION, source], nodes[ROW, source]
            # </s> starts a new history, and nothing follows the lattice.
            ended = length > 1 and predicted[position, w] != followed[position, w]
            begin, end = queries[CHILD_BEGIN, query], queries[CHILD_END, query]
            ended |= position + 1 == positions
            if ended or (begin == end and answers[query] == 0):
                continue
            nodes[POSITION, count] = position + 1
            nodes[SUFFIX, count] = following[row, w]
            nodes[INDEX, count], weights[count] = queries[NGRAM, query], answers[query]
            nodes[BEGIN, count], nodes[END, count] = begin, end
            following[row, w] = count
            count += 1
        begins[length, :] = first
        for node in range(first, count):
            begins[length, nodes[POSITION, node] + 1] = node + 1
        for position in range(1, positions + 2):
            begins[length, position] = max(
                begins[length, position], begins[length, position - 1]
            )

        # The candidates with which they have n-grams.
        for node in range(first, count):
            suffix = nodes[SUFFIX, node]
            nodes[ROW, node] = nodes[ROW, suffix]
            weights[node] += weights[suffix]
        num_hits = _resolve(
            tables[length - 1],
            bits[length - 1],
            shift,
            keys[length],
            queries,
            _collect_queries(
                keys[length], width, predicted, first, count, nodes, row_ngrams, queries
            ),
        )
        for query in range(num_hits):
            answers[query] = log_probs[length][queries[NGRAM, query]]
        for query in range(num_hits):
            node, w = queries[SOURCE, query], queries[CANDIDATE, query]
            row = nodes[ROW, node]
            if row_ngrams[row, OWNER] != node:
                base, row = row, rows
                for other in range(candidates):
                    values[row, other] = weights[node] + values[base, other]
                    following[row, other] = following[base, other]
                row_ngrams[row, OWNER], row_ngrams[row, NUMBER] = node, 0
                nodes[ROW, node], weights[node] = row, 0.0
                rows += 1
            values[row, w] = answers[query]
            row_ngrams[row, LISTED + row_ngrams[row, NUMBER]] = w
            row_ngrams[row, NUMBER] += 1
    return state


@njit()
def _without_repeats(symbols: np.ndarray, head_scores: np.ndarray) -> np.ndarray:
    """Scores, with -inf for a repeated symbol with a better score at its position."""
    scores = head_scores.copy()
    positions, candidates = scores.shape
    for position in range(positions):
        for w in range(1, candidates):
            for other in range(w):
                if symbols[position, w] == symbols[position, other]:
                    worse = scores[position, w] <= scores[position, other]
                    scores[position, w if worse else other] = -np.inf
    return scores


@njit()
def _complete(
    head_scores: np.ndarray,
    alphas: np.ndarray,
    graph: tuple[Any, ...],
    begins: np.ndarray,
) -> None:
    """Sets `best[node]` to the best score of a path from there to the end."""
    nodes, weights, values, following, row_ngrams, best = graph
    positions, candidates = head_scores.shape
    best[positions] = 0.0
    for position in range(positions - 1, -1, -1):
        scored, alpha = head_scores[position], alphas[position]
        for length in range(begins.shape[0]):
            for node in range(begins[length, position], begins[length, position + 1]):
                row = nodes[ROW, node]
                if row_ngrams[row, OWNER] != node:
                    suffix = nodes[SUFFIX, node]
                    best[node] = best[suffix] + alpha * (
                        weights[node] - weights[suffix]
                    )
                    continue
                top = -np.inf
                for w in range(candidates):
                    score = scored[w] + alpha * values[row, w] + best[following[row, w]]
                    top = max(top, score)
                best[node] = top


@njit()
def best_paths(
    model: tuple[Any, ...],
    history: np.ndarray,
    predicted: np.ndarray,
    followed: np.ndarray,
    head_scores: np.ndarray,
    alphas: np.ndarray,
    graph: tuple[Any, ...],
    queries: np.ndarray,
    answers: np.ndarray,
    choices: np.ndarray,
    scores: np.ndarray,
) -> int:
    """Finds the P best paths of one lattice; exact, best first.

    Args:
      model: a tuple of
        keys: N arrays, as in `NGramModel`;
        log_probs: N arrays;
        log_backoffs: N-1 arrays;
        offsets: N-1 arrays, the `trie.child_offsets` of the orders 1 ... N-1;
        unigrams: `[width]` int64, index of each symbol's unigram, -1 for none;
        tables: N-1 hash tables of bigrams and longer n-grams, see `table_kernels`;
        bits: `[N-1]` int64, the tables have 2^bits slots;
        shift: see `table_kernels`;
        width: number of symbols.
      history: `[H]` symbols of the text, oldest first.
      predicted: `[J, W]` int64, symbols of the candidates as predictions.
      followed: `[J, W]` int64, symbols of the candidates as part of a history.
      head_scores: `[J, W]` float64; candidates with -inf are ignored, and of a symbol
        that occurs twice at a position, the one with the better score is used.
      alphas: `[J]` float64, weight of the n-gram's log-probability at each position.
      graph: memory for C nodes and their rows, a tuple of
        nodes: `[NODE_FIELDS, C]` int64;
        weights: `[C]` float64, weight that a node adds to its row;
        values: `[C, W]` float64, the rows;
        following: `[C, W]` int32, the next nodes;
        row_ngrams: `[C, LISTED + W]` int32, see the fields above;
        best: `[C]` float64, score of the best completion of each node.
      queries: `[QUERY_FIELDS, C * W]` int64, memory for look-ups.
      answers: `[C * W]` float64, memory for their results.
      choices: `[P, J]` int32, the result: indices of the candidates.
      scores: `[P]` float64, the result: scores of the paths.

    Returns:
      The number of paths, at most P; -1 if there are more than C nodes.
    """
    positions, candidates = predicted.shape
    begins = np.empty((len(model[0]), positions + 2), np.int64)
    state = _expand(
        model, history, predicted, followed, graph, queries, answers, begins
    )
    if state < 0:
        return -1
    scored = _without_repeats(predicted, head_scores)
    _complete(scored, alphas, graph, begins)
    nodes, weights, values, following, _, best = graph

    # With exact completions, the P best prefixes of every length contain those of the
    # P best paths.
    num_paths = len(scores)
    ends, gains = np.zeros(num_paths, np.int64), np.zeros(num_paths)
    new_ends, new_gains = np.zeros(num_paths, np.int64), np.zeros(num_paths)
    totals = np.empty(num_paths)
    origins = np.empty((positions, num_paths), np.int64)
    picks = np.empty((positions, num_paths), np.int64)
    ends[0] = state
    number = 1
    for position in range(positions):
        origin, pick = origins[position], picks[position]
        alpha = alphas[position]
        new_number = 0
        for path in range(number):
            row, weight = nodes[ROW, ends[path]], weights[ends[path]]
            for w in range(candidates):
                step = scored[position, w] + alpha * (weight + values[row, w])
                gain = gains[path] + step
                total = gain + best[following[row, w]]
                if total == -np.inf or (
                    new_number == num_paths and total <= totals[num_paths - 1]
                ):
                    continue
                slot = new_number if new_number < num_paths else num_paths - 1
                while slot > 0 and totals[slot - 1] < total:
                    totals[slot] = totals[slot - 1]
                    origin[slot], pick[slot] = origin[slot - 1], pick[slot - 1]
                    new_gains[slot] = new_gains[slot - 1]
                    new_ends[slot] = new_ends[slot - 1]
                    slot -= 1
                totals[slot], origin[slot], pick[slot] = total, path, w
                new_gains[slot], new_ends[slot] = gain, following[row, w]
                new_number = min(new_number + 1, num_paths)
        number = new_number
        ends[:number], gains[:number] = new_ends[:number], new_gains[:number]
    for path in range(number):
        scores[path] = gains[path]
        at = path
        for position in range(positions - 1, -1, -1):
            choices[path, position] = picks[position, at]
            at = origins[position, at]
    return number
