"""Model FLOPs of a blockwise model, computed from its sizes.

Recomputation and the optimizer are not counted. A multiply-add is two FLOPs, and
attention counts all pairs of positions, as in the definition of MFU by PaLM (Chowdhery
et al. 2022, appendix B).
"""

import jax

from bpd_jax.models.attachments import by_path
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.parameters import parameter_shapes


def trunk_weights(model: BlockwiseConfig) -> int:
    """Number of weights of the trunk's matrices that a token uses, without softmax."""
    leaves, trunk = by_path(parameter_shapes(model)["trunk"]), model.trunk
    total = sum(leaf.size for name, leaf in leaves.items() if name.endswith("/kernel"))
    for name, leaf in leaves.items():
        if name.endswith("_experts") and trunk.experts is not None:
            total += leaf.size // trunk.experts * trunk.chosen_experts
    return total


def head_weights(model: BlockwiseConfig) -> int:
    """Number of weights of the matrices of all block heads, without a softmax."""
    heads = parameter_shapes(model).get("heads", {})
    return sum(leaf.size for name, leaf in heads.items() if name.startswith("kernel"))


def attention_flops(model: BlockwiseConfig, queries: int, keys: int) -> float:
    """FLOPs of attention scores and weighted sums of all layers, forward."""
    trunk = model.trunk
    width = trunk.num_layers * trunk.num_heads * trunk.head_width
    return 2.0 * 2.0 * queries * keys * width


def train_flops(
    model: BlockwiseConfig, batch_size: int, length: int, drawn: int | None = None
) -> float:
    """FLOPs of a training step: forward, and twice as many backward.

    6 · N · positions for the N weights of the trunk and of each head with its softmax
    (V · D weights, tied or not), and 3 times the attention of `length` × `length`
    positions of each row. For a block drafter see `drafter_train_flops`. `drawn` is the
    number of positions of a row that heads 2 … L, or a block drafter, are trained at;
    None for all, which is for heads alone.
    """
    trunk, later_positions = model.trunk, length if drawn is None else drawn
    softmax = trunk.vocab_size * trunk.d_model
    first = 0.0
    if model.heads is not None and model.heads.first_has_ffn:
        first = head_weights(model) / model.block_size
    later = head_weights(model) - first + (model.block_size - 1) * softmax
    weights = length * (trunk_weights(model) + softmax + first)
    weights += later_positions * later
    attention = batch_size * attention_flops(model, length, length)
    total = 6.0 * weights * batch_size + 3.0 * attention
    if model.drafter is not None:
        assert isinstance(model.drafter, BlockDrafterConfig)
        anchors = drawn or 0
        functions = DrafterFunctions(model.drafter.resolve(trunk), trunk)
        total += drafter_train_flops(functions, batch_size, length, anchors)
        # The gradient of the softmax, which is not frozen here.
        levels = model.drafter.block_size - 1
        size = trunk.vocab_size * trunk.d_model
        total += 2.0 * size * batch_size * anchors * levels
    return total


def forward_flops(model: BlockwiseConfig, batch_size: int, length: int) -> float:
    """FLOPs of a forward pass of the trunk, without the softmax."""
    attention = batch_size * attention_flops(model, length, length)
    return 2.0 * trunk_weights(model) * batch_size * length + attention


def heads_train_flops(
    model: BlockwiseConfig, positions: int, *, teacher: bool
) -> float:
    """FLOPs of a training step of the heads of a frozen model.

    The gradients of a softmax that is not the heads' own, and of what the heads read,
    are not computed. With a `teacher` the model's own distributions are targets, too.
    """
    assert model.heads is not None
    softmax = model.draft_vocab_size * model.trunk.d_model
    shapes = parameter_shapes(model)["heads"]
    first = {"kernel_in": 1, "kernel_condition": 1, "kernel": model.heads.layers}
    reading = sum(
        shapes[name].size // layers for name, layers in first.items() if name in shapes
    )
    passes = (6.0 if model.heads.own_softmax else 4.0) + (2.0 if teacher else 0.0)
    levels = (model.block_size - 1) * passes * softmax
    return positions * (6.0 * head_weights(model) - 2.0 * reading + levels)


def drafter_train_flops(
    drafter: DrafterFunctions, rows: int, length: int, anchors: int
) -> float:
    """FLOPs of a training step of a block drafter: forward, and twice backward.

    Keys, values and the fusion of layers are computed for every token of a text, other
    projections for every query of every block. Each query attends to the window and the
    block. The gradient of the frozen softmax is not computed. `rows` texts have
    `length` tokens and `anchors` blocks each.
    """
    config, target = drafter.config, drafter.target
    queries, levels = rows * anchors * config.queries, config.block_size - 1
    total = 0.0
    shapes = jax.eval_shape(drafter.init, jax.random.key(0))
    for path, leaf in by_path(shapes).items():
        names = path.split("/")
        if names[-1] != "kernel":
            continue
        counts = queries
        if names[0] == "fusion":
            counts = rows * length
        elif names[-2] in ("key", "value"):
            counts += rows * length
        elif names[0] == "query_condition":
            counts = rows * anchors
        total += 6.0 * leaf.size * counts
        if names[-2] == "query":
            # Scores and weighted sums of the layer; the kernel is [D, N, H].
            keys = min(config.window or length, length) + config.queries
            total += 3.0 * 4.0 * queries * keys * leaf.shape[1] * leaf.shape[2]
    softmax = (config.draft_vocabulary or target.vocab_size) * target.d_model
    return total + 4.0 * softmax * rows * anchors * levels


def serial_call_flops(
    model: BlockwiseConfig, batch_size: int, nodes: int, context: int
) -> float:
    """FLOPs of a serial call: a forward pass over the drafts, and all heads.

    `nodes` draft tokens of a row, to which head 1 is applied, attend to `context`
    tokens.
    """
    trunk = model.trunk
    softmax = trunk.vocab_size * trunk.d_model
    per_row = 2.0 * nodes * (trunk_weights(model) + softmax)
    per_row += attention_flops(model, nodes, context)
    if model.heads is not None:
        drafting = (model.block_size - 1) * model.draft_vocab_size * trunk.d_model
        per_row += 2.0 * (head_weights(model) + drafting)
    return batch_size * per_row
