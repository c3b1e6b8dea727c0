import dataclasses
import pathlib
import re

import gin
import pytest

from bpd_jax.base.configuration import parse
from bpd_jax.base.errors import UserError
from bpd_jax.data.example_task import ExampleTask
from bpd_jax.data.text_task import TextTask
from bpd_jax.decoding.options import DecodeConfig
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.parameters import count_parameters
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.training.config import TrainConfig
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.refiner_sources import RefinerTrainConfig
from experiments.catalog import STUDIES

ROOT = pathlib.Path(__file__).parent.parent.parent
PATHS = [*ROOT.glob("gin_configs/**/*.gin"), *ROOT.glob("experiments/**/*.gin")]
FILES = {file.relative_to(ROOT).as_posix(): file.read_text() for file in PATHS}

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


def test_a_short_name_means_the_same_file(write):
    write(RUN.replace("gin_configs/", ""))
    short = parse(["run.gin"], [], TrainConfig)
    full = parse([write(RUN, "full.gin")], [], TrainConfig)
    assert short.value == full.value
    assert short.files[1:] == full.files[1:]
    assert short.files[1] == "gin_configs/models/tiny.gin"


def test_a_file_of_the_working_directory_comes_first(write, tmp_path):
    (tmp_path / "runs").mkdir()
    write("include 'gin_configs/runs/train.gin'\nSTEPS = 5\n", "runs/train.gin")
    write(RUN.replace("gin_configs/runs/", "runs/").replace("STEPS = 7\n", ""))
    assert parse(["run.gin"], [], TrainConfig).value.steps == 5


def test_a_file_may_be_included_several_times(write):
    names = [write("include 'gin_configs/runs/train.gin'", f"{x}.gin") for x in "abc"]
    parsed = parse([*names, write(RUN)], [], TrainConfig)
    assert parsed.files.count("gin_configs/runs/train.gin") == 4
    assert parsed.value == parse(["run.gin"], [], TrainConfig).value


def test_every_statement_records_its_location(write):
    parsed = parse([write(RUN)], ["STEPS = 9"], TrainConfig)
    parts = ("models/tiny.gin", "tasks/stdlib_small.gin", "runs/train.gin")
    assert parsed.files == ("run.gin", *(f"gin_configs/{part}" for part in parts))
    steps = [setting.location for setting in parsed.settings if setting.name == "STEPS"]
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


@pytest.mark.parametrize(
    "text, message",
    [
        ("TrainConfig.steps = = 3\n", r"bad.gin:1: "),
        ("STEPS = 5\nTrainConfig.steps = (3\n", r"bad.gin:\d: a bracket"),
        ("\nTrainConfg.steps = 3\n", r"bad.gin:2: unknown name .* mean TrainConfig"),
        ("TrainConfig.step = 3\n", r"bad.gin:1: TrainConfig has no .* step; .*steps"),
        (
            "TrainConfig.model = @Blockwise()\n",
            r"unknown name Blockwise; did you mean B",
        ),
        ("TrainConfig.steps = %STEP\nSTEPS = 3\n", r"bad.gin:1: the macro %STEP is"),
        ("STEPS = 3\n", r"bad.gin:1: nothing uses STEPS"),
        ("TrainConfig.steps = %gin.REQUIRED\n", r"TrainConfig.steps has no value"),
        ("N = %gin.REQUIRED\nTrainConfig.steps = %N\n", r"N has no value: add --gin.N"),
        ("TrainConfig.steps = 3\n", r"TrainConfig.\w+ has no value: no file sets it"),
        ("include 'nowhere.gin'\n", r"bad.gin:1 names .* nowhere.gin, which does not"),
        ("include 'bad.gin'\n", r"bad.gin:1 includes bad.gin, which includes itself"),
        ("import no.such\n", r"bad.gin:1: No module named 'no'"),
        ("STEPS = gelu\n", r"bad.gin:1: gelu is not a gin value: text needs quotes"),
    ],
)
def test_invalid_files_are_reported_in_one_sentence(write, text, message):
    with pytest.raises(UserError, match=message) as error:
        parse([write(text, "bad.gin")], [], TrainConfig)
    assert "\n" not in str(error.value)
    assert gin.config_str() == ""


