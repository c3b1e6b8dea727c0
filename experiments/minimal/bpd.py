"""Blockwise parallel decoding with refined drafts, from a text to the numbers.

    python experiments/minimal/bpd.py                 # Python's tables of characters
    python experiments/minimal/bpd.py book.txt

One file of plain JAX and OpenFst, to be read from top to bottom: a small transformer
with L heads (Stern et al. 2018), and both refinements of its drafts (Kim et al. 2024,
arXiv:2404.09221): a smaller transformer that rescores one draft, and a Katz bigram with
the search of the p best drafts in the heads' lattice, all verified in one pass. The p
best drafts without the bigram are the control. The decoded text is always that of plain
greedy decoding.

A cache of keys and values is left out: it changes the speed, and not the numbers.
"""

import itertools
import math
import pathlib
import sys
import sysconfig
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pynini

L, K, P = 6, 8, 8  # heads; candidates of each head in the lattice; drafts of a pass
WIDTH, LAYERS, ATTENTION_HEADS, HIDDEN, LENGTH = 96, 2, 4, 384, 128
STEPS, BATCH, RATE = 400, 8, 3e-3
HEAD_WEIGHTS = np.ones(L)  # λ_h of the loss (paper, appendix C.1)
ALPHA = 1.0  # weight of a refiner beside the heads
PROMPTS, PROMPT, NEW = 8, 32, 64  # number of prompts; characters of each; decoded ones


# ---- The model: a pre-norm transformer, and heads on its last hidden state ----
def init(key, vocab_size, layers=LAYERS):
    """Random parameters; heads 2 … L begin as the language model itself."""
    keys = iter(jax.random.split(key, 3 + 6 * layers))
    n, h = ATTENTION_HEADS, WIDTH // ATTENTION_HEADS
    shapes = {"q": (WIDTH, n, h), "k": (WIDTH, n, h), "v": (WIDTH, n, h)}
    shapes |= {"o": (n, h, WIDTH), "in": (WIDTH, HIDDEN), "out": (HIDDEN, WIDTH)}

    def normal(*shape):
        return WIDTH**-0.5 * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(vocab_size, WIDTH),
        "position": normal(LENGTH, WIDTH) / 4,
        "layers": [{k: normal(*x) for k, x in shapes.items()} for _ in range(layers)],
        "head_in": normal(L - 1, WIDTH, WIDTH),
        "head_out": jnp.zeros((L - 1, WIDTH, WIDTH)),
    }


