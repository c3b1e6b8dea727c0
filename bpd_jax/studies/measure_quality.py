"""Scores decoded texts against their references."""

from bpd_jax.evaluation.lambada import passage_scores, split_last_word
from bpd_jax.evaluation.metrics import metric_of
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import QualityRecord
from bpd_jax.studies.tasks import LAMBADA, plain_text


def quality_records(context: StudyContext, task: str) -> list[QualityRecord]:
    """Scores the decoded texts of a task by its metric.

    The passages of LAMBADA are not decoded but scored by teacher forcing; their last
    words are the references.

    Args:
      context: model, examples and texts.
      task: name of the task.

    Returns:
      One record for each passage, with an empty `prediction`, or for each example that
      has references; none for a task without a metric.

    Raises:
      UserError: a package that the metric needs is not installed.
    """
    loaded, examples = context.loaded(task), context.examples(task)
    metric = metric_of(task)
    if task == LAMBADA:
        passages = [example.prompt for example in examples]
        scores = passage_scores(
            loaded.model,
            loaded.tokenizer.encode,
            passages,
            begin_of_text=loaded.begin_of_text,
            batch_size=context.config.batch_size,
        )
        return [
            QualityRecord(
                task, example.index, example.part, "", [split_last_word(passage)[1]], s
            )
            for example, passage, s in zip(examples, passages, scores, strict=True)
        ]
    if metric is None:
        return []
    records = []
    for example, decoded in zip(examples, context.texts(task), strict=True):
        if references := list(example.references):
            text = plain_text(loaded, decoded.output_ids)
            scored = metric(text, references)
            records.append(
                QualityRecord(
                    task, example.index, example.part, text, references, scored
                )
            )
    return records