@pytest.mark.parametrize(
    "binding, message",
    [
        ("STEP = 3", r"--gin.STEP=3: nothing uses STEP; did you mean STEPS"),
        ("STEPS = true", r"--gin.STEPS=true: .* constants are True"),
        ("STEPS = [1, 2", r"--gin.STEPS=\[1, 2: a bracket"),
        ("STEPS = 'a", r"--gin.STEPS='a: "),
        ("X = books/*.txt", r"text needs quotes, as in --gin.X=\"'books/\*.txt'\", "),
        ("STEPS = " + "9" * 5000, r"--gin.STEPS=9+ … 9+: "),
        ("STEPS = 0x" + "f" * 5000, r"--gin.STEPS=0xf+ … f+: Exceeds the limit"),
        ("x/TrainConfig.steps = 5", r"nothing uses x/TrainConfig: .* @x/TrainConfig"),
        ("DecodeOptions.seed = 5", r"nothing uses DecodeOptions: .* @DecodeOptions"),
        ("STEPS = '\udcff'", r"--gin.STEPS=.* is not a gin value"),
        ("STEPS = " + "x" * 5000, r"--gin.STEPS=x+ … x+: x+ … x+ is not a gin value"),
        ("BlockwiseConfig.heads = 5", r"heads must be @BlockHeadsConfig\(\)"),
        ("STEPS = %STEPS", "cycle of macros"),
        ("STEPS = {[]: 1}", r"--gin.STEPS=\{\[\]: 1\}: unhashable type: 'list'"),
        ("TextTask.vocabulary = 'bpe:" + "9" * 5000 + "'", r"is not bpe:N"),
        ("vocabulary_size.task = 5", r"vocabulary_size.task must be @TextTask\(\) or"),
        ("TASK = @TextTask", r"task must be @TextTask\(\) or @ExampleTask\(\), not"),
        ("TASK = @a/singleton()", r"singleton.constructor has no value: no file"),
        ("STEPS = -1", r"TrainConfig.steps must be a positive integer, not -1"),
    ],
)
def test_invalid_bindings_are_reported_in_one_sentence(write, binding, message):
    with pytest.raises(UserError, match=message) as error:
        parse([write(RUN)], [binding], TrainConfig)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_singleton_of_no_class_is_refused(write):
    bindings = ["a/singleton.constructor = 5", "TASK = @a/singleton()"]
    with pytest.raises(UserError, match=r"a/singleton.constructor must be a class"):
        parse([write(RUN)], bindings, TrainConfig)


def test_a_macro_without_effect_is_an_error_on_the_command_line_only(write):
    name = write(RUN + "TrainConfig.steps = 8\n")
    assert parse([name], [], TrainConfig).value.steps == 8
    with pytest.raises(UserError, match="nothing uses STEPS"):
        parse([name], ["STEPS = 9"], TrainConfig)


