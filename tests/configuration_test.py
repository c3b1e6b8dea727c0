import pathlib
import re

import gin
import pytest

from bpd_jax.configuration import parse
from bpd_jax.data.spec import TextTask
from bpd_jax.decoding.options import DecodeConfig
from bpd_jax.errors import UserError
from bpd_jax.models.blockwise import count_parameters
from bpd_jax.models.config import BlockHeadsConfig, BlockwiseConfig, TransformerConfig
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.settings import HeadsTrainConfig

ROOT = pathlib.Path(__file__).parent.parent
HERE = [*ROOT.glob("gin_configs/**/*.gin"), *ROOT.glob("experiments/**/*.gin")]
FILES = {file.relative_to(ROOT).as_posix(): file.read_text() for file in HERE}

RUN = """
include 'gin_configs/models/tiny.gin'
include 'gin_configs/tasks/stdlib_small.gin'
include 'gin_configs/runs/train.gin'
STEPS = 7
BATCH_SIZE = 4
LENGTH = 32
LEARNING_RATE = 1e-3
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into the working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="run.gin"):
        (tmp_path / name).write_text(text)
        return name

    return write_file


def test_builds_the_objects_from_any_working_directory(write):
    parsed = parse([write(RUN)], ["STEPS = 9"], TrainConfig)
    config = parsed.value
    assert type(config) is TrainConfig
    assert type(config.model) is BlockwiseConfig
    assert (config.steps, config.batch_size, config.length) == (9, 4, 32)
    assert config.model.trunk.vocab_size == 512
    assert config.task == TextTask(vocabulary="bpe:512", max_bytes=8_000_000)
    assert config.optimizer.learning_rate == 1e-3


def test_every_statement_remembers_its_place(write):
    parsed = parse([write(RUN)], ["STEPS = 9"], TrainConfig)
    assert parsed.files == (
        "run.gin",
        "gin_configs/models/tiny.gin",
        "gin_configs/tasks/stdlib_small.gin",
        "gin_configs/runs/train.gin",
    )
    steps = [setting.place for setting in parsed.settings if setting.name == "STEPS"]
    assert steps[0].startswith("gin_configs/runs/train.gin:")
    assert steps[1:] == ["run.gin:5", "--gin.STEPS=9"]
    description = parsed.describe()
    assert "run.gin\n  STEPS = 7   (overridden, --gin.STEPS=9)" in description
    assert description.endswith("the command line\n  STEPS = 9")


def test_saved_text_builds_the_same_objects(write):
    first = parse([write(RUN)], ["STEPS = 9"], TrainConfig)
    for text in (first.text, first.operative):
        assert parse([write(text, "saved.gin")], [], TrainConfig).value == first.value
    assert "OptimizerConfig.beta2 = 0.98" in first.operative


def test_gin_is_left_clean(write):
    parse([write(RUN)], [], TrainConfig)
    assert gin.config_str() == ""
    with pytest.raises(UserError):
        parse([write(RUN + "X = 1\n")], [], TrainConfig)
    assert gin.config_str() == ""


@pytest.mark.parametrize(
    "text, words",
    [
        ("TrainConfig.steps = = 3\n", r"bad.gin:1: "),
        ("STEPS = 5\nTrainConfig.steps = (3\n", r"bad.gin:\d: "),
        (
            "\nTrainConfg.steps = 3\n",
            r"bad.gin:2: there is nothing called TrainConfg; did you mean TrainConfig",
        ),
        (
            "TrainConfig.step = 3\n",
            r"bad.gin:1: TrainConfig has no parameter step; .*steps",
        ),
        ("TrainConfig.model = @Blockwise()\n", r"bad.gin:1: .*@Blockwise"),
        (
            "TrainConfig.steps = %STEP\nSTEPS = 3\n",
            r"bad.gin:1: the macro %STEP is not",
        ),
        ("STEPS = 3\n", r"bad.gin:1: nothing uses STEPS"),
        ("TrainConfig.steps = %gin.REQUIRED\n", r"TrainConfig.steps has no value"),
        (
            "N = %gin.REQUIRED\nTrainConfig.steps = %N\n",
            r"N has no value: add --gin.N=",
        ),
        ("TrainConfig.steps = 3\n", r"TrainConfig.\w+ has no value: no file sets it"),
        ("include 'nowhere.gin'\n", r"bad.gin:1 names .* nowhere.gin, which does not"),
        ("include 'bad.gin'\n", r"bad.gin:1 includes bad.gin, which includes itself"),
        ("import os\n", r"bad.gin:1: imports are not used"),
    ],
)
def test_bad_files_end_with_one_sentence(write, text, words):
    with pytest.raises(UserError, match=words) as error:
        parse([write(text, "bad.gin")], [], TrainConfig)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "binding, words",
    [
        ("STEP = 3", r"--gin.STEP=3: nothing uses STEP; did you mean STEPS"),
        (
            "TextTask.corpus = stdlib",
            r"--gin.TextTask.corpus=stdlib is not a gin value",
        ),
        ("TrainConfig.stepz = 3", r"--gin.TrainConfig.stepz=3: TrainConfig has no"),
        ("STEPS = -1", r"TrainConfig.steps must be a positive integer, not -1"),
        (
            "OptimizerConfig.schedule = 'sine'",
            "OptimizerConfig.schedule must be one of",
        ),
    ],
)
def test_bad_settings_end_with_one_sentence(write, binding, words):
    with pytest.raises(UserError, match=words) as error:
        parse([write(RUN)], [binding], TrainConfig)
    assert "\n" not in str(error.value)


def test_a_macro_without_effect_is_an_error_on_the_command_line_only(write):
    name = write(RUN + "TrainConfig.steps = 8\n")
    assert parse([name], [], TrainConfig).value.steps == 8
    with pytest.raises(UserError, match="nothing uses STEPS"):
        parse([name], ["STEPS = 9"], TrainConfig)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.gin, which does not exist"):
        parse([tmp_path / "nowhere.gin"], [], TrainConfig)


@pytest.mark.parametrize("name", FILES)
def test_every_file_builds_its_objects(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    given = {
        "STEPS": 10,
        "BATCH_SIZE": 8,
        "LENGTH": 64,
        "LEARNING_RATE": 1e-3,
        "TEXT_FILES": "'*.txt'",
        "TransformerConfig.vocab_size": 50257,
        "MODEL": "'base'",
        "DATA": "'texts'",
        "START": "'base'",
        "TRUNK_LEARNING_RATE": 1e-5,
    }
    kind, bindings = TrainConfig, []
    if name.startswith("gin_configs/models/"):
        kind = BlockwiseConfig
    elif name.startswith("gin_configs/tasks/"):
        kind = TextTask
    elif "DecodeConfig:" in FILES[name]:
        kind = DecodeConfig
    elif name.endswith("/heads.gin"):
        kind = HeadsTrainConfig
    included = re.findall("^include '(.*)'", FILES[name], re.MULTILINE)
    text = "".join(FILES[file] for file in (*included, name))
    bindings = [
        f"{macro} = {value}"
        for macro, value in given.items()
        if f"\n{macro} = %gin.REQUIRED" in text
    ]
    paths = [name]
    if "vocab_size" not in FILES[name]:
        bindings.append("TransformerConfig.vocab_size = 2048")
    if name.startswith("gin_configs/runs/") and kind is TrainConfig:
        paths = ["gin_configs/models/tiny.gin", "gin_configs/tasks/stdlib_small.gin"]
        paths.append(name)
    assert isinstance(parse(paths, bindings, kind).value, kind)


def test_a_file_that_sets_another_kind_builds_that(write):
    """As `bpd_jax.train` tells heads from whole models."""
    kinds = (TrainConfig, HeadsTrainConfig)
    bindings = ["MODEL = 'base'", "DATA = 'texts'"]
    found = parse([ROOT / "gin_configs/runs/heads.gin"], bindings, *kinds).value
    assert (found.model, found.heads.draft_vocabulary) == ("base", 8192)
    assert isinstance(parse([write(RUN)], [], *kinds).value, TrainConfig)


def hand_count(config: BlockwiseConfig) -> int:
    """Parameters by arithmetic, all biases included."""
    t, heads = config.trunk, config.heads
    inner = t.num_heads * t.head_width
    attention = 3 * (t.d_model * inner + inner) + inner * t.d_model + t.d_model
    widening = (2 if t.gated else 1) * (t.d_model * t.d_ff + t.d_ff)
    mlp = widening + t.d_ff * t.d_model + t.d_model
    norm = 2 * t.d_model
    trunk = t.num_layers * (attention + mlp + 2 * norm) + norm
    embeddings = (t.vocab_size + t.max_length) * t.d_model
    if heads is None:
        return trunk + embeddings
    ffn = 2 * t.d_model * heads.hidden + heads.hidden + t.d_model
    return trunk + embeddings + heads.num_ffns * ffn


@pytest.mark.parametrize(
    "name, expected",
    [
        # Per layer: attention 4·1536² + 4·1536 = 9,443,328; gated feed-forward
        # 3·1536·12288 + 2·12288 + 1536 = 56,649,216; norms 4·1536 = 6,144.
        # 18 · 66,098,688 + final norm 3,072                      = 1,189,779,456
        # embeddings (50257 + 2048) · 1536                        =    80,340,480
        # 8 heads of 2·1536·12288 + 12288 + 1536 = 37,762,560     =   302,100,480
        ("blockwise_1b5", 1_189_779_456 + 80_340_480 + 302_100_480),
        # Per layer: attention 4·384·1536 + 3·1536 + 384 = 2,364,288; feed-forward
        # 2·384·1536 + 1536 + 384 = 1,181,568; norms 4·384 = 1,536: 3,547,392.
        # Final norm 768; embeddings (50257 + 2048) · 384 = 20,085,120.
        ("rescorer_32m", 2 * 3_547_392 + 768 + 20_085_120),
        ("rescorer_61m", 12 * 3_547_392 + 768 + 20_085_120),
        # Per layer: attention 4·768·1536 + 3·1536 + 768 = 4,723,968; feed-forward
        # 2·768·3072 + 3072 + 768 = 4,722,432; norms 4·768 = 3,072: 9,449,472.
        # Final norm 1,536; embeddings (50257 + 2048) · 768 = 40,170,240.
        ("rescorer_94m", 6 * 9_449_472 + 1_536 + 40_170_240),
    ],
)
def test_parameter_counts(name, expected):
    path = f"gin_configs/models/{name}.gin"
    config = parse([path], [], BlockwiseConfig).value
    assert count_parameters(config)["total"] == hand_count(config) == expected
    # The file's own header says the same.
    assert f"{expected:,} parameters" in FILES[path]


def test_parameter_count_of_the_rescorer_of_smollm2():
    path = "gin_configs/models/rescorer_smollm2.gin"
    config = parse([path], [], BlockwiseConfig).value
    # Per layer: attention 4·128², gated feed-forward 3·128·384, two norms of 128.
    expected = 49152 * 128 + 2 * (4 * 128**2 + 3 * 128 * 384 + 2 * 128) + 128
    assert count_parameters(config)["total"] == expected
    assert f"{expected:,} parameters" in FILES[path]


def test_hand_count_knows_first_head():
    trunk = TransformerConfig(50, 1, 8, 16, 2, max_length=4)
    config = BlockwiseConfig(trunk, BlockHeadsConfig(3, 5, first_has_ffn=True))
    assert hand_count(config) == count_parameters(config)["total"]
