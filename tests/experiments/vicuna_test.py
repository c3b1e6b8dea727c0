"""The models of the rebuttal: sizes, recipes, and the text of a conversation."""

import pathlib

import pytest

from bpd_jax.base import configuration
from bpd_jax.decoding.chat import render_chat
from bpd_jax.models.parameters import count_parameters
from bpd_jax.training.config import TrainConfig

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "experiments" / "vicuna"


@pytest.mark.parametrize(
    ("size", "trunk", "width"), [("7b", 6738415616, 4096), ("13b", 13015864320, 5120)]
)
def test_the_trunk_has_the_sizes_of_llama(size, trunk, width):
    """The counts of LLaMA's checkpoints, whose softmax is not the embedding."""
    parsed = configuration.parse(
        [FOLDER / "joint.gin", f"gin_configs/models/vicuna_{size}.gin"],
        ["START='vicuna'", "TEXT_FILES='texts'"],
        TrainConfig,
    )
    model = parsed.value.model
    counts = count_parameters(model)
    assert counts["total"] - counts["heads"] == trunk
    # Four draft heads besides the model's own head, and no other parameters.
    assert model.block_size == 5
    layer = width * 2 * width
    assert counts["heads"] == 4 * (2 * layer + 2 * width + width)
    assert model.trunk.max_length == 2048


def test_chat_template_is_vicunas():
    template = (FOLDER / "chat_template.jinja").read_text()
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How are you?"},
    ]
    text = render_chat(template, messages, bos_token="<s>", eos_token="</s>")
    assert text.startswith("<s>A chat between a curious user and an artificial")
    assert text.endswith(
        "questions. USER: Hello! ASSISTANT: Hi.</s>USER: How are you? ASSISTANT:"
    )