def test_scopes_and_imports(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    write("import gin\n\n\n@gin.register\ndef twice(x):\n    return 2 * x\n", "own.py")
    name = write(
        "import own\n" + RUN + "BlockwiseConfig.trunk = @small/TransformerConfig()\n"
        "small/TransformerConfig.d_model = @twice()\ntwice.x = 32\n"
    )
    bindings = ["small/TransformerConfig.num_layers = 1"]
    parsed = parse([name], bindings, TrainConfig)
    trunk = parsed.value.model.trunk
    assert (trunk.d_model, trunk.num_layers, trunk.d_ff) == (64, 1, 512)
    assert parse([write(parsed.text)], [], TrainConfig).value == parsed.value


def test_a_file_without_effect_is_an_error(write):
    mesh = "gin_configs/meshes/gpu_8.gin"
    assert parse([write(RUN), mesh], [], TrainConfig).value.mesh.fsdp == 8
    for paths in ([mesh], [write("# Nothing.\n")]):
        with pytest.raises(UserError, match=f"--gin_file={paths[0]} has no effect"):
            parse(paths, [], DecodeConfig)


def with_includes(name: str) -> str:
    """The text of a file after that of the files that it includes."""
    included = re.findall("^include '(.*)'", FILES[name], re.MULTILINE)
    return "".join(map(with_includes, included)) + FILES[name]


# What a user gives for each macro and parameter that a file requires.
REQUIRED_VALUES = {
    "STEPS": 10,
    "BATCH_SIZE": 8,
    "LENGTH": 64,
    "LEARNING_RATE": 1e-3,
    "TEXT_FILES": "'*.txt'",
    "TransformerConfig.vocab_size": 2048,
    "MODEL": "'base'",
    "KIND": "'markov'",
    "DATA": "'texts'",
    "START": "'base'",
    "TRUNK_LEARNING_RATE": 1e-5,
    "ADD_EVERY": 5,
}
TINY = ("gin_configs/models/tiny.gin", "gin_configs/tasks/stdlib_small.gin")
TRAIN = "gin_configs/runs/train.gin"


def target_and_files(name: str) -> tuple[type, list[str]]:
    """What a file builds, and the files on the command line, itself among them."""
    folder = name.split("/")[1]
    if name.startswith("gin_configs/models/"):
        return BlockwiseConfig, [name]
    if "DecodeConfig:" in with_includes(name):
        return DecodeConfig, [name]
    if "StudyConfig:" in FILES[name]:
        return StudyConfig, [name]
    if name.endswith(("heads.gin", "drafter.gin")) and "/heads/" not in name:
        # Which layers a drafter reads depends on the model.
        needs_layers = name == "gin_configs/runs/drafter.gin"
        more_files = ["experiments/smollm2/drafter.gin"] if needs_layers else []
        return HeadsTrainConfig, [name, *more_files]
    if name.endswith("runs/refiner.gin"):
        return RefinerTrainConfig, [name]
    if folder == "tasks":
        return TrainConfig, [TINY[0], TRAIN, name]
    if folder in ("meshes", "heads") and name.startswith("gin_configs/"):
        return TrainConfig, [*TINY, TRAIN, name]
    if not re.search(
        "^include 'gin_configs/models/", with_includes(name), re.MULTILINE
    ):
        return TrainConfig, [*TINY, name]
    if "finetune.gin" in name:
        return TrainConfig, [name, "gin_configs/tasks/squad.gin"]
    return TrainConfig, [name]


@pytest.mark.parametrize("name", FILES)
def test_every_file_builds_its_objects(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    kind, paths = target_and_files(name)
    text = "\n" + "".join(map(with_includes, paths))
    folder = name.split("/")[1]
    study = folder if folder in STUDIES else "table4"
    bindings = [f"StudyConfig.study = {study!r}"] if kind is StudyConfig else []
    bindings += [
        f"{macro} = {value}"
        for macro, value in REQUIRED_VALUES.items()
        # The last binding takes effect.
        if re.findall(rf"\n{macro} = (.*)", text)[-1:] == ["%gin.REQUIRED"]
    ]
    if kind in (TrainConfig, BlockwiseConfig):
        bindings.append("TransformerConfig.vocab_size = 2048")
    value = parse(paths, bindings, kind).value
    assert isinstance(value, kind)
    if kind is TrainConfig and name.startswith("gin_configs/tasks/"):
        of_examples = "ExampleTask" in FILES[name]
        assert isinstance(value.task, ExampleTask if of_examples else TextTask)
    if folder in STUDIES:
        assert value.tasks
        assert value.parsed


@pytest.mark.parametrize(
    "mesh", [name for name in FILES if name.startswith("gin_configs/meshes/")]
)
def test_pretraining_has_the_papers_settings_on_every_mesh(mesh, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = parse(["gin_configs/runs/pretrain.gin", mesh], [], TrainConfig).value
    assert config.tokens_per_step == 2**20
    assert config.model.trunk.vocab_size == 50257
    assert config.lambdas == (1.0,) * 9
    assert config.task == ExampleTask("c4")


def test_finetuning_needs_a_task_file_before_or_after_it(monkeypatch):
    monkeypatch.chdir(ROOT)
    run, task = "gin_configs/runs/finetune.gin", "gin_configs/tasks/squad.gin"
    bindings = ["START = 'base'"]
    config = parse([run, task], bindings, TrainConfig).value
    assert config == parse([task, run], bindings, TrainConfig).value
    # Two examples per step, unpacked; early stopping holds out training examples.
    squad = ExampleTask("squad", validation_from="train", packed=False)
    assert (config.start, config.task, config.batch_size) == ("base", squad, 2)
    assert config.patience is not None
    with pytest.raises(UserError) as error:
        parse([run], bindings, TrainConfig)
    line = FILES[TRAIN].splitlines().index("  task = %TASK") + 1
    assert str(error.value) == (
        "no file names a task: add --gin_file=gin_configs/tasks/NAME.gin "
        f"({TRAIN}:{line} requires it)."
    )


@pytest.mark.parametrize("number", [3, 6, 9])
def test_ablation_changes_only_the_number_of_heads(number, monkeypatch):
    monkeypatch.chdir(ROOT)
    pretraining = parse(["gin_configs/runs/pretrain.gin"], [], TrainConfig).value
    config = parse([f"experiments/heads/heads_{number}.gin"], [], TrainConfig).value
    assert config.model.heads is not None
    assert config.model.heads.num_heads == number
    heads = dataclasses.replace(config.model.heads, num_heads=9)
    model = dataclasses.replace(config.model, heads=heads)
    assert dataclasses.replace(config, model=model) == pretraining


def test_parse_builds_the_kind_that_the_file_sets(write):
    """`bpd_jax.train` distinguishes runs of heads and runs of models this way."""
    kinds = (TrainConfig, HeadsTrainConfig)
    bindings = ["MODEL = 'base'", "DATA = 'texts'"]
    config = parse([ROOT / "gin_configs/runs/heads.gin"], bindings, *kinds).value
    assert (config.model, config.heads.draft_vocabulary) == ("base", 8192)
    assert isinstance(parse([write(RUN)], [], *kinds).value, TrainConfig)
    bindings.append("TrainConfig.steps = 5")
    with pytest.raises(UserError, match="nothing uses TrainConfig"):
        parse([ROOT / "gin_configs/runs/heads.gin"], bindings, *kinds)


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
        # Embeddings and softmax 2 · 32000 · 768; per layer 4·768² + 3·768·3072 + 2·768;
        # final norm 768.
        ("rescorer_vicuna", 49_152_000 + 2 * 9_438_720 + 768),
        # Width 128: embeddings 49152 · 128 = 6,291,456; per layer 4·128² + 9·128² +
        # 2·128 = 213,248; final norm 128. Width 64: 3,145,728; 53,376; 64.
        ("rescorer_smollm2", 6_291_456 + 2 * 213_248 + 128),
        ("rescorer_smollm2_deep", 6_291_456 + 12 * 213_248 + 128),
        ("rescorer_smollm2_narrow", 3_145_728 + 2 * 53_376 + 64),
    ],
)
def test_parameter_counts(name, expected):
    path = f"gin_configs/models/{name}.gin"
    config = parse([path], [], BlockwiseConfig).value
    assert count_parameters(config)["total"] == expected
    # The header of the file and docs/training.md state the same number.
    assert f"{expected:,} parameters" in FILES[path]
    if "smollm2" in name or "vicuna" in name:
        return
    page = (ROOT / "docs" / "training.md").read_text()
    assert re.search(rf"^\| `{name}` \|.*\| {expected:,} \|$", page, re.MULTILINE)
