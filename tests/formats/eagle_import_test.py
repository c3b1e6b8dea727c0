"""Import of published EAGLE-3 drafters.

The logits of `golden_drafters` were computed by speculators; see
`scripts/golden/eagle.py`.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.loading import load_model
from bpd_jax.formats import drafter_import
from bpd_jax.formats.json_files import Fields
from bpd_jax.models.cache import KeyValues
from tests.formats.drafter_conversion_test import (
    EAGLE_IDS as IDS,
)
from tests.formats.drafter_conversion_test import (
    GOLDEN,
    changed_copy,
    expected,
    target_params,
    with_tensors,
)
from tests.formats.drafter_conversion_test import (
    load_eagle as load,
)

NAMES = ["eagle3", "eagle3_speculators", "eagle3_1"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference(name):
    """Prompts, accepted tokens and drafts of two tokens; two rows in one batch."""
    arrays = expected(name)
    functions, params = load(GOLDEN / name, name)
    tokens = jnp.stack([arrays["tokens"]] * 2)
    features = jnp.stack([arrays["features"]] * 2)
    prompts, counts = np.array([2, 5]), np.array([3, 1])

    @jax.jit
    def run(params):
        cache = functions.prefill(params, tokens, features[:, :6], prompts, 4)
        rows, lengths = jnp.arange(2)[:, None], jnp.asarray(prompts)
        every = []
        # The second round is after `counts` accepted tokens.
        for count in (jnp.zeros(2, jnp.int32), counts):
            new = features[rows, lengths[:, None] + jnp.arange(3)]
            if count is counts:
                cache = functions.learn(params, cache, new)
            lengths += count
            following = tokens[rows, lengths[:, None] + jnp.arange(3)]
            # The text ends with the accepted tokens.
            text = jnp.where(jnp.arange(12) < lengths[:, None], tokens, 0)
            cache, states = functions.read(
                params, cache, text, lengths, following[:, 0]
            )
            logits = [functions.logits(params, states)]
            batch, heads, _, width = cache.context.values[0].shape
            drafted = KeyValues(*[jnp.zeros((1, batch, 0, heads, width))] * 2)
            for level in (1, 2):
                states, new = functions.extend(
                    params,
                    cache.context,
                    drafted,
                    following[:, level : level + 1],
                    states,
                    level,
                    jnp.ones((2, 1, level), bool),
                )
                drafted = jax.tree.map(
                    lambda *both: jnp.concatenate(both, 2), drafted, new
                )
                logits.append(functions.logits(params, states))
            every.append(jnp.concatenate(logits, 1))
        return every

    for lengths, found in zip((prompts, prompts + counts), run(params), strict=True):
        reference = arrays["logits"][:, lengths - 1].swapaxes(0, 1)
        np.testing.assert_allclose(found, reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": np.zeros(24, int), "t2d": np.ones(24, bool)}, None),
        ({"d2t": np.zeros(9, int)}, r"d2t .* shape \[9\], but config.json declares 24"),
        ({"d2t": 23 - 2 * np.arange(24)}, "changes the order"),
        ({"t2d": np.arange(24) < 9}, "config.json and t2d .* different tokens"),
    ],
    ids=str,
)
def test_an_undeclared_draft_vocabulary_is_refused(tmp_path, tensors, message):
    """A published drafter whose config.json lacks `draft_vocab_size`."""
    absent = {"t2d": None, "d2t": None, "lm_head.weight": None}
    folder = with_tensors(tmp_path / "drafter", "eagle3", {**absent, **tensors})
    fields = json.loads((folder / "config.json").read_text())
    del fields["draft_vocab_size"]
    (folder / "config.json").write_text(json.dumps(fields))
    if message is None:
        assert load(folder, "eagle3")[0].config.draft_vocabulary is None
        return
    with pytest.raises(UserError, match=message):
        load(folder, "eagle3")


def test_its_own_embeddings_and_layer_numbers_are_read(tmp_path):
    """The embeddings differ a little; `layer_ids` count the embedding as 0."""
    own = np.asarray(target_params("eagle3")["trunk"]["embedding"]) * np.float32(1.01)
    folder = with_tensors(tmp_path / "own", "eagle3", {"embed_tokens.weight": own})
    np.testing.assert_array_equal(load(folder, "eagle3")[1]["embedding"], own)
    numbers = {"eagle_config": {IDS: None, "layer_ids": [1, 2, 4]}}
    folder = changed_copy(tmp_path / "numbers", "eagle3", numbers)
    assert load(folder, "eagle3")[0].config.feature_layers == (0, 1, 3)


def test_a_drafter_is_the_default_method_of_its_model(tmp_path):
    model = GOLDEN.parent / "golden" / "llama"
    fields = json.loads((model / "config.json").read_text())
    fields |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    fields |= {"draft_vocab_size": fields["vocab_size"]}
    fields["eagle_config"] = {IDS: [0]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    trunk = load_model(str(model)).config.trunk
    config = drafter_import._describe(Fields(fields, "config.json"), trunk, "llama")
    rng = np.random.default_rng(0)
    tensors = {
        origin.name: rng.normal(0, 0.5, origin.shape).astype(np.float32)
        for origin in drafter_import._layout(config, "midlayer.").values()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    lm = api.load(str(model), eagle=str(tmp_path))
    assert lm.decoder().default_method.source.name == "eagle"