def norm(x):
    """Divides by the root of the mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def trunk(params, tokens):
    """Final hidden states `[B, T, D]` of texts `[B, T]`."""
    length = tokens.shape[1]
    past = jnp.tril(jnp.ones((length, length), bool))
    x = params["embedding"][tokens] + params["position"][:length]
    for layer in params["layers"]:
        q, k, v = (jnp.einsum("btd,dnh->bnth", norm(x), layer[name]) for name in "qkv")
        scores = jnp.einsum("bnth,bnuh->bntu", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        x += jnp.einsum("bntu,bnuh,nhd->btd", weights, v, layer["o"])
        x += jax.nn.relu(norm(x) @ layer["in"]) @ layer["out"]
    return norm(x)


def head_log_probs(params, hidden):
    """Log-probabilities `[..., L, V]` of the next L tokens from one hidden state.

    Head 1 is the language model. Heads 2 … L have a feed-forward layer each, and do not
    see each other's choices: this is what makes drafts cheap, and repetitive.
    """
    inner = jax.nn.silu(jnp.einsum("...d,jdf->...jf", hidden, params["head_in"]))
    own = hidden[..., None, :]
    others = own + jnp.einsum("...jf,jfd->...jd", inner, params["head_out"])
    states = jnp.concatenate([own, others], axis=-2)
    return jax.nn.log_softmax(states @ params["embedding"].T)


# ---- Training: one loss per head, added up ----
def loss(params, rows, weights):
    """Σ λ_h · cross-entropy of head h, which predicts the token h positions ahead."""
    log_probs, total = head_log_probs(params, trunk(params, rows)), 0.0
    for head in range(L):
        targets = rows[:, head + 1 :, None]
        at = log_probs[:, : targets.shape[1], head]
        total -= weights[head] * jnp.take_along_axis(at, targets, axis=-1).mean()
    return total


@jax.jit
def train_step(params, moments, rows, weights, step):
    """One step of Adam, with warm-up and a linear decay."""
    value, gradients = jax.value_and_grad(loss)(params, rows, weights)
    rate = RATE * jnp.minimum((step + 1) / 50, 1 - step / (STEPS + 1))
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, moments[1], gradients)
    rate *= jnp.sqrt(1 - 0.99 ** (step + 1)) / (1 - 0.9 ** (step + 1))
    new = jax.tree.map(lambda x, m, v: x - rate * m / (v**0.5 + 1e-8), params, m, v)
    return new, (m, v), value


def train(tokens, vocab_size, steps=STEPS, layers=LAYERS, weights=HEAD_WEIGHTS):
    """Parameters after `steps` steps on random windows of the text."""
    rng = np.random.default_rng(0)
    params = init(jax.random.key(0), vocab_size, layers)
    moments = (jax.tree.map(jnp.zeros_like, params),) * 2
    for step in range(steps):
        begins = rng.integers(len(tokens) - LENGTH, size=(BATCH, 1))
        rows = tokens[begins + np.arange(LENGTH)]
        params, moments, value = train_step(params, moments, rows, weights, step)
        if step % 100 == 0 or step == steps - 1:
            mean = value / weights.sum()
            print(f"step {step:4}  loss per head {mean:.3f} nats", flush=True)
    return params


# ---- The n-gram: a Katz bigram as an automaton ----
def katz(tokens, vocab_size):
    """Unigram and bigram log-probabilities, and back-off weights, of one text.

    P(w | v) = d(c) c(v w) / c(v) for bigrams of the text, else backoff(v) P(w); the
    Good-Turing factors d take from rare bigrams what the unseen ones get.
    """
    text = [vocab_size, *map(int, tokens), vocab_size + 1]  # with begin and end
    bigrams, histories = Counter(itertools.pairwise(text)), Counter(text[:-1])
    unigram = {w: c / (len(text) - 1) for w, c in Counter(text[1:]).items()}
    n = Counter(bigrams.values())  # n[r]: number of bigrams that were seen r times
    cut = 6 * n[6] / n[1]
    bigram, seen, lower = {}, Counter(), Counter()
    for (v, w), c in bigrams.items():
        d = (c + 1) * max(n[c + 1], 1) / max(n[c], 1) / c  # r*/r of Good and Turing
        d = (d - cut) / (1 - cut) if c <= 5 else 1
        bigram[v, w] = (d if 0 < d < 1 else 0.999) * c / histories[v]
        seen[v] += bigram[v, w]
        lower[v] += unigram[w]
    backoff = {v: (1 - seen[v]) / (1 - lower[v]) for v in seen}
    return [{k: math.log(p) for k, p in t.items()} for t in (unigram, bigram, backoff)]


def automaton(unigram, bigram, backoff, vocab_size):
    """State 0 has no history, state v + 1 the history v; labels are tokens plus one.

    Back-off is an arc without a label, as in the paper. A path may take it although the
    bigram is there: the score of a draft is the better one, an upper bound of Katz's.
    """
    fst = pynini.Fst()
    fst.add_states(vocab_size + 1)
    arcs = [(0, *entry) for entry in unigram.items()]
    arcs += [(v + 1, w, x) for (v, w), x in bigram.items() if v < vocab_size]
    for source, w, log_prob in arcs:
        if w < vocab_size:  # Drafts do not write the end of the text.
            fst.add_arc(source, pynini.Arc(w + 1, w + 1, -ALPHA * log_prob, w + 1))
    for v in range(vocab_size):
        fst.add_arc(v + 1, pynini.Arc(0, 0, -ALPHA * backoff[v], 0))  # No label.
        fst.set_final(v + 1)
    return fst.arcsort()


# ---- Drafting: the lattice, composed with the n-gram ----
def best_drafts(log_probs, certain, ngram, count):
    """The best paths `[count, L]` of the lattice of the heads' K best tokens.

    `log_probs` `[L - 1, V]` are those of heads 2 … L. Every draft begins with the
    `certain` token of head 1, which the model itself has written. Without an n-gram the
    scores are those of the heads ("0-gram").
    """
    lattice = pynini.Fst()
    lattice.add_states(L)
    lattice.set_start(0)
    lattice.set_final(L - 1)
    for position, row in enumerate(log_probs):
        for w in np.argsort(-row, kind="stable")[:K].tolist():
            cost = -float(row[w])
            lattice.add_arc(position, pynini.Arc(w + 1, w + 1, cost, position + 1))
    paths = lattice
    if ngram is not None:
        ngram.set_start(certain + 1)
        # Each path of the product has one of the lattice's drafts, and both costs.
        paths = pynini.rmepsilon(pynini.compose(lattice, ngram))
    best = pynini.shortestpath(paths, nshortest=count, unique=True).paths()
    drafts = []
    while not best.done():
        labels = [label - 1 for label in best.ilabels() if label]
        drafts.append((float(best.weight()), [certain, *labels]))
        best.next()
    return np.array([draft for _, draft in sorted(drafts)])


def rescored(params, text, log_probs, certain):
    """One draft `[1, L]` by Algorithm 2: the best of the heads' K tokens, one by one.

    z_j[S_j] += α r_j[S_j], where the small model `params` reads the draft so far.
    """
    draft = [certain]
    for row in log_probs:
        kept = np.argsort(-row, kind="stable")[:K]
        so_far = [*text, *draft]
        rows = np.pad(so_far, (0, LENGTH - len(so_far)))[None]
        logits = run(params, rows)[0][0, len(so_far) - 1] @ params["embedding"].T
        scores = row + ALPHA * np.asarray(jax.nn.log_softmax(logits))
        draft.append(int(kept[scores[kept].argmax()]))
    return np.array([draft])


# ---- Decoding: draft, verify in one batched pass, accept ----
@jax.jit
def run(params, rows):
    """Hidden states `[B, T, D]` of texts, and the next token at each position."""
    hidden = trunk(params, rows)
    return hidden, jnp.argmax(hidden @ params["embedding"].T, axis=-1)


def decode(params, prompt, draft, new=NEW):
    """`new` tokens, and the number of serial calls; reading the prompt is not one.

    `draft` returns drafts `[p, n]` for the log-probabilities `[L, V]` of the heads and
    the text so far.
    """
    text, calls = list(prompt), 0
    rows = np.pad(prompt, (0, LENGTH - len(prompt)))[None]
    state = run(params, rows)[0][0, len(text) - 1]
    while len(text) < len(prompt) + new:
        drafts = draft(np.asarray(head_log_probs(params, state)), text)
        count, length = drafts.shape
        rows = np.zeros((count, LENGTH), int)
        rows[:, : len(text)] = text
        rows[:, len(text) : len(text) + length] = drafts
        hidden, following = run(params, rows)  # The only pass of the model.
        calls += 1
        # A drafted token is right if the model would have written it there itself. The
        # first one is always right; the draft with the most right tokens wins.
        own = np.asarray(following)[:, len(text) : len(text) + length - 1]
        accepted = 1 + np.cumprod(own == drafts[:, 1:], axis=1).sum(axis=1)
        winner = int(accepted.argmax())
        text += drafts[winner, : accepted[winner]].tolist()
        state = hidden[winner, len(text) - 1]
    return text[len(prompt) : len(prompt) + new], calls


def main(text, steps=STEPS):
    """Trains, decodes the same prompts with each method, prints the efficiencies."""
    split = len(text) * 9 // 10
    vocabulary = {w: token for token, w in enumerate(sorted(set(text[:split])))}
    tokens = np.array([vocabulary[w] for w in text[:split]])
    held_out = [vocabulary[w] for w in text[split:] if w in vocabulary]
    size = len(vocabulary)
    print(f"Training: {LAYERS} layers with {L} heads, then a rescorer of one layer.")
    params = train(tokens, size, steps)
    small = train(tokens, size, steps, layers=1, weights=np.eye(L)[0])
    ngram = automaton(*katz(tokens, size), size)

    def several(grams):
        return lambda x, text: best_drafts(x[1:], int(x[0].argmax()), grams, P)

    methods = {
        "plain": lambda x, text: x[:1].argmax(1)[None],
        "one draft (BPD)": lambda x, text: x.argmax(1)[None],
        "one, rescored by the small model": lambda x, text: rescored(
            small, text, x[1:], int(x[0].argmax())
        ),
        f"{P} best, unrefined (0-gram)": several(None),
        f"{P} best, refined by the bigram": several(ngram),
    }
    plain = None
    begins = np.linspace(0, len(held_out) - PROMPT, PROMPTS).astype(int)
    prompts = [held_out[begin : begin + PROMPT] for begin in begins]
    print(f"Tokens per serial call, {PROMPTS} held-out prompts, {NEW} tokens each:")
    for name, draft in methods.items():
        texts, calls = zip(*(decode(params, x, draft) for x in prompts), strict=True)
        plain = plain or texts
        assert texts == plain
        print(f"  {name:<33} {PROMPTS * NEW / sum(calls):.2f}")
    names = list(vocabulary)
    for label, part in (("Prompt", prompts[0]), ("All methods write", plain[0])):
        print(f"{label}: {''.join(names[token] for token in part)!r}")


if __name__ == "__main__":
    library = pathlib.Path(sysconfig.get_path("stdlib")) / "encodings"
    files = map(pathlib.Path, sys.argv[1:] or sorted(library.glob("cp*.py")))
    main("".join(file.read_text(encoding="utf-8") for file in files))
