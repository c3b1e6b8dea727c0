"""Preprocessors of seqio tasks, which convert texts to token ids."""

from collections.abc import Mapping

from bpd_jax.data.example_task import SEPARATOR, Dataset
from bpd_jax.data.quiet_tensorflow import seqio, tf

# Number of texts that are tokenized together, in parallel.
_BATCH = 32

Features = Mapping[str, seqio.Feature]


def tokenize(dataset: tf.data.Dataset, output_features: Features) -> tf.data.Dataset:
    """Tokenizes the texts of all features."""
    dataset = dataset.batch(_BATCH).map(
        lambda example: {
            name: feature.vocabulary.encode_tf(example[name])
            for name, feature in output_features.items()
        },
        num_parallel_calls=2,
        deterministic=True,
    )
    return dataset.unbatch()


def add_end_of_text(
    dataset: tf.data.Dataset, output_features: Features
) -> tf.data.Dataset:
    """Adds the end-of-text token before and after each document.

    The token before lets the model predict the document's first token.
    """
    end = [output_features["targets"].vocabulary.eos_id]
    return dataset.map(
        lambda example: {"targets": tf.concat([end, example["targets"], end], 0)},
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def cut_targets(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, int] | None = None
) -> tf.data.Dataset:
    """Splits documents into pieces of `sequence_length["targets"]` tokens, if given."""
    if not sequence_length:
        return dataset
    length = sequence_length["targets"]
    pieces = tf.data.Dataset.from_tensor_slices
    return dataset.flat_map(lambda example: pieces(example).batch(length))


def write_prompts(dataset: tf.data.Dataset, source: Dataset) -> tf.data.Dataset:
    """Converts records of the data set `source` to `targets` and, if any, `inputs`.

    Records without a target are omitted.
    """

    def write(record: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        field, _, list_name = source.target.partition("/")
        target = record[field]
        if list_name:
            answers = target[list_name]
            target = tf.cond(tf.size(answers) > 0, lambda: answers[0], lambda: "")
        texts = {"targets": target}
        if source.prompt is not None:
            texts["inputs"] = tf.strings.join(
                [
                    part
                    for literal, name in source.prompt_parts
                    for part in ([literal, record[name]] if name else [literal])
                ]
            )
        return texts

    dataset = dataset.map(write, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.filter(lambda texts: tf.strings.length(texts["targets"]) > 0)


def frame_examples(
    dataset: tf.data.Dataset, output_features: Features
) -> tf.data.Dataset:
    """Adds the end-of-text token E around an example, and the separator s into it.

    Inputs `a b` become `E a b s`, and targets `x y` become `x y E`; a row contains
    their concatenation.
    """
    end = [output_features["targets"].vocabulary.eos_id]

    def frame(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        framed = {"targets": tf.concat([example["targets"], end], 0)}
        # `token_documents` requests only the targets.
        if "inputs" in output_features:
            separator = output_features["inputs"].vocabulary.encode(SEPARATOR)
            framed["inputs"] = tf.concat([end, example["inputs"], separator], 0)
        return framed

    return dataset.map(frame, num_parallel_calls=tf.data.AUTOTUNE)
