"""The preprocessors of seqio tasks: from texts to token ids."""

from collections.abc import Mapping

from bpd_jax.data.example_task import SEPARATOR, Dataset
from bpd_jax.data.quiet_tensorflow import seqio, tf

# Number of texts tokenized at once, in parallel.
_BATCH = 32

Features = Mapping[str, seqio.Feature]


def tokenize(dataset: tf.data.Dataset, output_features: Features) -> tf.data.Dataset:
    """Turns the texts of all features into token ids, many at a time."""
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
    """Puts the end-of-text token before and after each document.

    The one before lets the model predict the document's first token.
    """
    end = [output_features["targets"].vocabulary.eos_id]
    return dataset.map(
        lambda example: {"targets": tf.concat([end, example["targets"], end], 0)},
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def cut_documents(
    dataset: tf.data.Dataset, sequence_length: Mapping[str, int] | None = None
) -> tf.data.Dataset:
    """Cuts documents into pieces of `sequence_length["targets"]`, the last shorter."""
    if not sequence_length:
        return dataset
    length = sequence_length["targets"]

    def pieces(example: Mapping[str, tf.Tensor]) -> tf.data.Dataset:
        tokens = example["targets"]
        starts = tf.data.Dataset.range(0, tf.size(tokens, tf.int64), length)
        return starts.map(lambda start: {"targets": tokens[start : start + length]})

    return dataset.flat_map(pieces)


def write_prompts(dataset: tf.data.Dataset, about: Dataset) -> tf.data.Dataset:
    """Turns records of a data set into the texts `inputs`, if any, and `targets`.

    Records without a target are left out.
    """

    def write(record: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        field, _, of_list = about.target.partition("/")
        target = record[field]
        if of_list:
            answers = target[of_list]
            target = tf.cond(tf.size(answers) > 0, lambda: answers[0], lambda: "")
        texts = {"targets": target}
        if about.prompt is not None:
            texts["inputs"] = tf.strings.join(
                [
                    part
                    for literal, name in about.prompt_parts
                    for part in ([literal, record[name]] if name else [literal])
                ]
            )
        return texts

    dataset = dataset.map(write, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.filter(lambda texts: tf.strings.length(texts["targets"]) > 0)


def frame_examples(
    dataset: tf.data.Dataset, output_features: Features
) -> tf.data.Dataset:
    """Puts the end-of-text token around an example, and the separator into it.

    Inputs `a b` become `E a b s` and targets `x y` become `x y E`, so that a row holds
    them one after the other.
    """
    end = [output_features["targets"].vocabulary.eos_id]

    def frame(example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        framed = {"targets": tf.concat([example["targets"], end], 0)}
        # Callers that request the targets alone, such as `token_documents`.
        if "inputs" in output_features:
            separator = output_features["inputs"].vocabulary.encode(SEPARATOR)
            framed["inputs"] = tf.concat([end, example["inputs"], separator], 0)
        return framed

    return dataset.map(frame, num_parallel_calls=tf.data.AUTOTUNE)
